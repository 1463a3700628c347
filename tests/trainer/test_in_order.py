"""In-order mode: the trained batches depend only on the log, and not on timing, polls or stops."""

import itertools
import threading
from functools import partial

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.records import build
from tests.trainer.conftest import bare_group, builder_of, make_rollout, settings_of
from tests.trainer.run_log import run_of, write_group, written
from tests.waiting import until
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.client_settings import consumer_settings
from tidemill.schemas.log.consumed import replay_headers
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import (
    Group,
    Manifest,
    Mode,
    StepInput,
    StepPlan,
    TrainStep,
)
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.config import OnlineSettings, TrainerSettings
from tidemill.trainer.run import run
from tidemill.trainer.trainable import MOST_EXCLUSIONS, Reference, TopicProgress, TrainableGroup

SIZE = 2
"""Groups per step."""
RULES = {"max_policy_lag": 1, "remembered_groups": 4, "in_order": True}
KINDS = st.sampled_from(["good", "good", "good", "good", "eval", "late", "no_signal", "foreign", "duplicate", "ahead"])
LOG = st.lists(st.tuples(KINDS, st.integers(0, 6)), max_size=40)
Said = tuple[list[str], list[tuple[str, str]]]


def synthetic(kinds: list[tuple[str, int]]) -> list[Group]:
    """Make groups of several kinds and versions; versions increase along the log, with a few exceptions."""
    log: list[Group] = []
    for number, (kind, back) in enumerate(kinds):
        name = log[-back].group_id if kind == "duplicate" and 0 < back <= len(log) else f"g{number}"
        version = max(0, number // 4 - back % 4) + 2 * (kind == "ahead")
        log.append(bare_group(name, kind, version, closed_at=(number * 7) % 5))
    return log


def plan_of(batch: StepBatch, step: int) -> StepPlan:
    inputs = [group.place for group in batch.groups]
    return build(StepPlan, step=step, parent_version=step - 1, inputs=inputs, exclusions=batch.exclusions)


def trained(log: list[Group], actions: list[int | str], most: int = MOST_EXCLUSIONS, **changes: object) -> list[Said]:
    """Return what each step trains and excludes if the log is read by `actions`. A number polls that many groups, which
    stay in memory while the builder is full; "stop" restarts from the checkpoint and the recorded steps. A step names
    at most `most` exclusions."""
    rules = {**RULES, **changes}
    builder, saved, since_saved = builder_of(**rules), TopicProgress(), []
    said: list[Said] = []
    buffer: list[tuple[StepInput, Group]] = []
    read = 0
    for action in [*actions, *[1] * 2 * len(log)]:
        if action == "checkpoint":
            saved, since_saved = builder.progress(), []
        elif action == "stop":
            builder, buffer = builder_of(saved, **rules), []
            for plan in since_saved:
                builder.observe_step(plan)
            read = saved.next_offsets.get(0, 0)
        elif not builder.full and not buffer:
            buffer = [
                (StepInput(g.group_id, "groups", 0, read + i), g) for i, g in enumerate(log[read : read + action])
            ]
            read += len(buffer)
        while buffer and not builder.full:
            place, group = buffer.pop(0)
            if builder.wants(Reference(place, group), len(said)):
                builder.accept(TrainableGroup(place, group, ()))
        if action != 1 or builder.full:
            builder.sweep(len(said))
            if builder.waiting >= SIZE:
                batch = builder.take(SIZE, most)
                said.append(
                    ([g.place.group_id for g in batch.groups], [(e.group_id, e.reason) for e in batch.exclusions])
                )
                since_saved.append(plan_of(batch, len(said)))
    return said


@given(
    kinds=LOG,
    actions=st.lists(st.one_of(st.integers(1, 12), st.sampled_from(["checkpoint", "stop"])), max_size=40),
    most=st.sampled_from([1, 2, MOST_EXCLUSIONS]),
)
@settings(max_examples=300)
def test_batches_do_not_depend_on_polls_and_stops(kinds, actions, most) -> None:
    """This also holds if a step cannot name all exclusions and the remaining ones are decided again after a stop; then
    no id may be forgotten in between."""
    log, changes = synthetic(kinds), {} if most == MOST_EXCLUSIONS else {"remembered_groups": 100}
    straight = trained(log, [], most, **changes)
    assert trained(log, actions, most, **changes) == straight
    assert all(len(exclusions) <= most for _, exclusions in straight)
    ids = [name for inputs, _ in straight for name in inputs]
    assert all(len(inputs) == SIZE for inputs, _ in straight)
    assert len(ids) <= len([g for g in log if g.run_id == "run" and g.mode is Mode.TRAIN])


def test_a_remaining_duplicate_is_not_trained_after_a_stop_even_if_its_group_is_forgotten() -> None:
    builder = builder_of(in_order=True, remembered_groups=1)
    for step, offsets in enumerate(((0, 1), (3, 4)), 1):
        inputs = [StepInput(f"g{offset}", "groups", 0, offset) for offset in offsets]
        builder.observe_step(build(StepPlan, step=step, inputs=inputs))
    for offset in (2, 5):
        group = bare_group("g0" if offset == 2 else "g5")
        place = StepInput(group.group_id, "groups", 0, offset)
        assert builder.wants(Reference(place, group), 2)
        builder.accept(TrainableGroup(place, group, ()))
    batch = builder.take(SIZE)
    assert [each.place.offset for each in batch.groups] == [5]
    assert [(each.offset, each.reason) for each in batch.exclusions] == [(2, "duplicate")]


def test_without_in_order_the_batches_depend_on_the_polls() -> None:
    log = synthetic([("good", 3 if n < 12 else 0) for n in range(24)])
    assert trained(log, [], in_order=False) != trained(log, [24], in_order=False)
    assert trained(log, []) == trained(log, [24])


def test_in_order_with_online_batches_is_refused() -> None:
    with pytest.raises(ValidationError, match="set in_order to false"):
        TrainerSettings(in_order=True, online=OnlineSettings(enabled=True))


# Over a real log.

STEPS = 5
RUN = run_of(max_steps=STEPS, max_policy_lag=1)


def ordered(model: str, **publish: object) -> TrainerSettings:
    return settings_of(model=model, checkpoint_every=2, in_order=True, publish=PublishSettings(skips=(), **publish))


def follow(log: KafkaSettings, last_version: int) -> None:
    """Write groups of the newest version, and every fourth group of an old one, until a version is published."""
    producer, newest = RecordProducer(log, "test"), -1
    names = (f"g{number}" for number in itertools.count())
    while newest < last_version:
        manifest = until(partial(newer, log, newest), "a new version", pause_s=0.1)[-1]
        newest, incarnation = manifest.version, manifest.incarnation
        for version in (newest, max(0, newest - 2), newest, newest):
            name = next(names)
            rollouts = [make_rollout(name, i, float(i % 2), version=version, incarnation=incarnation) for i in range(4)]
            write_group(producer, rollouts, closed_at=int(name[1:]))


def newer(log: KafkaSettings, version: int) -> list[Manifest]:
    return [manifest for manifest in written(log, Manifest) if manifest.version > version]


def copy(source: KafkaSettings, target: KafkaSettings, topic: Topic, replay_id: str) -> None:
    """Copy a topic record by record, as a replay does."""
    consumer = Consumer(consumer_settings(source, "test", "test-copy"))
    full = Names(source.topic_prefix).of(topic)
    end = consumer.get_watermark_offsets(TopicPartition(full, 0), timeout=60)[1]
    consumer.assign([TopicPartition(full, 0, 0)])
    producer, copied = RecordProducer(target, "test"), 0
    while copied < end:
        for message in consumer.consume(100, 1.0):
            if message.error() is not None:
                continue
            headers = replay_headers(replay_id, full, 0, message.offset())
            name = Names(target.topic_prefix).of(topic)
            producer.send_bytes(name, message.value(), key=message.key(), partition=0, headers=headers)
            copied += 1
    producer.flush()
    consumer.close()


def test_a_fresh_trainer_over_the_same_log_makes_the_same_weights(kafka, tiny_checkpoint, tmp_path) -> None:
    """The first trainer is stopped in the middle, and its groups arrive while it trains. The second one has all groups
    from the start, as copies of a replay that its settings accept."""
    live, store = kafka.fresh(1), StoreSettings(root=str(tmp_path / "live"))
    writer = threading.Thread(target=follow, args=(live, STEPS))
    writer.start()
    run(live, run_of(max_steps=2, max_policy_lag=1), store, ordered(tiny_checkpoint), threading.Event())
    run(live, RUN, store, ordered(tiny_checkpoint), threading.Event())
    writer.join(120)
    steps = written(live, TrainStep)
    (incarnation,) = {m.incarnation for m in written(live, Manifest)}
    assert len(steps) == STEPS
    assert {entry.reason for step in steps for entry in step.exclusions} == {"stale"}

    again = kafka.fresh(1)
    for topic in (Topic.ROLLOUTS, Topic.GROUPS):
        copy(live, again, topic, "copy")
    told = ordered(tiny_checkpoint, incarnation=incarnation).model_copy(update={"accept_replays": ("copy",)})
    run(again, RUN, StoreSettings(root=str(tmp_path / "again")), told, threading.Event())
    made = written(again, TrainStep)
    assert [s.fingerprint for s in made] == [s.fingerprint for s in steps]
    assert [(s.inputs, s.exclusions, s.lag) for s in made] == [(s.inputs, s.exclusions, s.lag) for s in steps]
    assert len({s.fingerprint for s in steps}) == STEPS


def test_several_partitions_are_refused_with_the_way_out(kafka, tiny_checkpoint, tmp_path) -> None:
    log = kafka.fresh(2)
    with pytest.raises(ValueError, match=r"has 2 partitions.*kafka\.partitions set to 1"):
        run(log, RUN, StoreSettings(root=str(tmp_path)), ordered(tiny_checkpoint), threading.Event())
