"""Partitions of topics and their offsets: first offset, end, and the first offset at or after a time.

A partition that was just created, or whose leader changes, first answers with a transient error: the request is then
repeated until it succeeds or its timeout has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import (
    CREATE_TOPICS,
    METADATA_TIMEOUT_S,
    RETRY_S,
    TRANSIENT,
    Partition,
    groupless_settings,
)

Asked = TypeVar("Asked")

NOT_YET_THERE = TRANSIENT | {
    KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_LEADER_EPOCH,
}  # fmt: skip


def partitions_of(consumer: Consumer, topic: str) -> list[int]:
    """Return the partition numbers of a topic, by its full name. Raises LookupError if the topic does not exist."""
    metadata = consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
    if metadata.error is not None or not metadata.partitions:
        raise LookupError(f"topic {topic} does not exist: {CREATE_TOPICS}")
    return sorted(metadata.partitions)


def watermarks(consumer: Consumer, partition: Partition, timeout_s: float = METADATA_TIMEOUT_S) -> tuple[int, int]:
    """Return a partition's first kept offset and its end. Raises KafkaException if the log does not answer in time."""

    def ask() -> tuple[int, int]:
        # A request for several partitions (`offsets_for_times`) fails while a broker does not know the leader's epoch.
        low, high = consumer.get_watermark_offsets(TopicPartition(*partition), timeout=timeout_s)
        return low, high

    return _answer(ask, timeout_s)


def offset_since(consumer: Consumer, partition: Partition, timestamp_ms: int) -> int | None:
    """Return the first offset of a partition whose record is not older than a time (since the Unix epoch); None if
    there is none. Raises KafkaException if the log does not answer in time."""

    def ask() -> int:
        (found,) = consumer.offsets_for_times([TopicPartition(*partition, timestamp_ms)], timeout=METADATA_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return int(found.offset)

    offset = _answer(ask, METADATA_TIMEOUT_S)
    return offset if offset >= 0 else None


def _answer(ask: Callable[[], Asked], timeout_s: float) -> Asked:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in NOT_YET_THERE or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class EndsClient:
    """A client that requests the ends of partitions over a separate connection, opened at the first request.

    A broker answers the requests of one connection in order. After a fetch request, the answer would come after all the
    fetched data, many seconds later over a slow link. And if a request times out, librdkafka closes the whole
    connection and loses the data of the fetch that had arrived.

    Args:
        client_id: client id of the connection.
        isolation: the isolation level of the readers whose ends are requested.
    """

    def __init__(self, kafka: KafkaSettings, client_id: str, isolation: str = "read_committed") -> None:
        self._kafka, self._client_id, self._isolation = kafka, client_id, isolation
        self._client: Consumer | None = None

    def ends(self, partitions: Iterable[Partition], timeout_s: float) -> dict[Partition, int]:
        """Return the end of each partition; 0 if retention deleted all records, so that no reader has records to read,
        at any offset. Arguments and errors are those of `bounds`.
        """
        bounds = self.bounds(partitions, timeout_s)
        return {partition: high if high > low else 0 for partition, (low, high) in bounds.items()}

    def bounds(
        self, partitions: Iterable[Partition], timeout_s: float = METADATA_TIMEOUT_S
    ) -> dict[Partition, tuple[int, int]]:
        """Return the first kept offset and the end of each partition.

        Args:
            timeout_s: timeout of the request for one partition.

        Raises KafkaException if the log does not answer for all partitions in time.
        """
        if self._client is None:
            # The admin client's request for offsets is not used: after a timeout it returns meaningless offsets, and
            # after a new leader election it always repeats the request with the old epoch (librdkafka 2.16).
            settings = groupless_settings(self._kafka, self._client_id)
            self._client = Consumer(settings | {"isolation.level": self._isolation})
        return {partition: watermarks(self._client, partition, timeout_s) for partition in partitions}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
