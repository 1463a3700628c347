"""What the log says of its partitions: which a topic has, where each begins and ends, where in it a time lies.

A partition that was created a moment ago, or whose leader moves, answers with a passing error first: it is asked again
until it answers, for as long as one answer may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, RETRY_S, TRANSIENT
from tidemill.schemas.log.stall import Place

Answer = TypeVar("Answer")

NOT_YET_THERE = TRANSIENT | {KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}


def partitions_of(consumer: Consumer, topic: str) -> list[int]:
    """Partition numbers of a topic, by its full name. Raises LookupError when the topic does not exist."""
    metadata = consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
    if metadata.error is not None or not metadata.partitions:
        raise LookupError(f"topic {topic} does not exist: create the topics with `tidemill topics --create`")
    return sorted(metadata.partitions)


def watermarks(consumer: Consumer, place: Place, timeout_s: float = METADATA_TIMEOUT_S) -> tuple[int, int]:
    """First offset that a partition keeps, and its end. Raises KafkaException when the log does not answer in time."""

    def ask() -> tuple[int, int]:
        low, high = consumer.get_watermark_offsets(TopicPartition(*place), timeout=timeout_s)
        return low, high

    return _answer(ask, timeout_s)


def offset_since(consumer: Consumer, place: Place, timestamp_ms: int) -> int | None:
    """The first offset of a partition whose record is not older than a time (since the Unix epoch); None when there is
    none. Raises KafkaException when the log does not answer in time."""

    def ask() -> int:
        (found,) = consumer.offsets_for_times([TopicPartition(*place, timestamp_ms)], timeout=METADATA_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return int(found.offset)

    offset = _answer(ask, METADATA_TIMEOUT_S)
    return offset if offset >= 0 else None


def _answer(ask: Callable[[], Answer], timeout_s: float) -> Answer:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in NOT_YET_THERE or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
