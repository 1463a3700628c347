"""Numbered documents in the log, for tests of its readers: a test chooses which are written and deleted."""

from __future__ import annotations

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
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
