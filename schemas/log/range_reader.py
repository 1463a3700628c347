"""Reading single partitions back from a time, again and again over one connection. Nobody's committed offsets move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, TopicPartition

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import groupless_settings, raise_lasting
from tidemill.schemas.log.consumed import ConsumedRecord, locate
from tidemill.schemas.log.partitions import offset_since, partitions_of, watermarks

POLL_S = 0.1
BATCH = 500


class Lookback:
    """Reads partitions from a time up to their end as it is then. Not for two threads at once."""

    def __init__(self, kafka: KafkaSettings, *, client_id: str, codec: Codec | None = None) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        self._consumer = Consumer(groupless_settings(kafka, client_id))
        self._partitions: dict[Topic, int] = {}

    def partitions(self, topic: Topic) -> int:
        """How many partitions a topic has. Raises LookupError when it does not exist."""
        if topic not in self._partitions:
            self._partitions[topic] = len(partitions_of(self._consumer, self._names.of(topic)))
        return self._partitions[topic]

    def read(self, topic: Topic, partition: int, since_ms: int, deadline_s: float = 60.0) -> Iterator[ConsumedRecord]:
        """The records from the first one whose timestamp is `since_ms` (since the Unix epoch) or later.

        Raises TimeoutError when the end is not reached within `deadline_s`, KafkaException when the log refuses.
        """
        deadline = time.monotonic() + deadline_s
        full = self._names.of(topic)
        offset = offset_since(self._consumer, (full, partition), max(since_ms, 0))
        if offset is None:
            return
        first = TopicPartition(full, partition, offset)
        end = watermarks(self._consumer, (full, partition))[1]
        self._consumer.assign([first])
        try:
            yield from self._up_to(first, end, deadline)
        finally:
            self._consumer.unassign()

    def _up_to(self, first: TopicPartition, end: int, deadline: float) -> Iterator[ConsumedRecord]:
        seen = first.offset
        while seen < end:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{first.topic}[{first.partition}]: offset {end} was not reached, only {seen}")
            for message in self._consumer.consume(BATCH, POLL_S):
                error = message.error()
                if error is not None:
                    raise_lasting(error)
                elif (message.offset() or 0) < end:
                    yield locate(message, self._names, self._codec)
            # The consumer's own position moves past transaction markers, which carry no message.
            seen = max(seen, self._consumer.position([first])[0].offset)

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
