"""Generated logs with every kind of irregularity, for any machine: rollouts, interactions and feedback."""

from __future__ import annotations

from hypothesis import strategies as st
from join_support import RUN_ID, SECOND_US, TwoLogs, feedback, interaction, request
from stream_support import located, rollout

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import SignalKind, Tick, UserWish


@st.composite
def timed_logs(draw):
    """Draw rollouts with deadlines, duplicates, ticks and junk, at irregular event times."""
    records, at_ms = [], 1_000
    for offset in range(draw(st.integers(1, 24))):
        at_ms += draw(st.integers(-200, 1_000))
        group = draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["rollout", "rollout", "rollout", "tick", "junk"]))
        deadline = 1_000_000 * (2 + group)
        record = {
            "rollout": rollout(f"g{group}", draw(st.integers(0, 2)), group_size=3, deadline_at=deadline),
            "tick": Tick(source="s", at=0),
            "junk": None,
        }[kind]
        records.append(located(record, offset, at_ms=max(0, at_ms), value=b"%d" % offset))
    return records


USERS = ("u", "v")


@st.composite
def two_logs(draw) -> TwoLogs:
    """Draw interactions and feedback of two users with every kind of irregularity, over a little more than a minute."""
    logs = TwoLogs()
    at_s = 100.0
    votes: list = []
    for _ in range(draw(st.integers(1, 22))):
        at_s = max(0.0, at_s + draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 9.0, -0.5])))
        name = draw(st.sampled_from("abc"))
        kind = draw(
            st.sampled_from(["serve", "serve", "vote", "vote", "vote", "again", "wish", "tick", "erase", "junk"])
        )
        # A record is written some time after the event that it describes.
        seen = round((at_s - draw(st.sampled_from([0.0, 0.4, 2.0, 12.0, 35.0]))) * SECOND_US)
        if kind == "serve":
            logs.write(
                at_s,
                interaction(
                    name,
                    served_at=seen,
                    user_id=USERS[name == "c"],
                    consent=draw(st.sampled_from([True, True, True, False])),
                    sampled_tokens=draw(st.sampled_from([7, 7, 7, 0])),
                    run_id=draw(st.sampled_from([RUN_ID, RUN_ID, RUN_ID, "other"])),
                ),
            )
        elif kind == "vote":
            event, corrects = draw(st.sampled_from("efgh")), draw(st.sampled_from([None, None, "e", "f"]))
            signal = draw(st.sampled_from([SignalKind.THUMB, SignalKind.THUMB, SignalKind.RETRY, SignalKind.EDIT_MADE]))
            value = -1.0 if signal is SignalKind.THUMB and draw(st.booleans()) else 1.0
            corrects = None if corrects == event else corrects
            vote = feedback(
                name,
                f"{event}",
                kind=signal,
                value=None if corrects and draw(st.booleans()) else value,
                corrects=corrects,
                observed_at=seen,
                user_id=draw(st.sampled_from([USERS[name == "c"]] * 4 + ["thief"])),
            )
            votes.append(vote)
            logs.write(at_s, vote)
        elif kind == "again" and votes:
            logs.write(at_s, draw(st.sampled_from(votes)))
        elif kind == "wish":
            wish, user = draw(st.sampled_from(list(UserWish))), draw(st.sampled_from(USERS))
            logs.write(at_s, request(wish, seen / SECOND_US, user, request_id=f"{wish}-{user}-{at_s}-{seen}"))
        elif kind == "tick":
            logs.write(at_s, Tick("t", 0), draw(st.sampled_from([Topic.INTERACTIONS, Topic.FEEDBACK])))
        elif kind == "erase":
            logs.erase(at_s, Topic.INTERACTIONS, draw(st.sampled_from("ab")))
        elif kind == "junk":
            logs.write(at_s, None, draw(st.sampled_from([Topic.INTERACTIONS, Topic.FEEDBACK])))
    return logs


TURNS = st.lists(st.integers(0, 1), max_size=12)
"""The order in which a reader alternates between two topics."""
