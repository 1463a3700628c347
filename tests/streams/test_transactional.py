"""The transactional runner: kills and errors at each step of a transaction, fencing, and use of Faust's state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient
from stream_support import CODEC, RUN_ID, StreamProcess, group_of, read_records, rollout, stream_process

from tests.waiting import until
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.streams.config import StreamSettings
from tidemill.streams.offline import replay
from tidemill.streams.runner.worker import group_assembly

GROUPS = 60
SIZE = 4
SMALL = {"runner": "transactional", "transaction_records": 10, "stall_timeout_s": 0}
"""Small transactions, so that many groups are open between two transactions."""
POINTS = [
    f"{when}:{call}"
    for call in ("begin_transaction", "flush", "send_offsets_to_transaction", "commit_transaction")
    for when in ("before", "after")
]
DOOMED = "killed_worker"


def fill(settings: KafkaSettings, groups: Sequence[int], indices: Sequence[int] = range(SIZE)) -> None:
    with RecordProducer(settings, "test") as producer:
        for index in indices:
            for group in groups:
                producer.send(Topic.ROLLOUTS, rollout(f"g{group}", index, reward=index / 3), key=f"g{group}")


def fill_in_blocks(settings: KafkaSettings) -> None:
    """Write groups six at a time, so that most transactions end a group and leave others open."""
    for first in range(0, GROUPS, 6):
        fill(settings, range(first, first + 6))


def expected(settings: KafkaSettings) -> list[bytes]:
    """Return the groups that the machine makes of the log, without a worker."""
    run, stream = RunSettings(run_id=RUN_ID), StreamSettings()
    replayed = replay(settings, group_assembly(run, stream), (), 60)
    return sorted(CODEC.encode(found.output.record) for found in replayed.emitted)


@pytest.fixture
def groups(settings: KafkaSettings) -> Iterator[LogReader]:
    with LogReader(settings, [Topic.GROUPS]) as reader:
        yield reader


def read_all(groups: LogReader, count: int, worker: StreamProcess) -> list[ConsumedRecord]:
    """Return the committed groups: read until there are `count`, and then all until the worker has stopped."""
    found = read_records(groups, lambda read: len(read) >= count, 240, worker)
    assert worker.stop() == 0
    return found + list(groups.read_to_end())


def values(found: Sequence[ConsumedRecord]) -> list[bytes]:
    return sorted(located.value or b"" for located in found)


def test_errors_at_every_step_leave_each_group_there_once(settings, groups, tmp_path):
    fill_in_blocks(settings)
    with stream_process(settings, tmp_path, command=[DOOMED, "fail", *POINTS], **SMALL) as worker:
        found = read_all(groups, GROUPS, worker)
    assert values(found) == expected(settings)
    said = worker.log.read_text()
    assert all(f"an error {point}" in said for point in POINTS)
    assert said.count("a transaction is aborted") >= len(POINTS)


def test_kills_at_every_step_leave_each_group_there_once(settings, groups, tmp_path):
    fill_in_blocks(settings)
    for point in POINTS:
        doomed = stream_process(settings, tmp_path, command=[DOOMED, "kill", point], instance="one", **SMALL)
        with doomed as worker:
            until(lambda worker=worker: not worker.running(), f"the worker's own end {point}", 240)
            assert worker.stop() == -signal.SIGKILL, worker.log.read_text()
    with stream_process(settings, tmp_path, instance="one", **SMALL) as worker:
        found = read_all(groups, GROUPS, worker)
    assert values(found) == expected(settings)


def test_a_worker_replaced_during_a_pause_writes_nothing_more(settings, groups, tmp_path):
    fill(settings, range(GROUPS), range(2))
    fast = {**SMALL, "session_timeout_s": 6.0, "heartbeat_interval_s": 1.0}
    with stream_process(settings, tmp_path / "one", **fast) as one:
        until(lambda: committed(settings) == 2 * GROUPS, "the first worker's state", 240)
        assert one.process is not None
        os.kill(one.process.pid, signal.SIGSTOP)
        fill(settings, range(GROUPS), range(2, SIZE))
        with stream_process(settings, tmp_path / "two", **fast) as two:
            found = read_records(groups, lambda read: len(read) >= GROUPS, 240, two)
            os.kill(one.process.pid, signal.SIGCONT)
            noticed = ("the group removed this worker", "a transaction is aborted")
            until(lambda: any(said in one.log.read_text() for said in noticed), lambda: one.log.read_text(), 240)
            assert one.running(), one.log.read_text()
            fill(settings, [GROUPS])
            found += read_records(groups, lambda read: len(read) >= 1, 240, two)
            assert one.stop() == 0
            assert two.stop() == 0
    found += list(groups.read_to_end())
    assert values(found) == expected(settings)


def committed(settings: KafkaSettings) -> int:
    """Return the sum of the offsets that the workers' consumer group has committed for its input."""
    admin = AdminClient({"bootstrap.servers": settings.address()})
    name = f"{settings.topic_prefix}group-assembly.{RUN_ID}"
    (answer,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)]).values()
    try:
        return sum(max(0, tp.offset) for tp in answer.result().topic_partitions)
    except KafkaException:  # the group does not exist yet
        return 0


def test_it_continues_from_fausts_state_and_faust_refuses_its_state(settings, groups, tmp_path):
    fill(settings, range(GROUPS), range(2))
    with stream_process(settings, tmp_path / "faust", max_batch=7) as worker:
        fill(settings, [GROUPS])
        read_records(groups, lambda read: len(read) >= 1, 240, worker)
        assert worker.stop() == 0
    fill(settings, range(GROUPS), range(2, SIZE))
    with stream_process(settings, tmp_path / "transactional", **SMALL) as worker:
        found = read_all(groups, GROUPS, worker)
    assert sorted(group_of(f).group_id for f in found) == sorted(f"g{n}" for n in range(GROUPS))
    assert all(len(group_of(f).members) == SIZE for f in found)
    with stream_process(settings, tmp_path / "back", runner="faust") as worker:
        until(lambda: not worker.running(), "the worker's end", 240)
        assert worker.stop() == 1
        assert "was written by the transactional runner" in worker.log.read_text()


def test_only_one_of_two_workers_with_the_same_name_writes(settings, groups, tmp_path):
    with stream_process(settings, tmp_path / "one", instance="same", **SMALL) as one:
        fill(settings, [0])
        read_records(groups, lambda read: len(read) >= 1, 240, one)
        with stream_process(settings, tmp_path / "two", instance="same", **SMALL) as two:
            fill(settings, range(1, GROUPS))
            until(lambda: not one.running(), "the end of the worker that was replaced", 240)
            assert one.stop() == 1
            found = read_all(groups, GROUPS - 1, two)
    assert len(found) == GROUPS - 1
    assert {group_of(f).group_id for f in found} == {f"g{n}" for n in range(1, GROUPS)}


def test_a_worker_that_cannot_write_an_output_leaves_it_to_the_next(settings, groups, tmp_path):
    with RecordProducer(settings, "test") as producer:
        for index in range(24):
            producer.send(Topic.ROLLOUTS, rollout("g", index, group_size=24), key="g")
    narrow = settings.model_copy(update={"client_options": {"message.max.bytes": "1000"}})
    with stream_process(narrow, tmp_path / "one", **SMALL) as one:
        until(lambda: not one.running(), "the worker's own end", 240)
        assert one.stop() != 0
    assert "Message size too large" in one.log.read_text()
    with stream_process(settings, tmp_path / "two", **SMALL) as two:
        found = read_all(groups, 1, two)
    assert values(found) == expected(settings)
