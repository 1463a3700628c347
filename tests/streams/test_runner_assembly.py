"""Group assembly by each runner on a real Kafka: groups, poisoned records, deadlines in idle partitions, restarts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stream_support import (
    FAR_AWAY_US,
    StreamProcess,
    commit_in_transaction,
    dead_letters,
    fresh_topics,
    group_of,
    read_records,
    rollout,
    stream_process,
)

from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import HEADER_OFFSET, HEADER_REASON, RecordProducer, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import CloseReason, Tick
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.runner.base import StreamFailure, checked_partitions
from tidemill.streams.runner.worker import group_assembly

ASSEMBLY = group_assembly(RunSettings(), StreamSettings())

pytestmark = pytest.mark.usefixtures("runner")


@pytest.fixture
def settings(kafka, topic_prefix: str) -> KafkaSettings:
    return fresh_topics(kafka.bootstrap, topic_prefix)


@pytest.fixture
def producer(settings: KafkaSettings) -> RecordProducer:
    return RecordProducer(settings, "test")


@pytest.fixture
def worker(settings: KafkaSettings, tmp_path: Path) -> Iterator[StreamProcess]:
    with stream_process(settings, tmp_path, tick_interval_s=0.2) as process:
        yield process


def send_group(producer: RecordProducer, group_id: str, size: int = 4, deadline_at: int = FAR_AWAY_US) -> None:
    for index in range(size):
        producer.send(Topic.ROLLOUTS, rollout(group_id, index, deadline_at=deadline_at), key=group_id)
    producer.flush()


def test_groups_are_in_the_partition_of_their_rollouts(settings, producer, worker):
    for name in "abcdefgh":
        send_group(producer, name)
    with LogReader(settings, [Topic.GROUPS]) as groups, LogReader(settings, [Topic.ROLLOUTS]) as rollouts:
        found = read_records(groups, lambda read: len(read) >= 8, 240, worker)
        places = {(r.partition, r.offset): r.record for r in rollouts.read_to_end() if not isinstance(r.record, Tick)}
    assert sorted(group_of(f).group_id for f in found) == list("abcdefgh")
    assert {f.partition for f in found} == {0, 1}
    for record in found:
        group = group_of(record)
        assert record.key == group.group_id.encode()
        assert group.closed_by is CloseReason.SIZE
        for member in group.members:
            assert member.partition == record.partition
            assert places[member.partition, member.offset].rollout_id == member.rollout_id
    assert worker.stop() == 0


def test_poison_goes_to_the_dead_letters_and_the_stream_continues(settings, producer, worker):
    full = Names(settings.topic_prefix).of(Topic.ROLLOUTS)
    poison = [(b"junk", b"g"), (None, b"g"), (None, None), (b"", b"g"), (b"\xc3\x01" + bytes(20), None)]
    # As large as the topic allows: the dead letter about it is larger.
    poison.append((os.urandom(1_048_400), b"g"))
    for value, key in poison:
        producer.send_bytes(full, value, key=key, partition=0)
    producer.send(Topic.ROLLOUTS, rollout("g", 0), key="another group")
    producer.send(Topic.ROLLOUTS, rollout("g", 9), key="g")
    send_group(producer, "g")
    with LogReader(settings, [Topic.GROUPS]) as groups:
        (found,) = read_records(groups, lambda read: len(read) >= 1, 240, worker)
    assert group_of(found).closed_by is CloseReason.SIZE
    letters = dead_letters(settings, Topic.ROLLOUTS, len(poison) + 2)
    assert len(letters) == len(poison) + 2
    assert all(headers[HEADER_REASON] for _, headers in letters)
    assert [value for value, _ in letters].count(b"junk") == 1
    assert any(value == poison[-1][0] for value, _ in letters)
    assert letters[0][1][HEADER_OFFSET].isdigit()


def test_deadline_closes_a_group_in_an_idle_partition(settings, producer, worker):
    deadline = now_us() + 1_500_000
    producer.send(Topic.ROLLOUTS, rollout("g", 0, deadline_at=deadline), key="g")
    producer.flush()
    with LogReader(settings, [Topic.GROUPS]) as groups:
        (found,) = read_records(groups, lambda read: len(read) >= 1, 240, worker)
        closed = group_of(found)
        assert closed.closed_by is CloseReason.DEADLINE
        assert closed.closed_at >= deadline
        producer.send(Topic.ROLLOUTS, rollout("g", 1, deadline_at=deadline), key="g")
        producer.flush()
        (late,) = read_records(groups, lambda read: len(read) >= 1, 240, worker)
    assert group_of(late).closed_by is CloseReason.LATE
    with LogReader(settings, [Topic.ROLLOUTS]) as rollouts:
        ticks = [r for r in rollouts.read_to_end() if isinstance(r.record, Tick)]
    assert {tick.partition for tick in ticks} == {found.partition}, "an idle partition without groups needs no ticks"


def test_a_second_worker_continues_where_the_first_stopped(settings, producer, worker, tmp_path):
    for index in (0, 1):
        producer.send(Topic.ROLLOUTS, rollout("open", index), key="open")
    send_group(producer, "whole")
    with LogReader(settings, [Topic.GROUPS]) as groups:
        read_records(groups, lambda read: len(read) >= 1, 240, worker)
        assert worker.stop() == 0
        send_group(producer, "whole")
        for index in (2, 3):
            producer.send(Topic.ROLLOUTS, rollout("open", index), key="open")
        producer.flush()
        with stream_process(settings, tmp_path / "second") as second:
            (found,) = read_records(groups, lambda read: len(read) >= 1, 240, second)
            assert second.stop() == 0
        assert not list(groups.read_to_end())
    assert group_of(found).group_id == "open"
    assert [m.rollout_id for m in group_of(found).members] == [f"open/{i:03d}" for i in range(4)]


def test_partitions_move_to_the_remaining_worker(settings, producer, tmp_path):
    """Two workers share the partitions; if one is killed, the other continues its open groups."""
    names = [f"g{i}" for i in range(12)]
    marks = {f"marks-that-both-work-{number}" for number in (0, 1, 4)}
    fast = {"session_timeout_s": 6.0, "heartbeat_interval_s": 1.0}
    with (
        stream_process(settings, tmp_path / "one", **fast) as one,
        stream_process(settings, tmp_path / "two", **fast) as two,
        LogReader(settings, [Topic.GROUPS]) as groups,
    ):
        for index in range(4):
            for name in names:
                producer.send(Topic.ROLLOUTS, rollout(name, index), key=name)
            if index == 2:
                for mark in marks:
                    send_group(producer, mark)
                read_records(groups, lambda read: {group_of(f).group_id for f in read} >= marks, 240, two)
                one.kill()
        producer.flush()
        found = read_records(groups, lambda read: {group_of(f).group_id for f in read} >= set(names), 240, two)
    # The remaining worker may emit a mark again.
    by_name = {group_of(f).group_id: group_of(f) for f in found if group_of(f).group_id not in marks}
    assert sorted(by_name) == sorted(names)
    assert all(len(g.members) == 4 and g.closed_by is CloseReason.SIZE for g in by_name.values())


def test_missing_and_unequal_topics_are_reported(kafka, topic_prefix):
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    with pytest.raises(StreamFailure, match="missing topics"):
        checked_partitions(settings, ASSEMBLY)
    create_topics(settings)
    assert checked_partitions(settings, ASSEMBLY) == 8


def test_a_broken_state_ends_the_worker(settings, producer, tmp_path):
    send_group(producer, "first")
    with (
        LogReader(settings, [Topic.GROUPS]) as groups,
        stream_process(settings, tmp_path) as worker,
    ):
        read_records(groups, lambda read: len(read) >= 1, 240, worker)
        assert worker.stop() == 0
        changelog = f"{settings.topic_prefix}group-assembly.run-groups-changelog"
        producer.send_bytes(changelog, b"junk", key=b"junk", partition=0)
        producer.flush()
        worker.start()
        until(lambda: not worker.running(), "the worker's end", 240)
        assert worker.stop() == 1
        assert "a state begins with" in worker.log.read_text()


def test_a_lost_record_ends_faust_and_a_transaction_marker_ends_no_runner(settings, producer, tmp_path, runner):
    send_group(producer, "first")
    with (
        LogReader(settings, [Topic.GROUPS]) as groups,
        stream_process(settings, tmp_path) as worker,
    ):
        read_records(groups, lambda read: len(read) >= 1, 240, worker)
        # The end marker of a transaction uses an offset that no reader receives, like a lost record.
        second = rollout("second", 0, group_size=1)
        commit_in_transaction(settings, Topic.ROLLOUTS, "second", second, partition_of("first", 2))
        producer.send(
            Topic.ROLLOUTS, rollout("third", 0, group_size=1), key="third", partition=partition_of("first", 2)
        )
        producer.flush()
        if runner is RunnerName.FAUST:
            until(lambda: not worker.running(), "the worker's end", 240)
            assert worker.stop() == 1
            assert "the records between were lost" in worker.log.read_text()
            worker.start()
        read_records(groups, lambda read: {group_of(f).group_id for f in read} >= {"third"}, 240, worker)
        assert worker.stop() == 0
