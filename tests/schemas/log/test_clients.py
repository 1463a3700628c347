"""Producers, readers and group members against a real broker."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

from tests.documents import dead_letters, document, write
from tests.waiting import until
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client, check_topics, create_missing, create_topics, wait_for_broker
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES, groupless_settings, producer_settings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.producer import (
    HEADER_OFFSET,
    HEADER_REASON,
    HEADER_TIMESTAMP,
    DeliveryError,
    RecordProducer,
    dead_letter_of,
    send_dead_letter,
)
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Tick

DEADLINE_S = 180.0
LONG_AGO_MS = int(time.time() - 3_600) * 1_000


@pytest.fixture
def settings(kafka) -> KafkaSettings:
    return kafka.fresh(4, [Topic.DOCUMENTS])


@pytest.fixture(scope="module")
def every_topic(kafka) -> KafkaSettings:
    return kafka.fresh(4)


def read(reader: LogReader) -> list[ConsumedRecord]:
    return list(reader.read_to_end(DEADLINE_S))


def test_topics_are_as_declared_and_creating_them_again_changes_nothing(every_topic: KafkaSettings):
    assert wait_for_broker(every_topic) >= 1
    assert create_topics(every_topic) == []
    states = check_topics(every_topic)
    assert len(states) == 2 * len(CATALOGUE)
    assert [state.drift for state in states] == [[]] * len(states)


def test_drift_is_reported_and_missing_topics_too(every_topic: KafkaSettings):
    other = every_topic.model_copy(update={"partitions": 3})
    drifted = {state.name for state in check_topics(other) if state.drift}
    assert Names(every_topic.topic_prefix).of(Topic.ROLLOUTS) in drifted
    thrice = every_topic.model_copy(update={"replication_factor": 3})
    assert all(state.drift == ["replication factor 1, declared 3"] for state in check_topics(thrice))
    absent = every_topic.model_copy(update={"topic_prefix": "absent."})
    assert all(state.drift == ["missing"] for state in check_topics(absent))


def test_a_topic_whose_broker_replaces_the_times_of_the_records_is_drift(kafka):
    at_append = kafka.fresh(2, [Topic.DOCUMENTS])
    rollouts = Names(at_append.topic_prefix).of(Topic.ROLLOUTS)
    made = NewTopic(rollouts, 2, config={**CATALOGUE[Topic.ROLLOUTS].config, "message.timestamp.type": "LogAppendTime"})
    create_missing(admin_client(at_append), [made])
    drift = {state.name: state.drift for state in check_topics(at_append)}
    assert "message.timestamp.type LogAppendTime, declared CreateTime" in drift[rollouts]


def test_a_topic_that_the_brokers_refuse_is_named_with_their_reason(every_topic: KafkaSettings):
    alone = every_topic.model_copy(update={"topic_prefix": "copied.", "replication_factor": 3})
    with pytest.raises(RuntimeError, match=r"topic copied\.documents cannot be created: .*replication factor of 3"):
        create_topics(alone)


@pytest.mark.parametrize("topic", [Topic.ROLLOUTS, Topic.INTERACTIONS, Topic.FEEDBACK, Topic.OUTCOMES])
def test_a_clock_that_is_ahead_cannot_advance_event_time(every_topic: KafkaSettings, topic: Topic):
    tick = Tick("tick", 0)
    with RecordProducer(every_topic, "test") as producer:
        producer.send(topic, tick, key="k", timestamp_ms=now_us() // 1_000 + 30_000)
        producer.flush()
        producer.send(topic, tick, key="k", timestamp_ms=now_us() // 1_000 + 120_000)
        with pytest.raises(DeliveryError, match="the clock of this host is more than a minute ahead"):
            producer.flush()


def test_the_size_of_an_answer_is_limited_over_all_its_partitions():
    limits = "fetch.max.bytes", "fetch.message.max.bytes"
    kafka = KafkaSettings(bootstrap="here:1")
    assert not groupless_settings(kafka, "c").keys() & set(limits)
    given = groupless_settings(kafka, "c", 4 << 20)
    assert [given[name] for name in limits] == [4 << 20, 4 << 20]
    told = kafka.model_copy(update={"client_options": {limits[0]: "2000000"}})
    assert groupless_settings(told, "c", 4 << 20)[limits[0]] == "2000000"


def test_everything_written_is_read_once_in_order_of_each_partition(settings: KafkaSettings):
    write(settings, range(500))
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        found = read(reader)
        again = read(reader)
    assert Counter(r.record.document_id for r in found) == Counter(f"d{n}" for n in range(500))
    assert again == []
    for partition in range(CATALOGUE[Topic.DOCUMENTS].partitions):
        offsets = [r.offset for r in found if r.partition == partition]
        assert offsets == sorted(offsets)


def test_a_reader_starts_where_it_is_told(settings: KafkaSettings):
    write(settings, range(40))
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        first = read(reader)
        places = reader.next_offsets()
    write(settings, range(40, 50))
    with LogReader(settings, [Topic.DOCUMENTS], start=places) as reader:
        assert {r.record.document_id for r in read(reader)} == {f"d{n}" for n in range(40, 50)}
    with LogReader(settings, [Topic.DOCUMENTS], start="end") as reader:
        assert read(reader) == []
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        list(reader.read_to_end())
        one = first[0]
        reader.seek(one.topic, one.partition, one.offset)
        assert one in read(reader)


def test_poison_is_located_with_its_reason_and_the_stream_continues(settings: KafkaSettings):
    names = Names(settings.topic_prefix)
    with RecordProducer(settings, "test-writer") as producer:
        for value in (b"poison", None, b"\xc3\x01" + bytes(20)):
            producer.send_bytes(names.of(Topic.DOCUMENTS), value, key=b"k", partition=0, timestamp_ms=LONG_AGO_MS)
        producer.send(Topic.DOCUMENTS, document(1), key="k", partition=0)
        with LogReader(settings, [Topic.DOCUMENTS]) as reader:
            producer.flush()
            found = read(reader)
            for located in found[:3]:
                send_dead_letter(producer, names, located, located.error, "test")
    assert [bool(located.error) for located in found] == [True, True, True, False]
    assert found[3].record == document(1)
    assert letters_of(settings) == {"0": b"poison", "1": None, "2": b"\xc3\x01" + bytes(20)}


def test_a_reason_of_any_length_fits_into_a_dead_letter():
    located = ConsumedRecord(Topic.DOCUMENTS, 0, 1, 2, bytes(300_000), b"x", None)
    _, _, headers = dead_letter_of(Names(""), located, f"the key {located.key!r} is not the id", "test")
    assert headers[HEADER_REASON].startswith(b"the key ") and sum(map(len, headers.values())) < 10_000


def test_a_dead_letter_about_a_record_of_any_size_fits_into_its_topic(settings: KafkaSettings):
    """Of a value as large as its topic allows, every byte is kept; of one that was larger before its compression, the
    beginning."""
    names, large, larger = Names(settings.topic_prefix), os.urandom(1_048_300), bytes(5 << 20)
    source = names.of(Topic.DOCUMENTS)
    foreign = Producer({**producer_settings(settings, "foreign"), "message.max.bytes": 10 << 20})
    for key, value in ((b"k", large), (b"k", larger), (bytes(2 << 20), None)):
        foreign.produce(source, value, key, partition=0, timestamp=LONG_AGO_MS)
    assert foreign.flush(DEADLINE_S) == 0
    with RecordProducer(settings, "test-writer") as producer, LogReader(settings, [Topic.DOCUMENTS]) as reader:
        producer.send(Topic.DOCUMENTS, document(1), key="k", partition=0)
        producer.flush()
        found = read(reader)
        for located in found[:-1]:
            send_dead_letter(producer, names, located, "\N{EURO SIGN}" * 3_000, "test")
    assert [len(located.value or b"") for located in found[:-1]] == [len(large), len(larger), 0]
    assert found[-1].record == document(1)
    assert letters_of(settings) == {"0": large, "1": larger[: MAX_RECORD_BYTES - 1], "2": None}
    _, _, headers = dead_letter_of(names, found[1], "it is no record", "test")
    assert headers[HEADER_REASON].decode() == (
        f"only the first {MAX_RECORD_BYTES} of its {len(larger) + 1} bytes are kept here: it is no record"
    )


def letters_of(settings: KafkaSettings) -> dict[str, bytes | None]:
    """Return the values of three dead letters by the offsets of their records, after a check of their headers."""
    found = {}
    for letter in dead_letters(settings, Topic.DOCUMENTS, 3):
        headers = dict(letter.headers())
        assert headers[HEADER_REASON] and headers[HEADER_TIMESTAMP] == str(LONG_AGO_MS).encode()
        assert letter.timestamp()[1] > LONG_AGO_MS + 60_000, "the log drops what is old"
        found[headers[HEADER_OFFSET].decode()] = letter.value()
    return found


def test_a_group_member_continues_from_the_committed_offset(settings: KafkaSettings):
    write(settings, range(30))
    first = consume(settings, 30, commit=True)
    write(settings, range(30, 40))
    second = consume(settings, 10, commit=False)
    third = consume(settings, 10, commit=False)
    assert first == {f"d{n}" for n in range(30)}
    assert second == third == {f"d{n}" for n in range(30, 40)}


def consume(settings: KafkaSettings, count: int, *, commit: bool) -> set[str]:
    member = GroupConsumer(settings, "readers", [Topic.DOCUMENTS], client_id="test-member")
    found: list[ConsumedRecord] = []
    # A member that got no CPU for long loses its partitions, and reads records again.
    until(lambda: found.extend(member.poll(0.2)) or len({one.position for one in found}) >= count, "records")
    if commit:
        next_offsets: dict[tuple[Topic, int], int] = {}
        for located in found:
            place = (located.topic, located.partition)
            next_offsets[place] = max(next_offsets.get(place, 0), located.offset + 1)
        member.commit(next_offsets)
    member.close()
    return {located.record.document_id for located in found}


def test_a_record_that_the_log_refuses_is_an_error(every_topic: KafkaSettings):
    impatient = {"topic.metadata.propagation.max.ms": "500"}
    absent = every_topic.model_copy(update={"topic_prefix": "absent.", "client_options": impatient})
    producer = RecordProducer(absent, "test-writer")
    with pytest.raises(DeliveryError, match=r"for absent\.documents: .*: create the topics with `tidemill topics"):
        producer.send_acked(Topic.DOCUMENTS, [("d", document(1))])


def test_a_record_that_is_too_large_is_an_error_that_names_its_topic_and_size():
    producer = RecordProducer(KafkaSettings(bootstrap="127.0.0.1:9"), "test-writer")
    large = replace(document(1), text="x" * (2 << 20))
    with pytest.raises(ValueError, match=r"a record of 2,097,\d{3} bytes for tidemill\.documents is too large"):
        producer.send(Topic.DOCUMENTS, large, key="k")


def test_a_topic_that_does_not_exist_says_how_to_create_it(every_topic: KafkaSettings):
    with pytest.raises(LookupError, match="tidemill topics --create"):
        LogReader(every_topic.model_copy(update={"topic_prefix": "absent."}), [Topic.DOCUMENTS])


def test_an_absent_broker_is_reported_as_absent():
    with pytest.raises(ConnectionError, match="tidemill stack up"):
        wait_for_broker(KafkaSettings(bootstrap="127.0.0.1:9"), deadline_s=0.5)
