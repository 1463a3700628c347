"""The path of one interaction or rollout through the log: each stage, its end and the reason, in any topic order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.consumers.product_support import (
    SECOND,
    decision,
    feedback,
    interaction,
    member,
    online_batch,
    outcome,
    request,
    use,
)
from tests.consumers.sink_support import START_US, ack, group, manifest, rollout, step
from tidemill.compose.cli.log_commands import rollout_lines
from tidemill.consumers.operate.trace.interaction import InteractionTrace
from tidemill.consumers.operate.trace.reading import checked_name, rollout_path, user_path
from tidemill.consumers.operate.trace.versions import VersionHistory, ranges
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position

SERVED = interaction("i0", "ann")
THUMB = feedback("e0", "i0", "ann")
REWARDED = outcome(SERVED, 1.0, signals=[use("e0")])
BATCH = online_batch(0, [member(REWARDED)])
TRAINED = step(2, [r.StepInput(BATCH.batch_id, Topic.ONLINE_BATCHES.value, 0, 0)], [])
WHOLE: tuple[r.Record, ...] = (
    SERVED,
    THUMB,
    REWARDED,
    BATCH,
    TRAINED,
    manifest(2),
    manifest(3),
    decision(r.GateVerdict.PROMOTE, 2, "p 0.01"),
    ack(2, r.AckStatus.PROVED),
)


def located(records: Sequence[r.Record]) -> list[ConsumedRecord]:
    """Return the records with offsets counted separately in each topic."""
    ends: dict[Topic, int] = {}
    found = []
    for record in records:
        topic = next(topic for topic, spec in CATALOGUE.items() if isinstance(record, spec.values))
        offset = ends.setdefault(topic, 0)
        ends[topic] += 1
        found.append(ConsumedRecord(topic, 0, offset, 0, b"k", b"v", record))
    return found


def tombstone(topic: Topic, key: str) -> ConsumedRecord:
    return ConsumedRecord(topic, 0, 99, 0, key.encode(), None, None, "a tombstone")


def history_of(records: Sequence[ConsumedRecord]) -> VersionHistory:
    history = VersionHistory("run")
    for one in records:
        history.observe(one)
    return history


def path_of_user(records: Sequence[ConsumedRecord], user: str = "ann") -> dict[str, Any]:
    """Return the path of a user of one run."""
    path = user_path(user, records, lambda run_id: history_of(records))
    assert path is not None
    return path


def path_of_rollout(records: Sequence[ConsumedRecord], rollout_id: str = "b") -> dict[str, Any]:
    """Return the path of a rollout of one run."""
    path = rollout_path(rollout_id, records, lambda run_id: history_of(records))
    assert path is not None
    return path


def traced(records: Sequence[ConsumedRecord], letters: Sequence[Row] = ()) -> dict[str, Any]:
    trace = InteractionTrace("i0")
    for one in records:
        trace.observe(one)
    for row in letters:
        trace.observe_letter(row)
    return trace.path(history_of(records))


def test_the_whole_path_has_every_stage_with_its_offset():
    path = traced(located(WHOLE))
    assert (path["served"]["place"], path["served"]["version_max"]) == (Position("interactions", 0, 0), 1)
    (event,) = path["feedback"]
    assert (event["place"], event["fate"]) == (Position("feedback", 0, 0), "counted +1 in the reward")
    (end,) = path["outcomes"]
    assert (end["place"], end["reward"], end["signals"]) == (Position("outcomes", 0, 0), 1.0, {"e0": 1.0})
    (batch,) = path["batches"]
    assert batch["place"] == Position("online-batches", 0, 0)
    assert (batch["ended"].step, batch["ended"].version) == (Position("train.steps", 0, 0), 2)
    (made,) = path["versions"]
    assert (made.version, made.parent, made.manifest_place) == (2, 1, Position("weights.manifests", 0, 0))
    assert [decided["verdict"] for decided in made.decisions] == ["promote"]
    assert (made.contained_in, made.served_by, made.proved_by) == ("3", {"replica-0": 2}, ["replica-0"])
    assert path["end"] == "trained into version 2, and served now by replica-0 (version 2)"


@given(st.permutations(list(Topic)))
def test_the_order_in_which_topics_are_read_changes_nothing(order: list[Topic]):
    records = located(WHOLE)
    shuffled = sorted(records, key=lambda one: order.index(one.topic))
    assert traced(shuffled) == traced(records) == traced([*records, *records[2:6]])


ENDS = [
    ([], "the log holds no such interaction"),
    ([SERVED], "waits for its end"),
    ([SERVED, outcome(SERVED, None, "no_signal")], "excluded: no_signal, in outcomes[0]@0"),
    ([SERVED, REWARDED], "waits for its online batch"),
    (
        [SERVED, REWARDED, online_batch(0, [], dropped={"old_version": 2})],
        "is in no batch: online-batches[0]@0 closed after it and counts as dropped: old_version 2",
    ),
    ([SERVED, REWARDED, BATCH], "waits for the trainer in batch run/main/0"),
    (
        [SERVED, REWARDED, BATCH, step(2, [], [r.StepExclusion(BATCH.batch_id, "online-batches", 0, 0, "stale", 1)])],
        "excluded by the trainer (stale), in train.steps[0]@0",
    ),
    (
        [
            SERVED,
            REWARDED,
            BATCH,
            replace(TRAINED, exclusions=[r.StepExclusion("i0", "interactions", 0, 0, "erased", 1)]),
        ],
        "excluded by the trainer (erased)",
    ),
    (WHOLE[:5], "trained into version 2, which is not published yet"),
    (WHOLE[:6], "trained into version 2, which no replica serves now"),
    (
        [*WHOLE[:6], decision(r.GateVerdict.REJECT, 2, "worse")],
        "no replica serves now: last decision reject by gate, worse",
    ),
]


@pytest.mark.parametrize(("records", "end"), ENDS, ids=[end[:40] for _, end in ENDS])
def test_the_end_of_the_path_and_its_reason_are_reported(records: Sequence[r.Record], end: str):
    assert end in traced(located(records))["end"]


def test_an_exclusion_by_a_step_that_did_not_train_its_batch_is_not_its_end():
    other = step(1, [], [r.StepExclusion("i0", "interactions", 0, 0, "stale", 1)])
    assert "trained into version 2" in traced(located([SERVED, REWARDED, BATCH, other, TRAINED]))["end"]


FATES = [
    (THUMB, [], "waits for the interaction's end"),
    (THUMB, [outcome(SERVED, None, "bot")], "excluded (bot)"),
    (replace(THUMB, event_id="e9", user_id="bob"), [REWARDED], "another user"),
    (replace(THUMB, event_id="e9"), [REWARDED], "no weight, or another event"),
    (replace(THUMB, event_id="e9", kind=r.SignalKind.UNDO), [REWARDED], "outside its horizon"),
    (
        replace(THUMB, event_id="e9", kind=r.SignalKind.UNDO, observed_at=START_US + 90 * SECOND),
        [REWARDED],
        "after the interaction's end",
    ),
    (feedback("e9", "i0", "ann", None, corrects="e0"), [outcome(SERVED, None, "no_signal")], "withdrew e0"),
]


@pytest.mark.parametrize(("event", "ends", "fate"), FATES, ids=[fate for *_, fate in FATES])
def test_the_fate_of_an_event_that_did_not_count(event: r.Feedback, ends: list[r.Outcome], fate: str):
    told = {one["event_id"]: one["fate"] for one in traced(located([SERVED, event, *ends]))["feedback"]}
    assert fate in told[event.event_id]


def test_corrections_are_reported_with_the_outcome_that_they_replace():
    down = feedback("e1", "i0", "ann", -1.0, corrects="e0")
    revised = outcome(SERVED, -1.0, signals=[use("e1", -1.0)], revision=1, previous=1.0)
    end = outcome(SERVED, None, "no_signal")
    path = traced(located([SERVED, THUMB, down, end, revised]))
    assert [event["fate"] for event in path["feedback"]] == ["replaced by e1", "counted -1 in the reward of revision 1"]
    assert [(one["revision"], one["previous_reward"]) for one in path["outcomes"]] == [(0, None), (1, 1.0)]


@pytest.mark.parametrize("prefix", ["x.", "x-", ""])
def test_repeats_and_dead_letters_are_reported(prefix: str):
    source = f"{prefix}feedback"
    lost, foreign = (
        Row(f"{source}.dlq", 0, n, 0, key, DeadLetter(source, 1, 7 + n, 0, "no kind", "join", b""), 0)
        for n, key in enumerate((b"i0/e7", b"i1/e7"))
    )
    path = traced(located([SERVED, SERVED, THUMB, THUMB, REWARDED]), [lost, foreign])
    assert path["served"]["repeats"] == [Position("interactions", 0, 1)]
    assert path["feedback"][0]["fate"].endswith("sent 2 times, counted once")
    assert path["letters"] == [{"place": Position("feedback", 1, 7), "reason": "no kind", "found_by": "join"}]


def test_erased_records_are_not_shown_but_the_steps_that_trained_on_them_are():
    gone = [tombstone(Topic.INTERACTIONS, "i0"), tombstone(Topic.OUTCOMES, "i0"), tombstone(Topic.FEEDBACK, "i0/e0")]
    path = traced([*located(WHOLE), *gone])
    assert (path["served"], path["feedback"], path["outcomes"]) == (None, [], [])
    assert path["erased"] == Position("interactions", 0, 99)
    assert [made.version for made in path["versions"]] == [2]
    untrained = traced([*located([SERVED, THUMB]), *gone, tombstone(Topic.INTERACTIONS, "i1")])
    assert untrained["end"].startswith("erased: a tombstone at interactions[0]@99")


def test_a_later_version_of_another_parent_does_not_contain_it():
    rolled_back = replace(manifest(4), parent=1)
    branched = replace(ack(4, r.AckStatus.PROVED), serving_version=4)
    retried = replace(manifest(7), parent=3)
    path = traced(located([*WHOLE, rolled_back, manifest(5), retried, branched]))
    assert path["versions"][0].contained_in == "3, 7"
    assert path["versions"][0].served_by == {}
    assert "no replica serves now: last decision promote" in path["end"]


def forked() -> list[r.Record]:
    """Return a branch with another version 2, whose step trained on another answer to the same user."""
    served = interaction("i5", "ann")
    end = outcome(served, 1.0)
    batch = replace(online_batch(0, [member(end)]), batch_id="run/fork/0", branch="fork")
    trained = step(2, [r.StepInput(batch.batch_id, Topic.ONLINE_BATCHES.value, 0, 1)], [])
    made = [replace(manifest(version), branch="fork", incarnation="f", fingerprint="g") for version in (2, 3, 4)]
    served_by = replace(ack(4, r.AckStatus.PROVED), replica_id="replica-9", branch="fork", at=START_US - SECOND)
    rejected = replace(decision(r.GateVerdict.REJECT, 2, "worse"), branch="fork")
    return [served, end, batch, replace(trained, incarnation="f", fingerprint="g"), *made, served_by, rejected]


@pytest.mark.parametrize("first", [True, False])
def test_a_version_of_another_branch_with_the_same_number_is_not_followed(first: bool):
    path = traced(located([*forked(), *WHOLE] if first else [*WHOLE, *forked()]))
    (made,) = path["versions"]
    assert (made.branch, made.contained_in, made.served_by) == ("main", "3", {"replica-0": 2})
    assert [decided["verdict"] for decided in made.decisions] == ["promote"]
    assert (made.proved_by, made.served_first_at) == (["replica-0"], START_US)
    assert path["end"] == "trained into version 2, and served now by replica-0 (version 2)"


def test_a_step_that_a_new_branch_published_again_is_followed_on_both():
    again = [replace(manifest(version), branch="fork", incarnation="f") for version in (2, 3, 4)]
    runs = path_of_user(located([*WHOLE, *again]))["runs"]
    assert [(run["branch"], run["contained_in"]) for run in runs] == [("fork", "2-4"), ("main", "2-3")]


def test_the_versions_of_a_user_are_reported_by_branch():
    runs = path_of_user(located([*forked(), *WHOLE]))["runs"]
    assert [(run["branch"], run["contained_in"], run["served_by"]) for run in runs] == [
        ("fork", "2-4", {"replica-9": 4}),
        ("main", "2-3", {"replica-0": 2}),
    ]
    assert [[made.version for made in run["trained"]] for run in runs] == [[2], [2]]


def test_a_version_is_first_served_at_the_earliest_time_of_any_replica():
    early = replace(ack(2, r.AckStatus.PROVED), replica_id="replica-1", at=START_US - SECOND)
    path = traced(located([*WHOLE, early]))
    assert path["versions"][0].served_first_at == START_US - SECOND


def test_a_users_versions_are_those_whose_steps_trained_on_them():
    two, three = interaction("i1", "ann"), interaction("i2", "bob")
    left_out = online_batch(1, [member(outcome(two, 1.0)), member(outcome(three, 1.0))])
    second = step(
        3,
        [r.StepInput(left_out.batch_id, Topic.ONLINE_BATCHES.value, 0, 1)],
        [r.StepExclusion("i1", "interactions", 0, 0, "erased", 1)],
    )
    erasure = request("ann", r.UserWish.ERASE, START_US)
    path = path_of_user(located([*WHOLE, outcome(two, None, "bot"), left_out, second, erasure]))
    assert path["demands"] == [erasure]
    assert path["outcomes"] == {"reward": 1, "bot": 1}
    assert [(one["sequence"], one["interactions"], one["trained"]) for one in path["batches"]] == [(0, 1, 1), (1, 1, 0)]
    (run,) = path["runs"]
    assert ([made.version for made in run["trained"]], run["contained_in"]) == ([2], "2-3")
    assert run["served_by"] == {"replica-0": 2}


def test_an_erased_user_keeps_their_versions_and_loses_their_outcomes():
    path = path_of_user([*located(WHOLE), tombstone(Topic.OUTCOMES, "i0")])
    assert path["outcomes"] == {}
    assert [made.version for made in path["runs"][0]["trained"]] == [2]
    assert user_path("nobody", located(WHOLE), VersionHistory) is None


@pytest.mark.parametrize(
    ("inputs", "exclusions", "end"),
    [
        ([r.StepInput("g0", "groups", 0, 0)], [], "its group was trained into version 1"),
        ([], [r.StepExclusion("g0", "groups", 0, 0, "stale", 2)], "excluded by the trainer: stale"),
        ([], [], "waits for the trainer"),
    ],
)
def test_a_rollouts_path(inputs: list[r.StepInput], exclusions: list[r.StepExclusion], end: str):
    members = [rollout("a", "g0"), rollout("b", "g0")]
    records = located([*members, group("g0", members), step(1, inputs, exclusions)])
    path = path_of_rollout(records)
    assert (path["place"], path["groups"][0]["place"]) == (Position("rollouts", 0, 1), Position("groups", 0, 0))
    assert path["end"] == end
    assert rollout_path("x", records, VersionHistory) is None


def test_a_held_out_rollout_does_not_wait_for_the_trainer():
    members = [rollout(name, "g0", r.Mode.EVAL) for name in "ab"]
    path = path_of_rollout(located([*members, group("g0", members)]))
    assert path["end"] == "evaluated: no step trains on held-out rollouts"
    assert "waits for the trainer" not in "\n".join(rollout_lines(path))


def test_ranges():
    assert ranges({5, 3, 4, 9}) == "3-5, 9"
    assert ranges([]) == ""


def test_a_signed_token_names_its_interaction():
    assert checked_name(f" abc.{'x' * 43} ") == checked_name("abc") == "abc"


@pytest.mark.parametrize("text", ["", "  ", ".signature", "x" * 201, "a\x00b"])
def test_what_can_be_no_id_is_refused(text: str):
    with pytest.raises(ValueError, match="interaction token"):
        checked_name(text)
