"""Transactional writes: each record once, readers pass transaction ends, a replaced producer writes no more."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import KafkaException

from tests.documents import wait_for_ends
from tests.records import build
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.fenced_producer import FencedError, FencedProducer
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import StepPlan

PLAN = build(StepPlan, step=1, config_hash="hash", incarnation="incarnation", trainer="trainer")


def plan(step: int, trainer: str = "one") -> tuple[str, StepPlan]:
    return "run", replace(PLAN, step=step, trainer=trainer)


@pytest.fixture
def log(kafka) -> KafkaSettings:
    return kafka.fresh(1, [Topic.STEPS])


def steps_of(log: KafkaSettings, reader: LogReader) -> list[tuple[int, str]]:
    wait_for_ends(log, Topic.STEPS)
    return [(located.record.step, located.record.trainer) for located in reader.read_to_end(120)]


def test_what_is_sent_is_in_the_log_once_and_in_order(log) -> None:
    writer = FencedProducer(log, "test", f"{log.topic_prefix}writer")
    first = writer.send_acked(Topic.STEPS, [plan(1), plan(2)])
    second = writer.send_acked(Topic.STEPS, [plan(3)])
    assert [place.offset for place in (*first, *second)] == [0, 1, 3], "a transaction's end takes an offset"
    with LogReader(log, [Topic.STEPS]) as reader:
        assert [step for step, _ in steps_of(log, reader)] == [1, 2, 3]
    with pytest.raises(ValueError, match="StepPlan does not fit"):
        writer.send_acked(Topic.STEPS, [("run", replace(PLAN, step="one"))])
    writer.send_acked(Topic.STEPS, [plan(4)])


def test_readers_reach_the_end_of_any_log(log) -> None:
    """Read from the beginning, from the end, and from the offset after each record."""
    writer = FencedProducer(log, "test", f"{log.topic_prefix}writer")
    with LogReader(log, [Topic.STEPS], start="end") as following, LogReader(log, [Topic.STEPS]) as reader:
        for step in range(1, 4):
            (place,) = writer.send_acked(Topic.STEPS, [plan(step)])
            assert [s for s, _ in steps_of(log, reader)] == [step]
            assert [s for s, _ in steps_of(log, following)] == [step]
            assert place.offset < reader.next_offsets()[Topic.STEPS, 0] <= reader.end_offsets()[Topic.STEPS, 0]
        begin = reader.next_offsets()
    with LogReader(log, [Topic.STEPS], start=begin) as resumed:
        started = time.monotonic()
        assert list(resumed.read_to_end(120)) == []
        assert time.monotonic() - started < 40
        writer.send_acked(Topic.STEPS, [plan(4)])
        assert [s for s, _ in steps_of(log, resumed)] == [4]


def test_a_replaced_producer_writes_nothing_more(log) -> None:
    name = f"{log.topic_prefix}writer"
    older = FencedProducer(log, "test", name)
    older.send_acked(Topic.STEPS, [plan(1, "older")])
    newer = FencedProducer(log, "test", name)
    newer.send_acked(Topic.STEPS, [plan(2, "newer")])
    for _ in range(2):
        with pytest.raises(FencedError, match=r"another process has begun to write as .*writer"):
            older.send_acked(Topic.STEPS, [plan(2, "older")])
    other = FencedProducer(log, "test", f"{name}-of-another-run")
    newer.send_acked(Topic.STEPS, [plan(3, "newer")])
    other.send_acked(Topic.STEPS, [plan(1, "other")])
    newer.send_acked(Topic.STEPS, [plan(4, "newer")])
    with LogReader(log, [Topic.STEPS]) as reader:
        assert [who for _, who in steps_of(log, reader)] == ["older", "newer", "newer", "other", "newer"]


def test_an_open_transaction_of_a_replaced_producer_is_not_read_and_blocks_no_reader(log) -> None:
    """The producer stopped within a transaction: readers wait for its end, until it is aborted."""
    name = f"{log.topic_prefix}writer"
    halted = FencedProducer(log, "test", name)
    halted._producer.begin_transaction()
    halted._producer.produce(f"{log.topic_prefix}train.steps", halted._codec.encode(plan(1, "halted")[1]), key=b"run")
    assert halted._producer.flush(120) == 0
    FencedProducer(log, "test", name).send_acked(Topic.STEPS, [plan(1, "newer")])
    started = time.monotonic()
    with LogReader(log, [Topic.STEPS]) as reader:
        assert steps_of(log, reader) == [(1, "newer")]
    assert time.monotonic() - started < 40
    with pytest.raises(KafkaException):
        halted._producer.commit_transaction(10)


def test_an_absent_log_is_reported(monkeypatch) -> None:
    monkeypatch.setattr("tidemill.schemas.log.fenced_producer.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr("tidemill.schemas.log.fenced_producer.CALL_TIMEOUT_S", 0.2)
    with pytest.raises(DeliveryError, match="did not accept the records of name"):
        FencedProducer(KafkaSettings(bootstrap="127.0.0.1:9"), "test", "name")


def test_calls_of_two_threads_follow_one_another(log) -> None:
    """Each waits for the other's transaction; a transaction begun within another would be refused."""
    writer = FencedProducer(log, "test", f"{log.topic_prefix}writer")
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(writer.send_acked, Topic.STEPS, [plan(step), plan(step)]) for step in range(8)]
        places = [[place.offset for place in one.result()] for one in sent]
    assert all(second == first + 1 for first, second in places)
    with LogReader(log, [Topic.STEPS]) as reader:
        assert sorted(step for step, _ in steps_of(log, reader)) == sorted([*range(8)] * 2)
