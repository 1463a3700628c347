"""One reader: single records by position, ranges by time, and what ends the wait for a log that delivers nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from tests.documents import delete, document, wait_for_ends, write
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.reader import LogReader, MissingRecordError, PartitionReader
from tidemill.schemas.log.watermarks import offset_since, watermarks

LONG_AGO_MS = int(time.time() - 3_600) * 1_000
DEADLINE_S = 180.0


@pytest.fixture
def log(kafka) -> KafkaSettings:
    return kafka.fresh(2, [Topic.DOCUMENTS])


def here(offset: int, partition: int = 0) -> Position:
    return Position(Topic.DOCUMENTS.value, partition, offset)


def test_a_record_is_fetched_by_its_position_and_the_reader_continues_from_there(log: KafkaSettings):
    write(log, range(8), 0, LONG_AGO_MS)
    write(log, range(8, 10), 1)
    with LogReader(log, [Topic.DOCUMENTS], start="end") as reader:
        for offset in (5, 6, 2):
            assert reader.at(here(offset)).record == document(offset)
        assert reader.next_offsets()[Topic.DOCUMENTS, 0] == 3
        assert [record.record for record in reader.read_to_end()] == [document(number) for number in range(3, 8)]
        passed: list[ConsumedRecord] = []
        assert reader.at(here(1, partition=1), passed.append).record == document(9)
        assert passed == [], "there is nothing between the end and the position that it goes back to"
        assert reader.at(here(4), passed.append).record == document(4)
        assert {record.record.document_id for record in passed} <= {"d5", "d6", "d7"}


def test_the_records_before_a_position_are_returned(log: KafkaSettings):
    write(log, range(6), 0, LONG_AGO_MS)
    with LogReader(log, [Topic.DOCUMENTS]) as reader:
        passed: list[ConsumedRecord] = []
        assert reader.at(here(3), passed.append).record == document(3)
        assert [record.offset for record in passed][:3] == [0, 1, 2]


def test_a_position_without_a_record_is_reported_at_once(log: KafkaSettings):
    full = Names(log.topic_prefix).of(Topic.DOCUMENTS)
    writer = Producer({"bootstrap.servers": log.address(), "transactional.id": full})
    writer.init_transactions(DEADLINE_S)
    for number in range(2):
        writer.begin_transaction()
        writer.produce(full, Codec().encode(document(number)), partition=0)
        writer.commit_transaction(DEADLINE_S)
    wait_for_ends(log, Topic.DOCUMENTS)
    started = time.monotonic()
    with LogReader(log, [Topic.DOCUMENTS]) as reader:
        # The end marker of a transaction uses an offset; this log ends with one.
        for offset in (1, 3):
            with pytest.raises(MissingRecordError, match=rf"documents\[0\] no longer holds offset {offset}"):
                reader.at(here(offset))
        for beyond in (here(4), here(0, partition=1), here(0, partition=7)):
            with pytest.raises(MissingRecordError, match="ends before offset"):
                reader.at(beyond)
        delete(log, 2)
        with pytest.raises(MissingRecordError, match="no longer holds offset 0"):
            reader.at(here(0))
        assert reader.at(here(2)).record == document(1)
    assert time.monotonic() - started < 90


def test_positions_are_fetched_together_without_deleted_records(log: KafkaSettings):
    write(log, range(8), 0, LONG_AGO_MS)
    write(log, range(8, 12), 1)
    delete(log, 2)
    wanted = {here(1), here(3), here(6), here(99), here(-1), here(2, partition=1), here(0, partition=7)}
    with LogReader(log) as reader:
        found = reader.fetch(wanted)
        assert {position: read.record for position, read in found.items()} == {
            here(3): document(3), here(6): document(6), here(2, partition=1): document(10)
        }  # fmt: skip
        assert reader.fetch(set()) == {}
        assert set(reader.fetch({here(7)})) == {here(7)}, "a reader fetches again and again"


def test_a_partition_is_read_from_a_time_to_its_end(log: KafkaSettings):
    write(log, range(6), 0, LONG_AGO_MS)
    with LogReader(log) as reader:
        for first in (4, 0):
            found = [read.record for read in reader.read_since(Topic.DOCUMENTS, 0, LONG_AGO_MS + first)]
            assert found == [document(number) for number in range(first, 6)]
        assert list(reader.read_since(Topic.DOCUMENTS, 0, LONG_AGO_MS + 6)) == []
        assert list(reader.read_since(Topic.DOCUMENTS, 1, 0)) == []


def test_each_partition_that_lost_records_is_reported(log: KafkaSettings):
    for partition in (0, 1):
        write(log, range(4), partition)
    full = Names(log.topic_prefix).of(Topic.DOCUMENTS)
    reader = PartitionReader(log, "test")
    for partition in (0, 1):
        delete(log, 3, partition)
    reader.assign({(full, 0): 1, (full, 1): 2})
    told = []
    for _ in range(2):
        with pytest.raises(RetentionGap) as gap:
            reader.check()
        told.append((gap.value.partition, gap.value.wanted, gap.value.first))
    assert told == [(0, 1, 3), (1, 2, 3)]
    reader.check()
    (messages, *_rest) = [found for found in reader.read_until(reader.ends()) if found]
    assert {message.offset() for message in messages} == {3}
    reader.close()


def test_a_log_that_delivers_nothing_before_the_end_ends_the_wait(log: KafkaSettings):
    write(log, range(3), 0, LONG_AGO_MS)
    full = Names(log.topic_prefix).of(Topic.DOCUMENTS)
    reader = PartitionReader(log, "test")
    reader.assign({(full, 0): 0})
    # The first record may take longer than the silence below.
    assert sum(map(len, reader.read_until({(full, 0): 3}))) == 3
    with pytest.raises(TimeoutError, match=r"delivered nothing for 1 s .*\[0\] at 3 of 10"):
        list(reader.read_until({(full, 0): 10}, silence_s=1))
    reader.close()


class Unsteady:
    """A consumer whose first answers are these errors."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        if self.errors:
            raise KafkaException(KafkaError(self.errors.pop()))
        return 3, 7 + place.partition

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[SimpleNamespace]:
        error = KafkaError(self.errors.pop()) if self.errors else None
        return [SimpleNamespace(offset=each.offset, error=error) for each in places]


def test_a_request_for_offsets_is_repeated_after_a_transient_error():
    transient = KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._DESTROY_BROKER, KafkaError.UNKNOWN_LEADER_EPOCH
    assert watermarks(Unsteady(*transient), ("t", 1)) == (3, 8)
    assert offset_since(Unsteady(*transient), ("t", 0), 5) == 5
    with pytest.raises(KafkaException):
        watermarks(Unsteady(KafkaError.TOPIC_AUTHORIZATION_FAILED), ("t", 0))
    with pytest.raises(KafkaException):
        offset_since(Unsteady(KafkaError.TOPIC_AUTHORIZATION_FAILED), ("t", 0), 5)
