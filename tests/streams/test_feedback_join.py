"""The state machine of the feedback join, over logs in memory: any interleaving, duplication, correction and kill."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from generated_logs import TURNS, two_logs
from hypothesis import given, settings
from hypothesis import strategies as st
from join_oracle import endings
from join_support import (
    RULES,
    RUN_ID,
    SECOND_US,
    TwoLogs,
    feedback,
    interaction,
    join_of,
    located,
    played,
    request,
    settings_of,
)
from machine_log import check_kills, records_of
from pydantic import ValidationError

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Document, Outcome, OutcomeExclusion, Segment, SignalKind, Tick, UserWish
from tidemill.streams.join import join_state
from tidemill.streams.join.config import JoinSettings, RewardMap, SignalRule
from tidemill.streams.machine import Output, Rejected

LATER_S = 3_000.0


def outcomes(outputs: list[Output]) -> list[Outcome]:
    assert not [o for o in outputs if isinstance(o, Rejected)]
    return [record for record in records_of(outputs) if isinstance(record, Outcome)]


def reasons(outputs: list[Output]) -> list[str]:
    return [o.reason for o in outputs if isinstance(o, Rejected)]


def joined(logs: TwoLogs, **changes) -> list[Output]:
    return played(logs, **changes)[1]


def one(logs: TwoLogs, **changes) -> Outcome:
    """Return the only outcome, after ticks at `LATER_S`."""
    (outcome,) = outcomes(joined(logs.tick(LATER_S), **changes))
    return outcome


def served(name: str = "a", **changes) -> TwoLogs:
    """Return logs with one interaction whose record is written at 100.5 s."""
    return TwoLogs().write(100.5, interaction(name, **changes))


def test_a_thumb_ends_an_interaction_after_it_settled():
    logs = served().write(102, feedback("a", "e"))
    assert outcomes(joined(logs.tick(102.999))) == []
    (outcome,) = outcomes(joined(logs.tick(103)))
    assert (outcome.reward, outcome.exclusion, outcome.revision) == (1.0, "", 0)
    assert (outcome.closed_at, outcome.feedback_at) == (103 * SECOND_US, 101 * SECOND_US)
    assert (outcome.topic, outcome.partition, outcome.offset) == ("interactions", 0, 0)
    (use,) = outcome.signals
    assert (use.event_id, use.value, use.contribution, use.topic, use.offset) == ("e", 1.0, 1.0, "feedback", 0)


def test_without_a_deciding_signal_it_waits_for_the_longest_horizon_and_the_grace():
    logs = served().write(102, feedback("a", "e", kind=SignalKind.TOOL_ERROR))
    assert outcomes(joined(logs.tick(124.999))) == []
    assert one(logs).closed_at == 125 * SECOND_US
    assert one(logs).reward == -1.0


def test_silence_is_an_exclusion_or_what_the_map_says():
    assert (one(served()).reward, one(served()).exclusion) == (None, "no_signal")
    paid = RewardMap(name="paid", rules=RULES, no_signal=-0.125)
    outcome = one(served(), map=paid)
    assert (outcome.reward, outcome.exclusion, outcome.signals) == (-0.125, "", [])
    assert outcome.map_version.startswith("paid-")


def test_a_record_read_again_gives_nothing():
    join = join_of(settings_of(settle_s=0))
    logs = served().write(102, feedback("a", "e")).write(102.001, Tick("t", 0), Topic.INTERACTIONS)
    records = [record for found in logs.inputs.values() for record in found]
    assert [len(join.observe(record)) for record in [*records, *records]] == [0, 0, 1, 0, 0, 0]
    assert [join.next_offset(topic) for topic in logs.inputs] == [1, 1]
    assert dict(join.counts) == {}


AT, AGAIN = 103 * SECOND_US, feedback("a", "e")
WEIGHTLESS = {
    SignalKind.THUMB: SignalRule(horizon_s=3, weight=1),
    SignalKind.EDIT_KEPT_LATER: SignalRule(horizon_s=900),
}
RETRY = feedback("a", "e", kind=SignalKind.RETRY)
ONE: dict[str, tuple[TwoLogs, dict[str, object]]] = {
    "an interaction counts once": (
        served()
        .write(100.6, interaction("a"))
        .write(102, AGAIN)
        .tick(110)
        .write(111, interaction("a"))
        .write(112, interaction("a", user_id="other")),
        {"reward": 1.0, "offset": 0},
    ),
    "signals without weight are observed": (
        served().write(102, feedback("a", "m", kind=SignalKind.EDIT_MADE)).write(103, AGAIN),
        {"reward": 1.0, "observed": {"edit_made": 1.0, "thumb": 1.0}},
    ),
    "an opt-out after the end leaves no more to learn": (
        served()
        .write(102, AGAIN)
        .tick(104)
        .write(105, request(UserWish.OPT_OUT, 99))
        .tick(105)
        .write(106, feedback("a", "f", value=-1.0, corrects="e")),
        {"reward": 1.0},
    ),
    "an opt-out long ago still holds": (
        TwoLogs()
        .write(1, request(UserWish.OPT_OUT, 1))
        .tick(50_000)
        .write(50_001, interaction("a", served_at=50_000 * SECOND_US))
        .write(50_001.5, request(UserWish.OPT_IN, 50_001))
        .tick(60_000),
        {"exclusion": "opted_out"},
    ),
    "a demand is for no later time than it was read at": (
        TwoLogs().write(90, request(UserWish.ERASE, 10_000)).write(100.5, interaction("a")),
        {"exclusion": "no_signal"},
    ),
    "in time": (TwoLogs().write(130, interaction("a")).write(130, AGAIN), {"exclusion": ""}),
    "too late": (TwoLogs().write(130.001, interaction("a")).write(130.001, AGAIN), {"exclusion": "too_late"}),
    "an erased ending says nothing of what was seen": (
        served().write(101, RETRY).tick(102).write(103, request(UserWish.ERASE, 103)),
        {"exclusion": "erased", "observed": {}, "signals": []},
    ),
    "a tombstone erases an interaction": (
        served()
        .write(101, RETRY)
        .tick(102)
        .erase(103, Topic.INTERACTIONS, "a")
        .erase(103, Topic.INTERACTIONS, "unknown"),
        {"exclusion": "erased", "closed_at": AT},
    ),
    "a tombstone erases one event": (
        served("a/b").write(102, feedback("a/b", "c/d")).tick(102.5).erase(102.6, Topic.FEEDBACK, "a/b/c/d"),
        {"exclusion": "no_signal", "closed_at": 125 * SECOND_US},
    ),
    "a tombstone erases early feedback": (
        TwoLogs().write(99, AGAIN).erase(99.5, Topic.FEEDBACK, "a/e").write(100.5, interaction("a")),
        {"exclusion": "no_signal"},
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_how_one_interaction_ends(name):
    logs, expected = ONE[name]
    outcome = one(logs)
    assert {field: getattr(outcome, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("changes", "closed_s"), [({"close_on": []}, 125), ({"map": RewardMap(rules=WEIGHTLESS)}, 108)], ids=str
)
def test_without_a_deciding_kind_it_waits_for_the_longest_horizon_with_weight(changes, closed_s):
    logs = served().write(102, feedback("a", "e")) if closed_s == 125 else served()
    assert one(logs, **changes).closed_at == closed_s * SECOND_US


def test_a_tombstone_of_an_unknown_interaction_erases_its_feedback():
    assert joined(TwoLogs().write(99, AGAIN).erase(99.5, Topic.INTERACTIONS, "a").tick(LATER_S)) == []


def test_a_tombstone_of_one_signal_of_an_ended_interaction_corrects_its_reward():
    logs = served().write(102, feedback("a", "e")).tick(104).erase(105, Topic.FEEDBACK, "a/e").tick(110)
    found = [(o.revision, o.reward, o.previous_reward, o.exclusion) for o in outcomes(joined(logs))]
    assert found == [(0, 1.0, None, ""), (1, None, 1.0, "no_signal")]
    assert len(outcomes(joined(logs.write(111, request(UserWish.ERASE, 111)).tick(112)))) == 2
    erased = served().write(102, feedback("a", "e")).tick(104).write(105, request(UserWish.ERASE, 105))
    assert len(outcomes(joined(erased.erase(106, Topic.FEEDBACK, "a/e").tick(110)))) == 1


OPT_OUT, OPT_IN = UserWish.OPT_OUT, UserWish.OPT_IN


@pytest.mark.parametrize(
    ("wishes", "read_s", "exclusion"),
    [
        ([(OPT_OUT, 99)], 100.7, "opted_out"),
        ([(OPT_OUT, 100)], 100.7, "opted_out"),
        ([(OPT_OUT, 100.001)], 100.7, ""),
        ([(OPT_OUT, 98), (OPT_IN, 99)], 100.7, ""),
        ([(OPT_IN, 98), (OPT_OUT, 99)], 100.7, "opted_out"),
        # Read in the opposite order: the time of a wish decides, not the order of reading.
        ([(OPT_OUT, 99), (OPT_IN, 98)], 100.7, "opted_out"),
        ([(OPT_OUT, 99)], 103, ""),
    ],
)
def test_opting_out_and_in_again(wishes, read_s, exclusion):
    logs = served()
    for wish, since in wishes:
        logs.write(read_s, request(wish, since))
    assert one(logs.write(102, feedback("a", "e"))).exclusion == exclusion


def test_both_clocks_must_pass():
    logs = served()
    logs.write(500, Tick("t", 0), Topic.INTERACTIONS)
    assert outcomes(joined(logs)) == []
    logs.write(124, Tick("t", 0), Topic.FEEDBACK)
    assert outcomes(joined(logs)) == []
    logs.write(125, Tick("t", 0), Topic.FEEDBACK)
    assert len(outcomes(joined(logs))) == 1


def test_the_next_deadline_is_reported():
    join = join_of(settings_of())
    assert join.next_deadline_us() is None
    logs = served()
    join.observe(logs.inputs[Topic.INTERACTIONS][0])
    assert join.next_deadline_us() == 100_500_000
    assert join.next_offset(Topic.INTERACTIONS) == 0
    join.observe(located(Topic.FEEDBACK, Tick("t", 0), 0, 100.5))
    assert join.next_deadline_us() == 125_000_000
    assert [entry.open for entry in join._store.entries() if isinstance(entry, join_state.InteractionState)] == [True]
    assert join.next_offset(Topic.INTERACTIONS) == 1
    join.observe(located(Topic.FEEDBACK, feedback("a", "e"), 1, 102))
    # The next interaction may have the same time, and is processed before the feedback.
    assert join.next_deadline_us() == 102_001_000
    assert (join.clock_us(Topic.INTERACTIONS), join.clock_us(Topic.FEEDBACK)) == (100_500_000, 102_000_000)
    join.observe(located(Topic.INTERACTIONS, Tick("t", 0), 1, 102.001))
    assert join.next_deadline_us() == 103_000_000


def test_feedback_of_an_unknown_interaction_is_rejected_after_a_bound():
    logs = TwoLogs().write(95, feedback("a", "e")).write(96, feedback("a", "f")).write(103, interaction("a"))
    outputs = joined(logs.tick(LATER_S))
    (rejected,) = [o for o in outputs if isinstance(o, Rejected)]
    assert "unknown interaction" in rejected.reason
    original = logs.inputs[Topic.FEEDBACK][0]
    assert rejected.located == replace(original, record=None)
    (outcome,) = records_of(outputs)
    assert [use.event_id for use in outcome.signals] == ["f"]


@pytest.mark.parametrize(
    ("observed_s", "used"), [(97.99, True), (97.98, False), (110, True), (110.001, False)], ids=str
)
def test_a_horizon_has_two_ends(observed_s, used):
    vote = feedback("a", "e", observed_at=round(observed_s * SECOND_US))
    join, found = played(served(latency_ms=10.0).write(102, vote).tick(LATER_S))
    (outcome,) = outcomes(found)
    assert (outcome.exclusion == "") == used
    assert join.counts.get("out_of_horizon", 0) == (0 if used else 1)
    assert outcome.observed == ({"thumb": 1.0} if used else {})


def test_a_signal_after_the_end_is_a_revision_if_it_changes_the_reward():
    logs = served().write(102, feedback("a", "e")).tick(104)
    logs.write(105, feedback("a", "m", kind=SignalKind.EDIT_MADE))
    logs.write(106, feedback("a", "r", kind=SignalKind.RETRY, observed_at=105 * SECOND_US))
    logs.write(300, feedback("a", "f", value=None, corrects="e", observed_at=104 * SECOND_US))
    first, second, third = outcomes(joined(logs.tick(301)))
    assert [(o.revision, o.reward, o.previous_reward) for o in (first, second, third)] == [
        (0, 1.0, None),
        (1, 0.5, 1.0),
        (2, -0.5, 0.5),
    ]
    assert (second.closed_at, second.feedback_at) == (106 * SECOND_US, 105 * SECOND_US)
    assert second.observed == {"thumb": 1.0, "edit_made": 1.0, "retry": 1.0}


def test_a_late_signal_after_silence_is_a_revision():
    logs = served().tick(126).write(130, feedback("a", "e"))
    first, second = outcomes(joined(logs.tick(131)))
    assert (first.exclusion, first.revision) == ("no_signal", 0)
    assert (second.reward, second.exclusion, second.revision, second.previous_reward) == (1.0, "", 1, None)


def test_only_feedback_of_the_served_user_counts():
    logs = served().write(102, feedback("a", "e", user_id="thief")).tick(LATER_S)
    outputs = joined(logs)
    assert reasons(outputs) == ["user 'thief' was not served interaction 'a'"]
    assert [o.exclusion for o in records_of(outputs)] == ["no_signal"]


def test_early_feedback_of_another_user_does_not_count_either():
    logs = TwoLogs().write(99, feedback("a", "e", user_id="thief")).write(100.5, interaction("a"))
    outputs = joined(logs.write(101, feedback("a", "e")).tick(LATER_S))
    assert len(reasons(outputs)) == 1
    assert [o.reward for o in records_of(outputs)] == [1.0]


def test_too_many_signals_are_refused():
    logs = served()
    for n in range(4):
        logs.write(102, feedback("a", f"e{n}", kind=SignalKind.RETRY))
    outputs = joined(logs.tick(LATER_S), max_signals=3)
    assert reasons(outputs) == ["the interaction has 3 signals already"]
    early = TwoLogs()
    for n in range(4):
        early.write(99, feedback("a", f"e{n}"))
    early.write(100.5, interaction("a")).tick(LATER_S)
    assert reasons(joined(early, max_signals=3)) == ["the interaction has 3 signals already"]


@pytest.mark.parametrize(
    ("changes", "reason"), [({"consent": False}, "no_consent"), ({"sampled_tokens": 0}, "no_tokens")], ids=str
)
def test_what_an_interaction_itself_excludes(changes, reason):
    logs = served(**changes).write(102, feedback("a", "e"))
    outcome = one(logs)
    assert (outcome.reward, outcome.exclusion, outcome.signals) == (None, reason, [])
    assert outcome.observed == {"thumb": 1.0}
    assert outcomes(joined(logs.write(LATER_S + 1, feedback("a", "f")).tick(LATER_S + 2))) == [outcome]


def test_an_opt_out_is_stored_once():
    logs = TwoLogs().write(1, request(UserWish.OPT_OUT, 1)).write(2, request(UserWish.OPT_OUT, 1)).tick(3)
    join, _ = played(logs)
    (wishes,) = join._store.entries()
    assert len(wishes.wishes) == 1


def test_an_opt_in_is_forgotten_after_a_while():
    logs = TwoLogs().write(1, request(UserWish.OPT_OUT, 1)).write(2, request(UserWish.OPT_IN, 2)).tick(3)
    join, _ = played(logs)
    assert len(join.take_changes().entries) == 1
    for topic in logs.inputs:
        join.observe(located(topic, Tick("t", 0), 9, LATER_S))
    assert join.take_changes().entries["wishes/0/u"] is None


def test_erasing_ends_open_interactions_and_closes_ended_ones_to_revisions():
    logs = served("a").write(100.6, interaction("b")).write(100.6, interaction("c", user_id="other"))
    logs.write(101, feedback("a", "e")).tick(103)
    logs.write(103, request(UserWish.ERASE, 102)).write(104, feedback("a", "f", value=-1.0, corrects="e"))
    logs.write(105, interaction("d", served_at=101 * SECOND_US))
    logs.write(106, interaction("n", served_at=103 * SECOND_US))
    found = outcomes(joined(logs.tick(LATER_S)))
    assert [(o.interaction_id, o.exclusion) for o in found] == [
        ("a", ""),
        ("b", "erased"),
        ("d", "erased"),
        ("c", "no_signal"),
        ("n", "no_signal"),
    ]


def test_erasing_also_removes_early_feedback():
    logs = TwoLogs().write(99, feedback("a", "e", observed_at=98 * SECOND_US))
    logs.write(99, feedback("a", "o", user_id="other")).tick(100).write(100, request(UserWish.ERASE, 100)).tick(101)
    outputs = joined(logs.tick(LATER_S))
    assert [o.located.key for o in outputs if isinstance(o, Rejected)] == [b"a/o"]
    since = TwoLogs().write(99, feedback("a", "e", observed_at=99 * SECOND_US)).write(100, request(UserWish.ERASE, 98))
    assert one(since.write(100.5, interaction("a"))).reward == 1.0


def test_erasing_after_early_feedback_was_rejected():
    logs = TwoLogs().write(90, feedback("a", "e")).write(91, feedback("b", "o", user_id="other")).tick(110)
    logs.write(110, request(UserWish.ERASE, 110)).write(110, request(UserWish.ERASE, 110, "other")).tick(111)
    join, outputs = played(logs)
    assert len(reasons(outputs)) == 2
    assert not join._store._of_user


def test_erasing_removes_what_was_served_before_it():
    logs = served().write(101, interaction("b", served_at=101 * SECOND_US)).write(102, request(UserWish.ERASE, 100))
    logs.write(103, interaction("c")).write(103, interaction("d", served_at=100 * SECOND_US + 1))
    found = outcomes(joined(logs.tick(LATER_S)))
    assert {o.interaction_id: o.exclusion for o in found} == {
        "a": "erased",
        "b": "no_signal",
        "c": "erased",
        "d": "no_signal",
    }


def test_nothing_is_kept_of_an_erased_interaction():
    logs = served().write(102, feedback("a", "e")).tick(104).erase(105, Topic.INTERACTIONS, "a")
    logs.write(106, feedback("a", "f", value=-1.0, corrects="e", observed_at=105 * SECOND_US)).tick(200)
    join, outputs = played(logs)
    assert [o.reward for o in outcomes(outputs)] == [1.0]
    case = join._store.case("a")
    assert (case.signals, case.arrivals, case.reward) == ({}, {}, None)
    assert dict(join.counts) == {"after_exclusion": 1}


def test_a_user_with_too_many_events_is_a_bot():
    logs = TwoLogs()
    for n in range(3):
        logs.write(100 + n, interaction(f"a{n}", served_at=(100 + n) * SECOND_US))
        logs.write(100 + n, interaction(f"b{n}", served_at=(100 + n) * SECOND_US, user_id="human"))
    logs.write(103, feedback("a2", "e", observed_at=103 * SECOND_US))
    logs.write(112, interaction("later", served_at=112 * SECOND_US))
    logs.write(140, interaction("much later", served_at=140 * SECOND_US))

    def excluded(limit):
        found = outcomes(joined(logs, bot_max_events=limit))
        return {o.interaction_id for o in found if o.exclusion == "bot"}

    logs.tick(LATER_S)
    assert excluded(4) == set()
    assert excluded(3) == {"a0", "a1", "a2", "later"}


def test_a_bot_s_interactions_are_searched_once_and_not_at_each_of_its_events(monkeypatch):
    searched, search = [], join_state.JoinStore.of_user
    monkeypatch.setattr(
        join_state.JoinStore, "of_user", lambda store, *given: searched.append(given) or search(store, *given)
    )
    logs = TwoLogs()
    for n in range(50):
        logs.write(100 + n, interaction(f"a{n}", served_at=(100 + n) * SECOND_US))
    found = outcomes(joined(logs.tick(LATER_S), bot_max_events=3, bot_window_s=20))
    assert [o.exclusion for o in found] == ["bot"] * 50
    assert len(searched) == 1


def test_answers_without_a_user_are_joined_and_are_no_bots():
    logs = TwoLogs()
    for n in range(4):
        logs.write(100, interaction(f"a{n}", user_id="")).write(102, feedback(f"a{n}", "e", user_id=""))
    logs.write(102, feedback("a0", "of ann", value=-1.0))
    rejected, *found = joined(logs.tick(LATER_S), bot_max_events=2)
    assert isinstance(rejected, Rejected)
    assert "user 'u' was not served" in rejected.reason
    assert [(o.user_id, o.reward, o.exclusion) for o in outcomes(found)] == [("", 1.0, "")] * 4


def test_other_runs_and_their_feedback_are_ignored():
    logs = served(run_id="other").write(102, feedback("a", "e")).write(103, feedback("a", "f", user_id="x"))
    assert joined(logs.tick(LATER_S)) == []
    early = TwoLogs().write(99, feedback("a", "e")).write(100.5, interaction("a", run_id="other"))
    assert joined(early.tick(LATER_S)) == []


def test_ended_interactions_are_forgotten_after_their_time():
    logs = served().write(102, feedback("a", "e")).tick(104)
    join, _ = played(logs)
    join.take_changes()
    for topic, records in logs.inputs.items():
        join.observe(located(topic, Tick("t", 0), len(records), 1102.999))
    assert "case/a" not in join.take_changes().entries
    for topic, records in logs.inputs.items():
        join.observe(located(topic, Tick("t", 0), len(records) + 1, 1103))
    assert join.take_changes().entries["case/a"] is None
    assert (list(join._store.entries()), join._store._timed, dict(join._store._of_user)) == ([], {}, {})


def test_tokens_are_not_held_in_memory():
    spoken = interaction("a", segments=[Segment(1, b"1234", b"1", b"1234", [])])
    item = join_state.item_of(located(Topic.INTERACTIONS, spoken, 0, 101), RUN_ID, 0)
    assert item == join_state.InteractionState.of(interaction("a"), 0)


def test_a_busy_user_costs_one_timer():
    logs = served()
    for n in range(15):
        logs.write(101, feedback("a", f"e{n}"))
    join, _ = played(logs.tick(101.5))
    assert len(join._store._timers) <= 3


BROKEN = {
    "interaction key": (Topic.INTERACTIONS, interaction("a"), {"key": b"b"}),
    "no interaction id": (Topic.INTERACTIONS, interaction(""), {}),
    "reserved interaction id": (Topic.INTERACTIONS, interaction("\x00a"), {}),
    "long interaction id": (Topic.INTERACTIONS, interaction("a" * 257), {}),
    "long arm": (Topic.INTERACTIONS, interaction("a", arm="a" * 257), {}),
    "long request": (Topic.INTERACTIONS, request(UserWish.ERASE, 1, request_id="r" * 257), {}),
    "versions": (Topic.INTERACTIONS, interaction("a", version_min=4), {}),
    "version below none": (Topic.INTERACTIONS, interaction("a", version_min=-2), {}),
    "tokens": (Topic.INTERACTIONS, interaction("a", sampled_tokens=-1), {}),
    "latency": (Topic.INTERACTIONS, interaction("a", latency_ms=math.nan), {}),
    "negative latency": (Topic.INTERACTIONS, interaction("a", latency_ms=-1.0), {}),
    "served in the future": (Topic.INTERACTIONS, interaction("a", served_at=103 * SECOND_US + 1), {}),
    "served before 1970": (Topic.INTERACTIONS, interaction("a", served_at=-1), {}),
    "request of nobody": (Topic.INTERACTIONS, request(UserWish.ERASE, 1, user_id=""), {}),
    "undecodable": (Topic.INTERACTIONS, None, {}),
    "wrong type": (Topic.INTERACTIONS, Document("d", "s", "t"), {}),
    "interaction as feedback": (Topic.FEEDBACK, interaction("a"), {}),
    "tombstone of no text": (Topic.FEEDBACK, None, {"key": b"\xff", "value": None}),
    "feedback key": (Topic.FEEDBACK, feedback("a", "e"), {"key": b"a"}),
    "no event": (Topic.FEEDBACK, feedback("a", ""), {}),
    "long event": (Topic.FEEDBACK, feedback("a", "e" * 257), {}),
    "long source": (Topic.FEEDBACK, feedback("a", "e", source="s" * 257), {}),
    "observed before 1970": (Topic.FEEDBACK, feedback("a", "e", observed_at=-1), {}),
    "corrects itself": (Topic.FEEDBACK, feedback("a", "e", corrects="e"), {}),
    "nothing": (Topic.FEEDBACK, feedback("a", "e", value=None), {}),
    "half a thumb": (Topic.FEEDBACK, feedback("a", "e", value=0.5), {}),
    "nan": (Topic.FEEDBACK, feedback("a", "e", value=math.nan), {}),
    "undecodable feedback": (Topic.FEEDBACK, None, {}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_rejected_and_the_streams_continue(name):
    topic, record, changes = BROKEN[name]
    logs = served("ok").write(101, record, topic, **changes).write(102, feedback("ok", "e"))
    outputs = joined(logs.tick(LATER_S))
    (rejected,) = [o for o in outputs if isinstance(o, Rejected)]
    assert rejected.reason
    assert rejected.located in logs.inputs[topic]
    assert [o.reward for o in records_of(outputs)] == [1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"done_ttl_s": 24.9}, "longest horizon"),
        ({"close_on": [SignalKind.EDIT_MADE]}, "decide nothing"),
        ({"settle_s": -1}, "greater than or equal"),
        ({"hold_s": 1}, "Extra inputs"),
    ],
)
def test_unusable_settings_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        settings_of(**changes)


def test_the_default_settings_are_usable():
    assert JoinSettings().map.wait_s == 86_400


# Any log


def ended(logs: TwoLogs) -> TwoLogs:
    """Append ticks after all deadlines, while the join still remembers ended interactions."""
    last = max((r.timestamp_ms for records in logs.inputs.values() for r in records), default=0)
    return logs.tick(last / 1000 + 200)


def outputs_under(rules: JoinSettings, logs: TwoLogs) -> list[Output]:
    join = join_of(rules)
    return [output for records in logs.inputs.values() for record in records for output in join.observe(record)]


SETTINGS = st.builds(
    settings_of,
    settle_s=st.sampled_from([0.0, 1.0, 4.0]),
    grace_s=st.sampled_from([0.0, 5.0]),
    early_wait_s=st.sampled_from([1.0, 8.0]),
    done_ttl_s=st.sampled_from([25.0, 40.0, 1_000.0]),
    bot_max_events=st.sampled_from([2, 4, 1_000]),
    max_signals=st.sampled_from([2, 20]),
)


@settings(max_examples=150)
@given(two_logs(), st.sampled_from([0.0, 1.0, 4.0]), st.sampled_from([0.0, 5.0]))
def test_the_join_agrees_with_a_computation_over_the_whole_log(logs, settle_s, grace_s):
    rules = settings_of(settle_s=settle_s, grace_s=grace_s)
    found = defaultdict(list)
    for outcome in records_of(outputs_under(rules, ended(logs))):
        found[outcome.interaction_id].append((outcome.revision, outcome.reward, outcome.exclusion, outcome.closed_at))
    assert dict(found) == endings(logs, rules)


@settings(max_examples=150)
@given(
    two_logs(),
    SETTINGS,
    st.lists(st.tuples(st.integers(0, 40), TURNS), max_size=6),
    TURNS,
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
)
def test_no_order_of_reading_and_no_kill_changes_an_outcome(logs, rules, kills, last, batch, at_end, atomic):
    inputs = ended(logs).inputs if at_end else logs.inputs
    check_kills(inputs, lambda state: join_of(rules, state), kills, batch, atomic, last)


@settings(max_examples=100)
@given(two_logs(), SETTINGS)
def test_every_interaction_ends_exactly_once(logs, rules):
    remembering = rules.model_copy(update={"done_ttl_s": 1_000.0})
    found = [o for o in records_of(outputs_under(remembering, ended(logs))) if isinstance(o, Outcome)]
    ends = [o for o in found if o.revision == 0]
    first = {}
    for placed in logs.inputs[Topic.INTERACTIONS]:
        if placed.record and hasattr(placed.record, "consent"):
            first.setdefault(placed.record.interaction_id, placed.record.run_id)
    wanted = sorted(name for name, run_id in first.items() if run_id == RUN_ID)
    assert sorted(o.interaction_id for o in ends) == wanted
    by_reason = Counter(o.exclusion for o in ends)
    assert set(by_reason) <= {"", *OutcomeExclusion}
    assert by_reason[""] == sum(o.reward is not None for o in ends)
    for name in wanted:
        revisions = [o for o in found if o.interaction_id == name]
        assert [o.revision for o in revisions] == list(range(len(revisions)))
        assert [o.previous_reward for o in revisions[1:]] == [o.reward for o in revisions[:-1]]
        assert all(o.reward != o.previous_reward for o in revisions[1:])
