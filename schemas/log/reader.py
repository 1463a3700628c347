"""Reading whole topics from chosen offsets. A reader has no group and never moves anybody's committed offsets.

What holds: between two records of a partition that a reader gives out lies nothing that the log has deleted, or the
reader said so (`RetentionGap`); what it holds ahead of its use stays below `kafka.read_ahead_bytes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, Message, TopicPartition

from tidemill.schemas.catalogue import Names, Topic, is_compacted
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.client_settings import groupless_settings
from tidemill.schemas.log.consumed import ConsumedRecord, locate
from tidemill.schemas.log.guard import ReadingGuard
from tidemill.schemas.log.partitions import partitions_of, watermarks
from tidemill.schemas.log.retention import RetentionGap
from tidemill.schemas.log.stall import Place

READ_WAIT_S = 0.1
AT_ONCE = 50
"""Messages taken from the client in one call."""


class LogReader:
    """Reads whole topics from chosen offsets, without a consumer group.

    Args:
        start: "beginning", "end", or next offsets by (topic, partition); partitions not named begin at the beginning.
        share: (n, of): one of `of` readers that share the partitions, the one that reads those of number n modulo `of`.
        fetch_bytes: the most that one answer of the log carries, all partitions together; by default 1 MiB a partition.

    Raises LookupError when a topic does not exist, RetentionGap when the log no longer keeps a start offset,
    AccessRefused when the brokers let nobody in with these settings.
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
        fetch_bytes: int | None = None,
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        # An offset that is out of range must not be replaced in silence by one that is not.
        self._consumer = Consumer(groupless_settings(kafka, client_id, fetch_bytes) | {"auto.offset.reset": "error"})
        self._guard = ReadingGuard(self._consumer, client_id, kafka)
        self._limit_bytes = kafka.read_ahead_bytes
        topics = list(topics)
        self._may_have_holes = {self._names.of(topic) for topic in topics if is_compacted(topic)}
        try:
            self._assignment = [
                TopicPartition(self._names.of(topic), partition, _start_offset(start, topic, partition))
                for topic in topics
                for partition in self.partitions(topic)
                if partition % share[1] == share[0]
            ]
        except KafkaException:
            # A client that is refused says only that no answer came.
            check_access(kafka)
            raise
        self._anywhere = self._resolve_ends()
        self._consumer.assign(self._assignment)
        self._next: dict[Place, int] = {(tp.topic, tp.partition): tp.offset for tp in self._assignment}

    def partitions(self, topic: Topic) -> list[int]:
        """Partition numbers of a topic. Raises LookupError when the topic does not exist."""
        return partitions_of(self._consumer, self._names.of(topic))

    def _resolve_ends(self) -> set[Place]:
        """Make the start offsets numbers; returns the places that begin at whatever the log has first."""
        anywhere = set()
        for tp in self._assignment:
            place = (tp.topic, tp.partition)
            low, high = watermarks(self._consumer, place)
            if tp.offset == OFFSET_END:
                tp.offset = high
            elif tp.offset == OFFSET_BEGINNING:
                tp.offset = low
                anywhere.add(place)
            elif tp.offset < low:
                raise RetentionGap(*place, tp.offset, low)
        return anywhere

    def poll(self, timeout_s: float = 0.1, max_records: int = 500) -> list[ConsumedRecord]:
        """The next records, in offset order within each partition; empty when none came in `timeout_s`.

        Raises:
            RetentionGap: the log deleted the next record of a partition before it was read. The reader stands at the
                first one that is kept: whoever can do without goes on polling.
            TopicMadeAnew: a partition ends before its next record.
            ReadingStalled: records wait and the client delivers none of them for `kafka.stall_timeout_s`.
        """
        self._guard.check()
        found = self._collect(timeout_s, max_records)
        if not found:
            self._guard.check()
            self._pass_markers()
        self._guard.look(self._next, self._may_have_holes)
        return found

    def _collect(self, timeout_s: float, max_records: int) -> list[ConsumedRecord]:
        found: list[ConsumedRecord] = []
        n_bytes, deadline = 0, time.monotonic() + timeout_s
        while len(found) < max_records and n_bytes < self._limit_bytes:
            left_s = max(0.0, deadline - time.monotonic())
            messages = self._consumer.consume(min(AT_ONCE, max_records - len(found)), left_s)
            for message in messages:
                located = self._locate(message)
                if located is not None:
                    found.append(located)
                    n_bytes += len(located.value or b"")
            if len(messages) < AT_ONCE:
                break
        return found

    def _locate(self, message: Message) -> ConsumedRecord | None:
        place = (message.topic() or "", message.partition() or 0)
        error = message.error()
        if error is None:
            self._next[place] = (message.offset() or 0) + 1
            self._anywhere.discard(place)
            return locate(message, self._names, self._codec)
        wanted = None if place in self._anywhere else self._next.get(place)
        onward = self._guard.take(error, place, wanted)
        if onward is not None:
            self._next[place] = onward
        return None

    def _pass_markers(self) -> None:
        # The consumer's own position moves past transaction markers and compacted records, which carry no message.
        for tp in self._consumer.position(self._assignment):
            place = (tp.topic, tp.partition)
            self._next[place] = max(self._next[place], tp.offset)

    def end_offsets(self) -> dict[tuple[Topic, int], int]:
        """End of the log now, by (topic, partition): the offset that the next record will have."""
        return {
            (self._names.parse(topic), partition): watermarks(self._consumer, (topic, partition))[1]
            for topic, partition in self._next
        }

    def next_offsets(self) -> dict[tuple[Topic, int], int]:
        """The next offset to be read, by (topic, partition)."""
        return {(self._names.parse(topic), partition): offset for (topic, partition), offset in self._next.items()}

    def read_to_end(self, deadline_s: float = 60.0) -> Iterator[ConsumedRecord]:
        """Every record up to the end of the log as it is now. Raises TimeoutError past the deadline."""
        ends = self.end_offsets()
        deadline = time.monotonic() + deadline_s
        while any(offset < ends[place] for place, offset in self.next_offsets().items()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the end of {sorted({t.value for t, _ in ends})} was not reached in {deadline_s:g} s"
                )
            yield from self.poll(READ_WAIT_S)
            self._pass_markers()

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Go to an offset of an assigned partition; where that is no longer kept, to the first one that is.

        That is no gap: whoever wants one record sees from its offset whether it came.
        """
        full = self._names.of(topic)
        self._consumer.seek(TopicPartition(full, partition, offset))
        self._next[(full, partition)] = offset
        self._anywhere.add((full, partition))

    def close(self) -> None:
        """Give the connections back."""
        self._guard.close()
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
