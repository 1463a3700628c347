"""Records that the log deleted before they were read: every reader reports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition

from tests.documents import delete, document, wait_for_ends, write
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.reader import LogReader

DEADLINE_S = 180.0
HERE = (Topic.DOCUMENTS, 0)


@pytest.fixture
def settings(kafka) -> KafkaSettings:
    return kafka.fresh(1, [Topic.DOCUMENTS])


def offsets(read: Callable[[], list[ConsumedRecord]], count: int) -> list[int]:
    found: list[int] = []
    until(lambda: found.extend(located.offset for located in read()) or len(found) >= count, "records")
    return found


def gap(read: Callable[[], list[ConsumedRecord]]) -> RetentionGap:
    with pytest.raises(RetentionGap) as told:
        offsets(read, 10**6)
    return told.value


def test_a_reader_behind_the_log_gets_an_error_and_may_continue(settings: KafkaSettings):
    write(settings, range(10))
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        assert offsets(reader.poll, 10) == list(range(10))
        # The reader is slower than retention.
        here = [TopicPartition(Names(settings.topic_prefix).of(Topic.DOCUMENTS), 0)]
        reader._log.client.pause(here)
        write(settings, range(10, 16))
        delete(settings, 13)
        reader._log.client.resume(here)
        told = gap(reader.poll)
        assert (told.topic, told.partition, told.wanted, told.first) == (
            Names(settings.topic_prefix).of(Topic.DOCUMENTS), 0, 10, 13
        )  # fmt: skip
        assert "stream.accept_gaps" in str(told)
        assert reader.next_offsets()[HERE] == 13
        assert offsets(reader.poll, 3) == [13, 14, 15]
        write(settings, range(16, 18))
        assert [located.offset for located in reader.read_to_end()] == [16, 17]
        reader.seek(*HERE, 3)
        assert offsets(reader.poll, 5) == [13, 14, 15, 16, 17], "who seeks sees from the offset what is gone"


def test_a_deleted_start_is_reported_and_the_beginning_is_the_first_kept_record(settings: KafkaSettings):
    write(settings, range(10))
    with LogReader(settings, [Topic.DOCUMENTS]) as early:
        delete(settings, 5)
        # What the reader fetched before the deletion comes too.
        found: list[int] = []
        until(lambda: found.extend(located.offset for located in early.poll()) or 9 in found, "records")
        assert found[-5:] == [5, 6, 7, 8, 9], "nobody was promised what was there when it opened"
    with pytest.raises(RetentionGap, match="the log begins at 5"):
        LogReader(settings, [Topic.DOCUMENTS], start={HERE: 2})
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        assert [located.offset for located in reader.read_to_end()] == [5, 6, 7, 8, 9]


def test_a_position_after_the_end_is_reported(settings: KafkaSettings):
    write(settings, range(3))
    with LogReader(settings, [Topic.DOCUMENTS], start={HERE: 50}) as reader:
        with pytest.raises(LookupError, match="is at offset 50 and the log ends at 3"):
            offsets(reader.poll, 1)
        write(settings, range(3, 5))
        assert offsets(reader.poll, 2) == [3, 4]


def test_the_ends_of_transactions_are_no_gaps_and_are_read_past(settings: KafkaSettings):
    full = Names(settings.topic_prefix).of(Topic.DOCUMENTS)
    writer = Producer({"bootstrap.servers": settings.address(), "transactional.id": full})
    writer.init_transactions(DEADLINE_S)
    for number in range(6):
        writer.begin_transaction()
        writer.produce(full, Codec().encode(document(number)), key=b"k", partition=0)
        writer.flush(DEADLINE_S)
        writer.abort_transaction(DEADLINE_S) if number % 3 == 2 else writer.commit_transaction(DEADLINE_S)
    wait_for_ends(settings, Topic.DOCUMENTS)
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        found = [located.offset for located in reader.read_to_end()]
        ends = reader.end_offsets()
        # An aborted record uses an offset, and the end marker of each transaction uses another.
        assert found == [0, 2, 6, 8]
        assert reader.next_offsets() == ends == {HERE: 12}
    with LogReader(settings, [Topic.DOCUMENTS], start=ends) as reader:
        assert list(reader.read_to_end()) == []


def test_a_group_continues_from_its_commit_or_gets_an_error_if_it_is_deleted(settings: KafkaSettings):
    write(settings, range(10))
    delete(settings, 2)
    first = GroupConsumer(settings, "readers", [Topic.DOCUMENTS], client_id="test-member")
    assert offsets(first.poll, 8) == list(range(2, 10)), "a group that committed nothing begins at the beginning"
    first.commit({HERE: 4})
    first.close()
    second = GroupConsumer(settings, "readers", [Topic.DOCUMENTS], client_id="test-member")
    assert offsets(second.poll, 6) == list(range(4, 10))
    second.close()
    delete(settings, 8)
    third = GroupConsumer(settings, "readers", [Topic.DOCUMENTS], client_id="test-member")
    told = gap(third.poll)
    assert (told.wanted, told.first) == (4, 8)
    assert offsets(third.poll, 2) == [8, 9]
    third.close()


def test_a_gap_says_how_each_reader_can_continue():
    text = str(RetentionGap("groups", 0, 3, 5))
    assert "groups[0]: the log no longer keeps offset 3, the log begins at 5: up to 2 records" in text
    remedies = ["stream.accept_gaps", "sink.accept_gaps", "a rollout worker", "a trainer, begin another run"]
    assert [remedy for remedy in remedies if remedy not in text] == []
