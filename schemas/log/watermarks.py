"""Partitions of topics and their offsets: first offset, end, and the first offset at or after a time.

A partition that was just created, or whose leader changes, first answers with a transient error: the request is then
repeated until it succeeds or its timeout has passed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, RETRY_S, TRANSIENT, Partition, groupless_settings

NOT_YET_THERE = TRANSIENT | {KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}


def partitions_of(consumer: Consumer, topic: str) -> list[int]:
    """Return the partition numbers of a topic, by its full name. Raises LookupError if the topic does not exist."""
    metadata = consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
    if metadata.error is not None or not metadata.partitions:
        raise LookupError(f"topic {topic} does not exist: create the topics with `tidemill topics --create`")
    return sorted(metadata.partitions)


def watermarks(
    consumer: Consumer, partitions: Collection[Partition], timeout_s: float = METADATA_TIMEOUT_S
) -> dict[Partition, tuple[int, int]]:
    """Return the first kept offset and the end of each partition: two requests for all partitions of a broker, since
    each waits for a fetch that runs over the same connection.

    Raises KafkaException if the log does not answer in time.
    """
    low, high = (_offsets(consumer, dict.fromkeys(partitions, at), timeout_s) for at in (OFFSET_BEGINNING, OFFSET_END))
    return {partition: (low[partition], high[partition]) for partition in partitions}


def offset_since(consumer: Consumer, partition: Partition, timestamp_ms: int) -> int | None:
    """Return the first offset of a partition whose record is not older than a time (since the Unix epoch); None if
    there is none. Raises KafkaException if the log does not answer in time."""

    offset = _offsets(consumer, {partition: timestamp_ms}, METADATA_TIMEOUT_S)[partition]
    return offset if offset >= 0 else None


def _offsets(consumer: Consumer, times: Mapping[Partition, int], timeout_s: float) -> dict[Partition, int]:
    """Return the offset of each partition at a time: milliseconds, OFFSET_BEGINNING or OFFSET_END."""
    asked = [TopicPartition(*partition, at) for partition, at in times.items()]
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = consumer.offsets_for_times(asked, timeout=timeout_s) if asked else []
            if failed := next((one for one in found if one.error is not None), None):
                raise KafkaException(failed.error)
        except KafkaException as error:
            if error.args[0].code() not in NOT_YET_THERE or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return {(one.topic, one.partition): int(one.offset) for one in found}


class EndsClient:
    """A client that requests the ends of partitions over a separate connection, opened at the first request.

    A broker answers the requests of one connection in order. After a fetch request, the answer would come after all the
    fetched data, many seconds later over a slow link. And if a request times out, librdkafka closes the whole
    connection and loses the data of the fetch that had arrived.

    Args:
        client_id: client id of the connection.
    """

    def __init__(self, kafka: KafkaSettings, client_id: str) -> None:
        self._kafka, self._client_id = kafka, client_id
        self._client: Consumer | None = None

    def ends(self, partitions: Collection[Partition], timeout_s: float) -> dict[Partition, int]:
        """Return the end of each partition for readers of committed records; 0 if retention deleted all records, so
        that no reader has records to read, at any offset.

        Args:
            timeout_s: timeout of a request.

        Raises KafkaException if the log does not answer for all partitions in time.
        """
        if self._client is None:
            # The admin client's request for offsets is not used: after a timeout it returns meaningless offsets, and
            # after a new leader election it always repeats the request with the old epoch (librdkafka 2.16).
            self._client = Consumer(groupless_settings(self._kafka, self._client_id))
        bounds = watermarks(self._client, partitions, timeout_s)
        return {partition: high if high > low else 0 for partition, (low, high) in bounds.items()}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
