"""Partitions of topics and their offsets: where each begins and ends, where in it a time lies.

A partition that was created a moment ago, or whose leader moves, answers with a passing error first: it is asked again
until it answers, for as long as one answer may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import (
    METADATA_TIMEOUT_S,
    RETRY_S,
    TRANSIENT,
    Partition,
    groupless_settings,
)

Asked = TypeVar("Asked")

NOT_YET_THERE = TRANSIENT | {KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}


def partitions_of(consumer: Consumer, topic: str) -> list[int]:
    """Partition numbers of a topic, by its full name. Raises LookupError when the topic does not exist."""
    metadata = consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
    if metadata.error is not None or not metadata.partitions:
        raise LookupError(f"topic {topic} does not exist: create the topics with `tidemill topics --create`")
    return sorted(metadata.partitions)


def watermarks(consumer: Consumer, partition: Partition, timeout_s: float = METADATA_TIMEOUT_S) -> tuple[int, int]:
    """First offset that a partition keeps, and its end. Raises KafkaException when the log does not answer in time."""

    def ask() -> tuple[int, int]:
        low, high = consumer.get_watermark_offsets(TopicPartition(*partition), timeout=timeout_s)
        return low, high

    return _answer(ask, timeout_s)


def offset_since(consumer: Consumer, partition: Partition, timestamp_ms: int) -> int | None:
    """The first offset of a partition whose record is not older than a time (since the Unix epoch); None when there is
    none. Raises KafkaException when the log does not answer in time."""

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
    """Asks for the ends of partitions over a connection of its own, which it opens at the first question.

    A broker answers the requests of one connection in their order. Behind a fetch the answer would come after all that
    the fetch brings, over a slow link many seconds later; and a request that is not answered in time costs librdkafka
    the whole connection, with what had come of the fetch.

    Args:
        client_id: under which it connects.
    """

    def __init__(self, kafka: KafkaSettings, client_id: str) -> None:
        self._kafka, self._client_id = kafka, client_id
        self._client: Consumer | None = None

    def ends(self, partitions: Iterable[Partition], timeout_s: float) -> dict[Partition, int]:
        """The end of each partition for readers of what is committed; 0 where retention took everything, so that
        nothing waits there, wherever a reader is.

        Args:
            timeout_s: how long the answer for one partition may take.

        Raises KafkaException when the log does not answer for all of them in time.
        """
        if self._client is None:
            # The admin client's own request is not used: after a time-out it gives offsets that mean nothing, and after
            # a new election of the leader it asks with the old epoch for ever (librdkafka 2.16).
            self._client = Consumer(groupless_settings(self._kafka, self._client_id))
        bounds = {partition: watermarks(self._client, partition, timeout_s) for partition in partitions}
        return {partition: high if high > low else 0 for partition, (low, high) in bounds.items()}

    def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            self._client.close()
            self._client = None
