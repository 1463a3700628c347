"""Group assembly by each runner on a real Kafka: groups, poisoned records, deadlines in idle partitions, restarts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export nothing
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from stream_support import (
    ASSEMBLY,
    StreamProcess,
    commit_in_transaction,
    dead_letters,
    fresh_topics,
    group_of,
    read_records,
    rollout,
    stream_process,
)

from tests.conftest import a_prefix
from tests.documents import delete
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import HEADER_OFFSET, HEADER_REASON, RecordProducer, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import CloseReason, Rollout, Tick
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.runner.base import checked_partitions
from tidemill.streams.runner.worker import group_assembly


@pytest.fixture(scope="module")
def shared(kafka, runner, tmp_path_factory) -> Iterator[tuple[KafkaSettings, StreamProcess]]:
    """A log and its worker; each test has its own groups."""
    settings = fresh_topics(kafka.bootstrap, a_prefix(), topics=ASSEMBLY)
    with stream_process(settings, tmp_path_factory.mktemp("worker"), tick_interval_s=0.2) as worker:
        yield settings, worker
        assert worker.stop() == 0


def send(settings: KafkaSettings, names: Iterable[str], indices: Sequence[int] = range(4), **changes: Any) -> None:
    """Write rollouts of groups."""
    with RecordProducer(settings, "test") as producer:
        for name in names:
            for index in indices:
                producer.send(Topic.ROLLOUTS, rollout(name, index, **changes), key=name)


def read_groups(groups: LogReader, worker: StreamProcess, *names: str) -> list[ConsumedRecord]:
    """Read on until each of these groups is there, and return their records."""
    found = read_records(groups, lambda read: {group_of(f).group_id for f in read} >= set(names), 240, worker)
    return [located for located in found if group_of(located).group_id in names]


def test_groups_are_in_the_partition_of_their_rollouts(shared):
    settings, worker = shared
    send(settings, "abcdefgh")
    with LogReader(settings, [Topic.GROUPS]) as groups, LogReader(settings, [Topic.ROLLOUTS]) as rollouts:
        found = read_groups(groups, worker, *"abcdefgh")
        places = {(r.partition, r.offset): r.record for r in rollouts.read_to_end() if isinstance(r.record, Rollout)}
    assert sorted(group_of(f).group_id for f in found) == list("abcdefgh")
    assert {f.partition for f in found} == {0, 1}
    for record in found:
        group = group_of(record)
        assert record.key == group.group_id.encode()
        assert group.closed_by is CloseReason.SIZE
        for member in group.members:
            assert member.partition == record.partition
            assert places[member.partition, member.offset].rollout_id == member.rollout_id


def test_poison_goes_to_the_dead_letters_and_the_stream_continues(shared):
    settings, worker = shared
    full = Names(settings.topic_prefix).of(Topic.ROLLOUTS)
    poison = [(b"junk", b"g"), (None, b"g"), (None, None), (b"", b"g"), (b"\xc3\x01" + bytes(20), None)]
    # As large as the topic allows: the dead letter about it is larger.
    poison.append((os.urandom(1_048_400), b"g"))
    with RecordProducer(settings, "test") as producer:
        for value, key in poison:
            producer.send_bytes(full, value, key=key, partition=0)
        producer.send(Topic.ROLLOUTS, rollout("good", 0), key="another group")
    send(settings, ["good"], [9, 0, 1, 2, 3])
    with LogReader(settings, [Topic.GROUPS]) as groups:
        (found,) = read_groups(groups, worker, "good")
    assert group_of(found).closed_by is CloseReason.SIZE
    letters = dead_letters(settings, Topic.ROLLOUTS, len(poison) + 2)
    assert len(letters) == len(poison) + 2
    assert all(headers[HEADER_REASON] for _, headers in letters)
    assert [value for value, _ in letters].count(b"junk") == 1
    assert any(value == poison[-1][0] for value, _ in letters)
    assert letters[0][1][HEADER_OFFSET].isdigit()


def test_deadline_closes_a_group_in_an_idle_partition(shared):
    settings, worker = shared
    opened = now_us()
    deadline = opened + 1_500_000
    with RecordProducer(settings, "test") as producer:
        first = rollout("slow", 0, deadline_at=deadline)
        producer.send(Topic.ROLLOUTS, first, key="slow", timestamp_ms=to_ms(opened))
    with LogReader(settings, [Topic.GROUPS]) as groups:
        (found,) = read_groups(groups, worker, "slow")
        closed = group_of(found)
        assert closed.closed_by is CloseReason.DEADLINE
        assert closed.closed_at >= deadline
        send(settings, ["slow"], [1], deadline_at=deadline)
        (late,) = read_groups(groups, worker, "slow")
    assert group_of(late).closed_by is CloseReason.LATE
    with LogReader(settings, [Topic.ROLLOUTS]) as rollouts:
        ticks = [r for r in rollouts.read_to_end() if isinstance(r.record, Tick)]
    assert {tick.partition for tick in ticks} == {found.partition}, "an idle partition without groups needs no ticks"


def test_a_second_worker_continues_where_the_first_stopped_and_not_from_a_broken_state(settings, tmp_path, runner):
    send(settings, ["open"], [0, 1])
    send(settings, ["whole"])
    with LogReader(settings, [Topic.GROUPS]) as groups:
        with stream_process(settings, tmp_path / "first") as first:
            read_groups(groups, first, "whole")
            assert first.stop() == 0
        send(settings, ["whole"])
        send(settings, ["open"], [2, 3])
        with stream_process(settings, tmp_path / "second") as second:
            (found,) = read_records(groups, lambda read: len(read) >= 1, 240, second)
            assert second.stop() == 0
            assert not list(groups.read_to_end())
            assert group_of(found).group_id == "open"
            assert [m.rollout_id for m in group_of(found).members] == [f"open/{i:03d}" for i in range(4)]
            with RecordProducer(settings, "test") as producer:
                changelog = f"{settings.topic_prefix}group-assembly.run-groups-changelog"
                producer.send_bytes(changelog, b"junk", key=b"junk", partition=0)
            second.start()
            until(lambda: not second.running(), "the worker's end", 240)
            assert second.stop() == 1
            assert "a state begins with" in second.log.read_text()


def owners(settings: KafkaSettings) -> int:
    """Return the number of workers that own partitions; 0 while the consumer group divides them."""
    client = admin_client(settings)  # kept until the answer is there
    (answer,) = client.describe_consumer_groups([f"{settings.topic_prefix}group-assembly.run"]).values()
    group = answer.result()
    found = sum(bool(member.assignment and member.assignment.topic_partitions) for member in group.members)
    return found if group.state is ConsumerGroupState.STABLE else 0


def test_partitions_move_to_the_remaining_worker(settings, tmp_path, runner):
    """Two workers share the partitions; if one is killed, the other continues its open groups."""
    names = [f"g{i}" for i in range(12)]
    marks = {f"marks-that-both-work-{number}" for number in (0, 1, 4)}
    # A pause of the remaining worker must not end its session too.
    fast, patient = ({"session_timeout_s": limit_s, "heartbeat_interval_s": 2.0} for limit_s in (6.0, 25.0))
    with (
        stream_process(settings, tmp_path / "one", **fast) as one,
        stream_process(settings, tmp_path / "two", **patient) as two,
        LogReader(settings, [Topic.GROUPS]) as groups,
    ):
        until(lambda: owners(settings) == 2, "two workers that own partitions", 240)
        for index in range(4):
            send(settings, names, [index])
            if index == 2:
                send(settings, marks)
                read_groups(groups, two, *marks)
                one.kill()
        by_name = {group_of(f).group_id: group_of(f) for f in read_groups(groups, two, *names)}
    assert sorted(by_name) == sorted(names)
    assert all(len(g.members) == 4 and g.closed_by is CloseReason.SIZE for g in by_name.values())


def test_a_lost_record_ends_faust_and_a_transaction_marker_ends_no_runner(settings, tmp_path, runner):
    partition = partition_of("first", 2)
    send(settings, ["first"])
    with LogReader(settings, [Topic.GROUPS]) as groups, stream_process(settings, tmp_path) as worker:
        read_groups(groups, worker, "first")
        # The end marker of a transaction uses an offset that no reader receives, like a lost record.
        commit_in_transaction(settings, Topic.ROLLOUTS, "second", rollout("second", 0, group_size=1), partition)
        with RecordProducer(settings, "test") as producer:
            third = rollout("third", 0, group_size=1)
            producer.send(Topic.ROLLOUTS, third, key="third", partition=partition)
        if runner is RunnerName.FAUST:
            until(lambda: not worker.running(), "the worker's end", 240)
            assert worker.stop() == 1
            assert "the records between were lost" in worker.log.read_text()
            worker.start()
        read_groups(groups, worker, "third")
        assert worker.stop() == 0


@pytest.mark.parametrize(
    ("topic", "change", "remedy"),
    [
        (Topic.GROUPS, {"max.message.bytes": "200"}, "raise `max.message.bytes` of the topic"),
        (Topic.ROLLOUTS, {"cleanup.policy": "compact"}, "with `tidemill topics`"),
    ],
)
def test_a_topic_that_refuses_a_record_ends_the_worker_with_what_to_do(
    settings, tmp_path, runner, topic, change, remedy
):
    name = Names(settings.topic_prefix).of(topic)
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in change.items()]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    client = admin_client(settings)
    for changed in client.incremental_alter_configs([resource]).values():
        changed.result()
    send(settings, "a")
    send(settings, "b", [0], deadline_at=now_us() + 1_000_000)
    with stream_process(settings, tmp_path, tick_interval_s=0.2) as worker:
        until(lambda: not worker.running(), "the worker's end", 120)
        assert worker.stop() == 1
        said = worker.log.read_text()
    assert f"the log refused a record for {name}" in said or f"ProduceRequest for {name}" in said
    assert remedy in said


def test_missing_topics_are_reported(kafka, topic_prefix):
    absent = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix, partitions=2)
    processor = group_assembly(RunSettings(), StreamSettings())
    with pytest.raises(RuntimeError, match="missing topics"):
        checked_partitions(absent, processor)
    assert checked_partitions(fresh_topics(kafka.bootstrap, topic_prefix, 3, ASSEMBLY), processor) == 3


def test_a_retention_gap_ends_the_worker_unless_the_settings_allow_it(kafka, topic_prefix, tmp_path, runner):
    settings = fresh_topics(kafka.bootstrap, topic_prefix, 1, ASSEMBLY)
    send(settings, "abcd", [0], group_size=1)
    delete(settings, 2, topic=Topic.ROLLOUTS)
    with LogReader(settings, [Topic.GROUPS]) as groups:
        with stream_process(settings, tmp_path) as worker:
            found = read_records(groups, lambda read: len(read) >= 2, 240, worker)
            assert [group_of(f).group_id for f in found] == ["c", "d"], "a fresh worker begins with what there is"
            assert worker.stop() == 0
            assert "is read from its beginning, which is now offset 2" in worker.log.read_text()
            send(settings, "efg", [0], group_size=1)
            delete(settings, 6, topic=Topic.ROLLOUTS)
            worker.start()
            until(lambda: not worker.running(), "the worker's end", 240)
            assert worker.stop() == 1
            said = worker.log.read_text()
            assert "rollouts[0]: the log no longer keeps offset 4, the log begins at 6" in said
            assert "stream.accept_gaps" in said
        with stream_process(settings, tmp_path / "accepting", accept_gaps=True) as worker:
            (found,) = read_records(groups, lambda read: len(read) >= 1, 240, worker)
            assert group_of(found).group_id == "g"
            assert worker.stop() == 0
            assert "2 offsets skipped so far" in worker.log.read_text()
