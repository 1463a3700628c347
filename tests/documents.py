"""Numbered documents in the log, for tests of its readers: a test chooses which are written and deleted.

Also the end of transactions, and dead letters.
"""

from __future__ import annotations

from confluent_kafka import Consumer, IsolationLevel, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.client_settings import consumer_settings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Document


def document(number: int) -> Document:
    """Return the document with a number."""
    return Document(f"d{number}", "test", f"text {number}")


def write(log: KafkaSettings, numbers: range, partition: int | None = None, at_ms: int | None = None) -> None:
    """Write documents to a partition, or each to the partition of its key. Number n gets the time `at_ms` + n."""
    with RecordProducer(log, "test-writer") as producer:
        for number in numbers:
            time_ms = None if at_ms is None else at_ms + number
            producer.send(
                Topic.DOCUMENTS, document(number), key=f"d{number}", partition=partition, timestamp_ms=time_ms
            )


def delete(log: KafkaSettings, before: int, partition: int = 0, topic: Topic = Topic.DOCUMENTS) -> None:
    """Delete the records of a partition before an offset."""
    place = TopicPartition(Names(log.topic_prefix).of(topic), partition, before)
    admin = AdminClient({"bootstrap.servers": log.address()})
    (done,) = admin.delete_records([place]).values()
    done.result()


def wait_for_ends(log: KafkaSettings, topic: Topic) -> None:
    """Wait until no transaction of a topic is open: the log writes the end marker after it has answered the commit."""
    full, admin = Names(log.topic_prefix).of(topic), admin_client(log)
    partitions = admin.list_topics(full, timeout=60).topics[full].partitions

    def ends(level: IsolationLevel) -> list[int]:
        latest = {TopicPartition(full, partition): OffsetSpec.latest() for partition in partitions}
        return [found.result(60).offset for found in admin.list_offsets(latest, isolation_level=level).values()]

    until(
        lambda: ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED), "the end of transactions"
    )


def dead_letters(log: KafkaSettings, topic: Topic, count: int = 1) -> list[Message]:
    """Return the dead letters of a topic, when there are as many as `count`."""
    full = Names(log.topic_prefix).dead_letter(topic)
    consumer = Consumer(consumer_settings(log, "test", "test-dead-letters"))
    partitions = consumer.list_topics(full, timeout=60).topics[full].partitions
    consumer.assign([TopicPartition(full, partition, 0) for partition in partitions])
    found: list[Message] = []

    def enough() -> bool:
        found.extend(message for message in consumer.consume(100, 0.2) if message.error() is None)
        return len(found) >= count

    until(enough, f"{count} dead letters")
    consumer.close()
    return found
