"""Reading whole topics from chosen offsets. A reader has no group and never moves anybody's committed offsets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.client_settings import (
    METADATA_TIMEOUT_S,
    RETRY_S,
    TRANSIENT,
    consumer_settings,
    raise_lasting,
)
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.located import Located, locate


class LogReader:
    """Reads whole topics from chosen offsets, without a consumer group.

    Args:
        start: "beginning", "end", or next offsets by (topic, partition); partitions not named begin at the beginning.
        share: (n, of): one of `of` readers that share the partitions, the one that reads those of number n modulo `of`.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Iterable[Topic],
        *,
        start: str | Mapping[tuple[Topic, int], int] = "beginning",
        client_id: str = "tidemill-reader",
        codec: Codec | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        settings = consumer_settings(kafka, client_id, f"{client_id}-groupless")
        self._consumer = Consumer({**settings, "partition.assignment.strategy": "range"})
        self._assignment = [
            TopicPartition(self._names.of(topic), partition, _start_offset(start, topic, partition))
            for topic in topics
            for partition in self.partitions(topic)
            if partition % share[1] == share[0]
        ]
        self._resolve_ends()
        self._consumer.assign(self._assignment)
        self._next = {(tp.topic, tp.partition): tp.offset for tp in self._assignment}

    def partitions(self, topic: Topic) -> list[int]:
        """Partition numbers of a topic. Raises LookupError when the topic does not exist."""
        full = self._names.of(topic)
        metadata = self._consumer.list_topics(full, timeout=METADATA_TIMEOUT_S).topics[full]
        if metadata.error is not None or not metadata.partitions:
            raise LookupError(f"topic {full} does not exist: create the topics with `tidemill topics --create`")
        return sorted(metadata.partitions)

    def _resolve_ends(self) -> None:
        for tp in self._assignment:
            low, high = self._watermarks(tp)
            if tp.offset == OFFSET_END:
                tp.offset = high
            elif tp.offset == OFFSET_BEGINNING:
                tp.offset = low
            elif tp.offset < low:
                raise LookupError(
                    f"{tp.topic}[{tp.partition}]: offset {tp.offset} is no longer kept, the log begins at {low}"
                )

    def _watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        # A partition that was created a moment ago, or whose leader moves, answers with a retriable error first.
        deadline = time.monotonic() + METADATA_TIMEOUT_S
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(tp, timeout=METADATA_TIMEOUT_S)
                return low, high
            except KafkaException as error:
                if error.args[0].code() not in TRANSIENT or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def poll(self, timeout_s: float = 0.1, max_records: int = 500) -> list[Located]:
        """The next records, in offset order within each partition; empty when none came in `timeout_s`."""
        found = []
        for message in self._consumer.consume(max_records, timeout_s):
            error = message.error()
            if error is not None:
                raise_lasting(error)
                continue
            self._next[(message.topic() or "", message.partition() or 0)] = (message.offset() or 0) + 1
            found.append(locate(message, self._names, self._codec))
        return found

    def end_offsets(self) -> dict[tuple[Topic, int], int]:
        """End of the log now, by (topic, partition): the offset that the next record will have."""
        return {(self._names.parse(tp.topic), tp.partition): self._watermarks(tp)[1] for tp in self._assignment}

    def next_offsets(self) -> dict[tuple[Topic, int], int]:
        """The next offset to be read, by (topic, partition)."""
        return {(self._names.parse(topic), partition): offset for (topic, partition), offset in self._next.items()}

    def read_to_end(self, deadline_s: float = 60.0) -> Iterator[Located]:
        """Every record up to the end of the log as it is now. Raises TimeoutError past the deadline."""
        ends = self.end_offsets()
        deadline = time.monotonic() + deadline_s
        while any(offset < ends[place] for place, offset in self._positions().items()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the end of {sorted({t.value for t, _ in ends})} was not reached in {deadline_s:g} s"
                )
            yield from self.poll(0.1)

    def _positions(self) -> dict[tuple[Topic, int], int]:
        # The consumer's own position moves past transaction markers and compacted records, which carry no message.
        seen = self.next_offsets()
        for tp in self._consumer.position(self._assignment):
            place = (self._names.parse(tp.topic), tp.partition)
            seen[place] = max(seen[place], tp.offset)
        return seen

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Go to an offset of an assigned partition."""
        full = self._names.of(topic)
        self._consumer.seek(TopicPartition(full, partition, offset))
        self._next[(full, partition)] = offset

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_offset(start: str | Mapping[tuple[Topic, int], int], topic: Topic, partition: int) -> int:
    if isinstance(start, str):
        return {"beginning": OFFSET_BEGINNING, "end": OFFSET_END}[start]
    return start.get((topic, partition), OFFSET_BEGINNING)
