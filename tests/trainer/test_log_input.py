"""The choice of groups: the batch builder with every kind of group, and reading groups from a real log."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documents import dead_letters
from tests.records import build, member_of
from tests.trainer.conftest import bare_group, builder_of, make_group, make_rollout, settings_of
from tests.trainer.run_log import write_group, write_groups
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.expert_ids import packed_ids
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.log.consumed import ConsumedRecord, replay_headers
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import (
    CloseReason,
    Group,
    Mode,
    Rollout,
    RolloutStatus,
    SamplingParameters,
    StepExclusion,
    StepInput,
    TrainStep,
)
from tidemill.schemas.stored_object import store_claim
from tidemill.trainer.batch import RoutedShape, routed_tokens
from tidemill.trainer.batch_builder import PATIENCE, BatchBuilder, StepBatch
from tidemill.trainer.log_input import LogInput, ReadAhead
from tidemill.trainer.trainable import MOST_EXCLUSIONS, Reference, TopicProgress, TrainableGroup

SIZE = 2
"""Groups per step."""


def place(group: Group, offset: int, partition: int = 0) -> StepInput:
    return StepInput(group.group_id, Topic.GROUPS.value, partition, offset)


def feed(builder: BatchBuilder, group: Group, offset: int, version: int = 0, partition: int = 0) -> bool:
    """Read one group as the log input does; its rollouts are always found."""
    here = place(group, offset, partition)
    wanted = builder.wants(Reference(here, group), version)
    if wanted:
        builder.accept(TrainableGroup(here, group, ()))
    return wanted


def good(name: str, version: int = 0, rewards=(1.0, 0.0), **changes: object) -> Group:
    """Make a group with a signal; keyword arguments change it."""
    rollouts = [make_rollout(name, i, reward, version=version) for i, reward in enumerate(rewards)]
    return make_group(name, [member_of(r, 0, i) for i, r in enumerate(rollouts)], **changes)


def reasons(builder: BatchBuilder, version: int = 0) -> dict[str, str]:
    """Return the exclusions so far, by group id; closes a batch to read them."""
    for n in range(SIZE):
        feed(builder, good(f"filler{n}", version=version), 900 + n, version)
    batch = builder.close(version)
    assert batch is not None
    return {e.group_id: e.reason for e in batch.exclusions}


def failed(group: Group, keep: int) -> Group:
    members = [
        m if i < keep else replace(m, status=RolloutStatus.FAILED, reward=None, advantage=None, version_min=-1)
        for i, m in enumerate(group.members)
    ]
    return replace(group, members=members)


def test_every_untrainable_group_has_its_reason() -> None:
    builder = builder_of()
    cases = {
        "eval": good("eval", mode=Mode.EVAL),
        "late": good("late", closed_by=CloseReason.LATE),
        "too_few": failed(good("too_few"), keep=1),
        "no_signal": good("no_signal", rewards=(0.5, 0.5, 0.5)),
        "stale": good("stale", version=2),
    }
    for offset, group in enumerate(cases.values()):
        assert not feed(builder, group, offset, version=5)
    assert reasons(builder, version=5) == {name: name for name in cases}


def test_failed_members_do_not_make_a_group_stale_or_useless() -> None:
    builder = builder_of()
    assert feed(builder, failed(good("a", version=5, rewards=(1.0, 0.0, 0.0)), keep=2), 0, version=5)


def test_groups_of_other_runs_are_ignored() -> None:
    builder = builder_of()
    assert not feed(builder, good("foreign", run_id="other"), 0)
    assert reasons(builder) == {}


def test_a_group_emitted_twice_is_trained_once() -> None:
    builder = builder_of()
    assert feed(builder, good("a"), 0)
    assert not feed(builder, good("a"), 1), "while the first still waits"
    assert feed(builder, good("b"), 2)
    batch = builder.close(0)
    assert batch is not None
    assert [e.reason for e in batch.exclusions] == ["duplicate"]
    assert not feed(builder, good("a"), 3), "after the first was trained"
    assert reasons(builder) == {"a": "duplicate"}


def test_a_late_group_record_does_not_end_its_group() -> None:
    builder = builder_of()
    assert not feed(builder, good("a", closed_by=CloseReason.LATE), 0)
    assert feed(builder, good("a"), 1)


def test_oldest_groups_are_trained_first() -> None:
    builder = builder_of()
    for offset, (name, closed_at) in enumerate([("c", 30), ("a", 10), ("b", 20)]):
        feed(builder, good(name, closed_at=closed_at), offset)
    batch = builder.close(0)
    assert batch is not None
    assert [g.group.group_id for g in batch.groups] == ["a", "b"]
    assert builder.waiting == 1
    assert builder.close(0) is None


def test_a_group_that_became_stale_while_waiting_is_excluded_at_the_step() -> None:
    builder = builder_of()
    assert feed(builder, good("waits", version=0), 0, version=0)
    assert reasons(builder, version=3) == {"waits": "stale"}


def test_lag_at_the_bound_is_trained() -> None:
    builder = builder_of()
    assert feed(builder, good("a", version=3), 0, version=5)
    assert not feed(builder, good("b", version=3), 1, version=6)


def test_entries_of_other_topics_in_a_step_end_no_group() -> None:
    builder = builder_of()
    step = recorded(StepBatch([], [StepExclusion("x", "interactions", 0, 1, "erased", 1)]))
    builder.observe_step(replace(step, inputs=[StepInput("b", "online-batches", 0, 0)]))
    assert feed(builder, good("a"), 0)
    assert feed(builder, good("b"), 1)


def test_groups_of_an_abandoned_version_are_excluded() -> None:
    builder = builder_of()
    assert feed(builder, good("waits", version=3), 0, version=3)
    builder.abandon({3})
    assert not feed(builder, good("comes", version=3), 1, version=2)
    assert reasons(builder, version=2) == {"waits": "rejected_version", "comes": "rejected_version"}


def accept(builder: BatchBuilder, group: Group, offset: int, rollouts=(), replays=(), replay_id: str = "") -> None:
    """Read one group with its rollouts; replays may have written either."""
    here = place(group, offset)
    if builder.wants(Reference(here, group, replay_id), 0):
        builder.accept(TrainableGroup(here, group, tuple(rollouts), frozenset(replays)))


def test_groups_whose_lag_is_undefined_are_excluded() -> None:
    """Groups of another incarnation, or of a version that this trainer has not made."""
    builder = builder_of(incarnation="mine")
    accept(builder, good("mine"), 0, [make_rollout("mine", 0, 1.0, incarnation="mine")])
    accept(builder, good("unsaid"), 1, [make_rollout("unsaid", 0, 1.0)])
    mixed = [make_rollout("other", 0, 1.0, incarnation="mine"), make_rollout("other", 1, 0.0, incarnation="theirs")]
    assert builder.waiting == 2
    accept(builder, good("other"), 2, mixed)
    assert not feed(builder, good("ahead", version=1), 3, version=0)
    batch = builder.close(0)
    assert [g.group.group_id for g in batch.groups] == ["mine", "unsaid"]
    assert {e.group_id: e.reason for e in batch.exclusions} == {"other": "undefined_lag", "ahead": "undefined_lag"}


def test_groups_of_undefined_lag_are_reported_while_they_would_fill_the_batch() -> None:
    builder = builder_of(incarnation="mine")
    accept(builder, good("other"), 0, [make_rollout("other", 0, 1.0, incarnation="theirs")])
    assert builder.missed(0) == "", "one more would not make a batch"
    assert not feed(builder, good("ahead", version=7), 1, version=0)
    said = builder.missed(0)
    for part in (
        "2 groups",
        "1 sampled under versions of another",
        "1 sampled under versions up to 7",
        "theirs",
        "mine",
        "trainer.publish.incarnation",
        "trainer.in_order",
    ):
        assert part in said
    feed(builder, good("a"), 2)
    feed(builder, good("b"), 3)
    assert builder.missed(0) == "", "there is a batch without them"
    batch = builder.close(0)
    assert batch is not None
    assert len(batch.exclusions) == 2
    feed(builder, good("c"), 4)
    assert builder.missed(0) == "", "the step before has said why"


def test_groups_that_teach_nothing_are_reported_when_there_are_no_others() -> None:
    builder = builder_of()
    for offset in range(PATIENCE * SIZE):
        assert builder.missed(0) == "", "some are normal"
        same = good(f"same{offset}", rewards=(1.0, 1.0))
        assert not feed(builder, failed(same, keep=1) if offset == 3 else same, offset)
    told = builder.missed(0)
    for part in ("8 groups", "7 had equal rewards", "no_signal", "1 had fewer", "run.min_completed", "too_few"):
        assert part in told
    feed(builder, good("a"), 8)
    feed(builder, good("b"), 9)
    assert builder.missed(0) == "" and builder.close(0) is not None
    assert builder.missed(0) == "", "the step has named them"


def sampled_with(rollout: Rollout, **parameters: object) -> Rollout:
    return replace(rollout, sampling=SamplingParameters(**parameters))


def test_groups_of_another_distribution_are_excluded_unless_they_are_accepted() -> None:
    """The recorded logprobs must be those of the model's own distribution; otherwise ratios would be wrong."""
    own, unsaid = (make_rollout("own", index, 1.0) for index in range(2))
    warm = sampled_with(make_rollout("warm", 1, 0.0), temperature=0.7)
    cut = sampled_with(make_rollout("cut", 0, 0.0), top_k=40, others="bad_words")
    for accepted, trained in ((False, ["own"]), (True, ["own", "warm"])):
        builder = builder_of(groups_per_step=1 + accepted, accept_other_sampling=accepted)
        accept(builder, good("own"), 0, [sampled_with(own), unsaid])
        accept(builder, good("warm"), 1, [own, warm])
        batch = builder.close(0)
        assert [g.group.group_id for g in batch.groups] == trained
        assert {e.group_id: e.reason for e in batch.exclusions} == ({} if accepted else {"warm": "other_sampling"})
    builder = builder_of()
    accept(builder, good("warm"), 0, [warm])
    accept(builder, good("cut"), 1, [cut])
    told = builder.missed(0)
    for part in (
        "2 groups",
        "temperature 0.7",
        "top_k 40, bad_words",
        "rollout.temperature to 1",
        "trainer.accept_other_sampling",
    ):
        assert part in told
    assert "policy lag" not in told


def test_groups_of_a_replay_are_trained_only_if_accepted() -> None:
    """A refused copy does not end the group: the original is trained when it arrives."""
    builder = builder_of(accept_replays=("known",))
    accept(builder, good("a"), 0, replay_id="unknown")
    accept(builder, good("a"), 1)
    accept(builder, good("b"), 2, replays=["unknown", "known"])
    accept(builder, good("c"), 3, replays=["known"], replay_id="known")
    batch = builder.close(0)
    assert [g.group.group_id for g in batch.groups] == ["a", "c"]
    assert [(e.group_id, e.offset, e.reason) for e in batch.exclusions] == [("a", 0, "replayed"), ("b", 2, "replayed")]
    restarted = builder_of()
    restarted.observe_step(replace(recorded(batch), inputs=[]))
    assert feed(restarted, good("b"), 4), "nor is it one in a step that was recorded"


def test_exclusions_of_many_useless_groups_are_spread_over_several_step_records() -> None:
    builder = builder_of()
    useless = replace(good("useless", mode=Mode.EVAL), members=[])
    long = 3 * MOST_EXCLUSIONS - 1
    for offset in range(long):
        name = f"{offset:0100d}"
        assert not feed(builder, replace(useless, group_id=name), offset)
    named = []
    for step in range(4):
        for n in range(SIZE):
            feed(builder, good(f"g{step}-{n}"), long + step * SIZE + n)
        batch = builder.close(0)
        assert batch is not None
        assert len(Codec().encode(recorded(batch))) < MAX_RECORD_BYTES
        named.append([entry.offset for entry in batch.exclusions])
    assert [len(offsets) for offsets in named] == [MOST_EXCLUSIONS, MOST_EXCLUSIONS, MOST_EXCLUSIONS - 1, 0]
    assert [offset for offsets in named for offset in offsets] == list(range(long))


def recorded(batch, step: int = 1) -> TrainStep:
    """Return the record of a train step on a batch."""
    return build(TrainStep, step=step, inputs=[g.place for g in batch.groups], exclusions=batch.exclusions)


KINDS = st.sampled_from(["good", "good", "good", "eval", "no_signal", "foreign", "duplicate"])


ACTIONS = st.one_of(st.integers(0, 2), st.sampled_from(["checkpoint", "stop"]))


@given(
    kinds=st.lists(st.tuples(KINDS, st.integers(0, 2)), max_size=30),
    actions=st.lists(ACTIONS, max_size=60),
    most=st.sampled_from([1, 2, MOST_EXCLUSIONS]),
)
@settings(max_examples=150)
def test_every_group_ends_exactly_once_with_any_stops(kinds, actions, most) -> None:
    """A trainer that continues from the last checkpoint and the later steps repeats nothing and skips nothing."""
    log = synthetic_log(kinds)
    endings: dict[tuple[int, int], str] = {}
    builder, saved, since_saved = builder_of(), TopicProgress(), []
    for action in [*actions, *(partition for partition in range(3) for _ in range(len(kinds)))]:
        if action == "checkpoint":
            saved, since_saved = builder.progress(), []
        elif action == "stop":
            builder = builder_of(saved)
            for step in since_saved:
                builder.observe_step(step)
        else:
            read_next(builder, log[action], action)
        if builder.waiting >= SIZE:
            batch = builder.take(SIZE, most)
            assert len(batch.exclusions) <= most
            end_all(endings, batch)
            since_saved.append(recorded(batch))
    trained = [log[p][o].group_id for (p, o), ending in endings.items() if ending == "trained"]
    assert len(trained) == len(set(trained))
    own = {(p, o) for p in range(3) for o, g in enumerate(log[p]) if g.run_id == "run"}
    assert endings.keys() | open_places(builder) == own
    assert not endings.keys() & open_places(builder)


def read_next(builder: BatchBuilder, records: list[Group], partition: int) -> None:
    offset = builder._read.get(partition, 0)
    if offset < len(records):
        feed(builder, records[offset], offset, 0, partition)


def end_all(endings: dict[tuple[int, int], str], batch: StepBatch) -> None:
    for entry in (*(g.place for g in batch.groups), *batch.exclusions):
        key = (entry.partition, entry.offset)
        assert key not in endings, f"{key} ended twice"
        endings[key] = getattr(entry, "reason", "trained")


def open_places(builder: BatchBuilder) -> set[tuple[int, int]]:
    waiting = {(c.place.partition, c.place.offset) for c in builder._waiting.values()}
    return waiting | {(e.partition, e.offset) for e in builder._excluded}


def synthetic_log(kinds) -> dict[int, list[Group]]:
    log: dict[int, list[Group]] = {0: [], 1: [], 2: []}
    for number, (kind, partition) in enumerate(kinds):
        known = [g.group_id for g in log[partition] if g.mode is Mode.TRAIN]
        name = known[0] if kind == "duplicate" and known else f"g{number}"
        log[partition].append(bare_group(name, kind, closed_at=number))
    return log


def test_read_ahead_is_bounded_by_bytes_and_drops_the_oldest() -> None:
    held = ReadAhead(100)
    for offset in range(4):
        held.put(ConsumedRecord(Topic.ROLLOUTS, 0, offset, 0, None, bytes(40), None))
    assert held.take(0, 0) is None
    assert held.take(0, 1) is None
    assert held.take(0, 3) is not None
    assert held.take(0, 3) is None, "given out once"
    held.put(ConsumedRecord(Topic.ROLLOUTS, 0, 9, 0, None, bytes(500), None))
    assert held.take(0, 9) is not None, "the newest is kept whatever its size"


def test_a_long_run_keeps_no_offsets_before_its_position() -> None:
    builder = builder_of()
    for number in range(100):
        group = bare_group(f"g{number}", "eval", 0, 0)
        builder.wants(Reference(StepInput(group.group_id, Topic.GROUPS.value, 0, number), group), 0)
        if number % 10 == 9:
            builder.take(0)
            assert builder.progress().next_offsets == {0: number + 1}
            assert not any(builder._ended.values())


# Over a real log.


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Topics that the tests of the module share; each test has its own run in them."""
    return kafka.fresh(2, [Topic.ROLLOUTS, Topic.GROUPS])


def reading_ahead(limit_bytes: int):
    """Return settings with less memory for rollouts than a user may set."""
    return settings_of().model_copy(update={"read_ahead_bytes": limit_bytes})


def read_batch(source: LogInput, builder: BatchBuilder, version: int = 0):
    def batch():
        source.poll(0.1, version)
        return builder.close(version)

    return until(batch, "a batch")


def read_exclusions(source: LogInput, builder: BatchBuilder, count: int) -> None:
    """Read until the builder has excluded this many groups."""

    def excluded() -> bool:
        source.poll(0.1, 0)
        return len(builder._excluded) >= count

    until(excluded, "exclusions")


def test_groups_and_rollouts_are_read_from_the_log(log, run_id, tmp_path) -> None:
    producer = RecordProducer(log, "test")
    full = [make_rollout("claimed", i, float(i)) for i in range(2)]
    claims = [store_claim(str(tmp_path), r.rollout_id, Codec().encode(r)) for r in full]
    claimed = [replace(r, segments=[], claim=c) for r, c in zip(full, claims, strict=True)]
    write_group(producer, claimed, [run_id])
    gone = [replace(r, group_id="gone", claim=replace(r.claim, uri=str(tmp_path / "none"))) for r in claimed]
    write_group(producer, gone, [run_id])
    wrong = [make_rollout("wrong", i, float(i), segments=[replace(full[i].segments[0], spans=[])]) for i in range(2)]
    write_group(producer, wrong, [run_id])
    lost = make_group(
        "lost", [member_of(make_rollout("lost", i, float(i)), 0, 10_000 + i) for i in range(2)], run_id=run_id
    )
    producer.send_acked(Topic.GROUPS, [("lost", lost)])
    producer.send_bytes(f"{log.topic_prefix}groups", b"not a group", key=b"claimed")
    plain = [make_rollout("plain", i, float(i)) for i in range(2)]
    write_group(producer, plain, [run_id])

    builder = builder_of(run_id=run_id)
    with LogInput(log, settings_of(), builder, producer, 64) as source:
        batch = read_batch(source, builder)
        read_exclusions(source, builder, 3 - len(batch.exclusions))
    assert {g.group.group_id: list(g.rollouts) for g in batch.groups} == {"claimed": full, "plain": plain}
    assert {e.group_id: e.reason for e in (*batch.exclusions, *builder._excluded)} == {
        "gone": "missing_rollout",
        "lost": "missing_rollout",
        "wrong": "invalid_rollout",
    }
    producer.flush()
    assert [letter.value() for letter in dead_letters(log, Topic.GROUPS)] == [b"not a group"]


def test_groups_are_routed_by_their_expert_ids_and_excluded_without_them(log, run_id, tmp_path, caplog) -> None:
    producer, shape = RecordProducer(log, "test"), RoutedShape(2, (0, 1), 4, 2)
    plain = [make_rollout("plain", i, float(i)) for i in range(2)]
    write_group(producer, plain, [run_id])
    ids = [np.tile(np.array([[0, 3], [2, 1]], np.uint8), (routed_tokens(r.segments[0]), 1, 1)) for r in plain]
    for name, cut in (("short", 1), ("routed", 0), ("again", 0)):
        claims = [store_claim(str(tmp_path), f"{name}{i}", packed_ids(ids[i][cut:])) for i in range(2)]
        routed = [
            replace(r, rollout_id=f"{name}-{r.index}", group_id=name, expert_ids=claim)
            for r, claim in zip(plain, claims, strict=True)
        ]
        write_group(producer, routed, [run_id])
    builder = builder_of(run_id=run_id)
    with LogInput(log, settings_of(), builder, producer, 64, shape) as source:
        batch = read_batch(source, builder)
        read_exclusions(source, builder, 2 - len(batch.exclusions))
    assert {group.group.group_id for group in batch.groups} == {"routed", "again"}
    for group in batch.groups:
        assert all(np.array_equal(found, held) for found, held in zip(group.expert_ids, ids, strict=True))
    excluded = {e.group_id: e.reason for e in (*batch.exclusions, *builder._excluded)}
    assert excluded == {"plain": "invalid_routing", "short": "invalid_routing"}
    assert "rollout plain-0 was recorded without expert ids" in caplog.text
    assert "and the segments and the model need" in caplog.text


def test_rollouts_written_before_the_reader_started_are_fetched_by_offset(log, run_id) -> None:
    producer = RecordProducer(log, "test")
    write_groups(log, range(6), [run_id], size=2)
    builder = builder_of(run_id=run_id, groups_per_step=6)
    # Memory for one or two rollouts: nearly every rollout must be fetched again.
    with LogInput(log, reading_ahead(600), builder, producer, 64) as source:
        batch = read_batch(source, builder)
    assert [g.group.group_id for g in batch.groups] == [f"g{n}" for n in range(6)]
    assert all(r.group_id == g.group.group_id for g in batch.groups for r in g.rollouts)


def test_reading_continues_after_the_checkpointed_offsets(log, run_id) -> None:
    producer = RecordProducer(log, "test")
    write_groups(log, range(5), [run_id], size=2)
    first = builder_of(run_id=run_id)
    with LogInput(log, settings_of(), first, producer, 64) as source:
        trained = [g.group.group_id for g in read_batch(source, first).groups]
        second = builder_of(first.progress(), run_id=run_id)
    with LogInput(log, settings_of(), second, producer, 64) as source:
        trained += [g.group.group_id for g in read_batch(source, second).groups]
    assert len(set(trained)) == 4


def test_a_burst_waits_in_the_log_and_not_in_memory(log, run_id) -> None:
    """Five times the bound: groups beyond it are not decided, their rollouts are not fetched, and none is lost."""
    producer = RecordProducer(log, "test")
    number = 10
    write_groups(log, range(number), [run_id], size=2)
    builder = builder_of(run_id=run_id, max_waiting_batches=1)
    limit = 2_000
    trained, most = [], 0
    with LogInput(log, reading_ahead(limit), builder, producer, 64) as source:

        def all_trained() -> bool:
            nonlocal most
            for _ in range(3):
                source.poll(0.01, 0)
                most = max(most, builder.waiting)
                assert source._rollouts._held._bytes <= limit
            batch = builder.close(0)
            trained.extend(g.group.group_id for g in (batch.groups if batch else ()))
            return len(trained) >= number

        until(all_trained, "all groups")
    assert sorted(trained) == sorted(f"g{group}" for group in range(number))
    assert most == SIZE


def test_records_of_a_replay_are_recognised_by_their_headers(log, run_id) -> None:
    producer, names = RecordProducer(log, "test"), Names(log.topic_prefix)
    headers = replay_headers("again", names.of(Topic.GROUPS), 0, 7)
    for name, replayed in {"group": Topic.GROUPS, "rollout": Topic.ROLLOUTS, "plain": None}.items():
        rollouts = [make_rollout(name, i, float(i)) for i in range(2)]
        before = ends(log, Topic.ROLLOUTS)
        for record in rollouts:
            said = headers if replayed is Topic.ROLLOUTS else None
            producer.send(Topic.ROLLOUTS, record, key=name, partition=0, headers=said)
        producer.flush()
        members = [member_of(record, 0, before + i) for i, record in enumerate(rollouts)]
        said = headers if replayed is Topic.GROUPS else None
        producer.send(Topic.GROUPS, make_group(name, members, run_id=run_id), key=name, partition=0, headers=said)
        producer.flush()
    for accepted in ((), ("again",)):
        builder = builder_of(run_id=run_id, accept_replays=accepted, groups_per_step=3 if accepted else 1)
        with LogInput(log, settings_of(), builder, producer, 64) as source:
            batch = read_batch(source, builder)
        assert {g.group.group_id for g in batch.groups} == ({"group", "rollout", "plain"} if accepted else {"plain"})
        assert {e.group_id: e.reason for e in batch.exclusions} == (
            {} if accepted else {"group": "replayed", "rollout": "replayed"}
        )


def test_a_trainer_that_waits_on_topics_of_another_incarnation_logs_it_once(log, run_id, caplog) -> None:
    producer = RecordProducer(log, "test")
    for number in range(5):
        rollouts = [make_rollout(f"g{number}", i, float(i), incarnation="theirs") for i in range(2)]
        write_group(producer, rollouts, [run_id], closed_at=number)
    builder = builder_of(run_id=run_id, incarnation="mine")
    with LogInput(log, settings_of(), builder, producer, 64) as source, caplog.at_level("WARNING"):
        read_exclusions(source, builder, 5)
        source.poll(0.1, 0)
    said = [r.getMessage() for r in caplog.records if "policy lag is undefined" in r.getMessage()]
    assert len(said) == 1
    assert "another incarnation (theirs; this trainer's is mine)" in said[0]


def ends(log: KafkaSettings, topic: Topic) -> int:
    with LogReader(log, [topic]) as reader:
        return reader.end_offsets()[topic, 0]
