"""Readers of the log from chosen offsets. A reader has no consumer group and never changes committed offsets.

Invariants:

- if the log deleted a record between two records of a partition that a reader returns, the reader raises
  `RetentionGap`;
- transaction markers and records removed by compaction are skipped, also at the end of a partition;
- reading up to a known end has no total time limit, and fails if the log delivers nothing for `SILENCE_S`;
- a reader buffers less than `kafka.read_ahead_bytes` ahead of use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidemill.schemas.catalogue import Names, Topic, is_compacted
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.client_settings import Partition, groupless_settings
from tidemill.schemas.log.consumed import ConsumedRecord, Position, consumed_record
from tidemill.schemas.log.guard import ReadingGuard
from tidemill.schemas.log.watermarks import offset_since, partitions_of, watermarks

READ_WAIT_S = 0.02
"""Maximum time for which `read_until` waits for more messages before it compares the offsets."""
SILENCE_S = 60.0
"""Maximum time to wait for the log to deliver any of the existing records."""
AT_ONCE = 50
"""Maximum number of messages that one call requests from the client."""


class MissingRecordError(LookupError):
    """The log contains no record at a position."""


class PartitionReader:
    """A reader of Kafka messages, by full topic name and partition.

    Args:
        may_have_holes: topics whose partitions may end with a hole left by compaction: waiting there is never a stall.
        fetch_bytes: maximum size of one fetch response, over all partitions; by default 1 MiB per partition.
        isolation: "read_committed", or "read_uncommitted" for the records of open and aborted transactions too.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        client_id: str,
        *,
        may_have_holes: Collection[str] = (),
        fetch_bytes: int | None = None,
        isolation: str = "read_committed",
    ) -> None:
        # An offset out of range must not be replaced silently by another one. Events for the end of a partition are
        # needed because the last offsets of a partition may contain no message.
        own = {"auto.offset.reset": "error", "enable.partition.eof": True, "isolation.level": isolation}
        self.client = Consumer(groupless_settings(kafka, client_id, fetch_bytes) | own)
        self._guard = ReadingGuard(self.client, client_id, kafka, isolation)
        self._limit_bytes = kafka.read_ahead_bytes
        self._may_have_holes = frozenset(may_have_holes)
        self._next: dict[Partition, int] = {}
        self._anywhere: set[Partition] = set()
        """Partitions whose next record may have any offset: there, missing records are no gap."""
        self._gaps = False
        self._held_back: frozenset[Partition] = frozenset()

    def assign(self, start: Mapping[Partition, int], *, gaps: bool = False) -> None:
        """Read these partitions from these offsets, and no others. `check` raises an error for deleted records.

        Args:
            start: offsets, OFFSET_BEGINNING or OFFSET_END.
            gaps: skip records that the log no longer keeps, without an error.
        """
        self._gaps, self._held_back = gaps, frozenset()
        self._anywhere = {partition for partition, offset in start.items() if gaps or offset == OFFSET_BEGINNING}
        self._next = {}
        for partition, offset in start.items():
            low, high = watermarks(self.client, partition)
            if offset in (OFFSET_BEGINNING, OFFSET_END):
                self._next[partition] = low if offset == OFFSET_BEGINNING else high
            elif gaps:
                self._next[partition] = max(offset, low)
            else:
                # An offset after the end is reported when it is polled: the log may have reached it by then.
                self._next[partition] = self._guard.within(partition, offset, low, max(high, offset))
        self._guard.rest()
        self.client.assign([TopicPartition(*partition, offset) for partition, offset in self._next.items()])

    def check(self) -> None:
        """Raise LookupError for an offset that was out of range and is not reported yet."""
        self._guard.check()

    def poll(self, timeout_s: float, max_records: int) -> list[Message]:
        """Return the next messages, in offset order within each partition. Raises as `LogReader.poll`."""
        self._guard.check()
        found: list[Message] = []
        n_bytes, deadline = 0, time.monotonic() + timeout_s
        while len(found) < max_records and n_bytes < self._limit_bytes and not self._guard.has_problem:
            left_s = max(0.0, deadline - time.monotonic())
            messages = self.client.consume(min(AT_ONCE, max_records - len(found)), left_s)
            taken = [message for message in messages if self._take(message)]
            found += taken
            n_bytes += sum(len(message.value() or b"") for message in taken)
            if len(messages) < AT_ONCE:
                break
        if not found:
            self._guard.check()
        if self._held_back:
            self._guard.rest()
        else:
            self._guard.look(self._next, self._may_have_holes)
        return found

    def _take(self, message: Message) -> bool:
        """Process a message, and return whether it is a record."""
        partition, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
        error = message.error()
        if error is None:
            self._next[partition] = offset + 1
            if not self._gaps:
                self._anywhere.discard(partition)
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._next[partition] = max(self._next.get(partition, 0), offset)
            return False
        wanted = None if partition in self._anywhere else self._next.get(partition)
        onward = self._guard.take(error, partition, wanted)
        if onward is not None:
            self._next[partition] = onward
        return False

    def next_offsets(self) -> Mapping[Partition, int]:
        return self._next

    def ends(self, partitions: Iterable[Partition] | None = None) -> dict[Partition, int]:
        """Return the end of these or of all partitions: the offset that the next record of each will have."""
        bounds = self._guard.ends_client.bounds(self._next if partitions is None else partitions)
        return {partition: high for partition, (_, high) in bounds.items()}

    def read_until(
        self, ends: Mapping[Partition, int], silence_s: float = SILENCE_S, at_once: int = 500
    ) -> Iterator[list[Message]]:
        """Yield messages until each of these partitions is read up to its offset. Some messages may be after it.

        Args:
            at_once: maximum number of messages that are read before the offsets are checked again.

        Raises TimeoutError if the log delivers nothing from these partitions for `silence_s`, and as `poll`.
        """
        waited_s, left = 0.0, dict(ends)
        while left := {partition: end for partition, end in left.items() if self._next.get(partition, end) < end}:
            before = {partition: self._next[partition] for partition in left}
            # The time that the caller uses between two polls does not count.
            began = time.monotonic()
            messages = self.poll(READ_WAIT_S, at_once)
            moved = any(self._next[partition] != offset for partition, offset in before.items())
            waited_s = 0.0 if moved else waited_s + time.monotonic() - began
            if waited_s > silence_s:
                where = ", ".join(f"{topic}[{p}] at {before[topic, p]} of {end}" for (topic, p), end in left.items())
                raise TimeoutError(
                    f"the log delivered nothing for {silence_s:g} s before the end was reached: {where}. Check that "
                    "its brokers run, then start this again"
                )
            yield messages

    def read_ranges(
        self, ranges: Mapping[Partition, tuple[int, int]], silence_s: float = SILENCE_S
    ) -> Iterator[list[Message]]:
        """Yield the messages of ranges of offsets, end excluded. This replaces the current assignment.

        Offsets that the log no longer keeps are skipped. A partition is unassigned when it is read to the end of its
        range. Raises as `read_until`.
        """
        ends = {partition: end for partition, (first, end) in ranges.items() if first < end}
        self.assign({partition: ranges[partition][0] for partition in ends}, gaps=True)
        for messages in self.read_until(ends, silence_s):
            finished = [partition for partition, offset in self._next.items() if offset >= ends[partition]]
            self.client.incremental_unassign([TopicPartition(*partition) for partition in finished])
            for partition in finished:
                del self._next[partition]
            yield [m for m in messages if (m.offset() or 0) < ends[m.topic() or "", m.partition() or 0]]

    def hold_back(self, partitions: Iterable[Partition]) -> None:
        """Fetch from all assigned partitions except these."""
        wanted = frozenset(partitions) & self._next.keys()
        self.client.pause([TopicPartition(*partition) for partition in wanted - self._held_back])
        self.client.resume([TopicPartition(*partition) for partition in (self._held_back - wanted) & self._next.keys()])
        self._held_back = wanted

    def seek(self, partition: Partition, offset: int) -> None:
        """Go to an offset; if it is no longer kept, to the first one that is, without an error."""
        self.client.seek(TopicPartition(*partition, offset))
        self._next[partition] = offset
        self._anywhere.add(partition)

    def close(self) -> None:
        self._guard.close()
        self.client.close()


class LogReader:
    """A reader of topics from chosen offsets: continuously (`poll`), to the current end, a range, or single records.

    Args:
        topics: topics that `poll` follows; empty for a reader that reads only ranges and single records.
        start: "beginning", "end", or next offsets by (topic, partition); other partitions start at the beginning.
        share: (n, of): this is one of `of` readers, and reads the partitions whose number modulo `of` is n.
        fetch_bytes: maximum size of one fetch response, over all partitions; by default 1 MiB per partition.

    Raises LookupError if a topic does not exist, RetentionGap if the log no longer keeps a start offset,
    AccessRefused if the brokers refuse a client with these settings.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Iterable[Topic] = (),
        *,
        start: str | Mapping[tuple[Topic, int], int] = "beginning",
        client_id: str = "tidemill-reader",
        codec: Codec | None = None,
        share: tuple[int, int] = (0, 1),
        fetch_bytes: int | None = None,
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        holes = {self._names.of(topic) for topic in Topic if is_compacted(topic)}
        self._log = PartitionReader(kafka, client_id, may_have_holes=holes, fetch_bytes=fetch_bytes)
        self._partitions: dict[Topic, list[int]] = {}
        try:
            followed = [(t, p) for t in topics for p in self.partitions(t) if p % share[1] == share[0]]
            named = {"beginning": OFFSET_BEGINNING, "end": OFFSET_END}
            whole, begin = (named[start], {}) if isinstance(start, str) else (OFFSET_BEGINNING, start)
            self._log.assign({self._full(*place): begin.get(place, whole) for place in followed})
            self._log.check()
        except KafkaException:
            self.close()
            # librdkafka reports only a timeout to a client that is refused.
            check_access(kafka)
            raise
        except LookupError:
            self.close()
            raise

    def partitions(self, topic: Topic) -> list[int]:
        """Return the partition numbers of a topic. Raises LookupError if the topic does not exist."""
        if topic not in self._partitions:
            self._partitions[topic] = partitions_of(self._log.client, self._names.of(topic))
        return self._partitions[topic]

    def poll(self, timeout_s: float = 0.1, max_records: int = 500) -> list[ConsumedRecord]:
        """Return the next records, in offset order within each partition; none if none arrive within `timeout_s`.

        Raises:
            RetentionGap: the log deleted the next record of a partition before it was read. The next offset is then
                the first one that is kept: a caller that does not need the deleted records can continue to poll.
            LookupError: a partition ends before the next offset.
            RuntimeError: there are records to read, and the client delivered none for `kafka.stall_timeout_s`.
        """
        return self._consumed(self._log.poll(timeout_s, max_records))

    def end_offsets(self) -> dict[tuple[Topic, int], int]:
        """Return the current ends by (topic, partition): the offset that the next record of each will have."""
        return {(self._names.parse(topic), p): end for (topic, p), end in self._log.ends().items()}

    def next_offsets(self) -> dict[tuple[Topic, int], int]:
        """Return the next offset to read, by (topic, partition)."""
        return {(self._names.parse(topic), p): offset for (topic, p), offset in self._log.next_offsets().items()}

    def read_to_end(self, silence_s: float = SILENCE_S) -> Iterator[ConsumedRecord]:
        """Yield all records up to the current end of the log.

        Raises TimeoutError if the log delivers nothing for `silence_s`, and as `poll`.
        """
        for messages in self._log.read_until(self._log.ends(), silence_s):
            yield from self._consumed(messages)

    def read_since(self, topic: Topic, partition: int, timestamp_ms: int) -> Iterator[ConsumedRecord]:
        """Yield the records of a partition from the first one that is not older than a time (since the Unix epoch), up
        to the current end. For a reader that follows no topic.

        Raises TimeoutError if the log delivers nothing for `SILENCE_S`, KafkaException if it refuses.
        """
        full = self._full(topic, partition)
        first = offset_since(self._log.client, full, max(timestamp_ms, 0))
        if first is not None:
            end = watermarks(self._log.client, full)[1]
            for messages in self._log.read_ranges({full: (first, end)}):
                yield from self._consumed(messages)

    def fetch(self, positions: Set[Position], silence_s: float = SILENCE_S) -> dict[Position, ConsumedRecord]:
        """Return the records at some positions, without those that the log does not contain yet or no longer keeps. For
        a reader that follows no topic.

        Each partition is read once, from the first of its positions to the last. Raises as `read_since`.
        """
        wanted: dict[Partition, list[int]] = {}
        for place in positions:
            if place.partition in self.partitions(Topic(place.topic)):
                wanted.setdefault(self._full(Topic(place.topic), place.partition), []).append(place.offset)
        ranges = {}
        for partition, offsets in wanted.items():
            low, high = watermarks(self._log.client, partition)
            kept = [offset for offset in offsets if low <= offset < high]
            if kept:
                ranges[partition] = min(kept), max(kept) + 1
        read = (record for found in self._log.read_ranges(ranges, silence_s) for record in self._consumed(found))
        return {record.position: record for record in read if record.position in positions}

    def at(self, position: Position, passed: Callable[[ConsumedRecord], object] | None = None) -> ConsumedRecord:
        """Return the record at a position of a topic that is followed. Reading then continues after it.

        Args:
            passed: called with every other record that is read meanwhile, also of other partitions; without it, these
                records are dropped.

        Raises MissingRecordError, TimeoutError if the log delivers nothing for `SILENCE_S`, and as `poll`.
        """
        partition, offset = self._full(Topic(position.topic), position.partition), position.offset
        where = f"{position.topic}[{position.partition}]"
        following = self._log.next_offsets().get(partition)
        if following is None or offset >= self._log.ends([partition])[partition]:
            raise MissingRecordError(f"{where} ends before offset {offset}")
        if offset < following or (passed is None and offset > following):
            self._log.seek(partition, offset)
        found = None
        for messages in self._log.read_until({partition: offset + 1}, at_once=500 if passed else 1):
            for record in self._consumed(messages):
                if record.position == position:
                    found = record
                elif passed is not None:
                    passed(record)
        if found is None:
            raise MissingRecordError(f"{where} no longer holds offset {offset}: its retention has passed")
        return found

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Go to an offset of a topic that is followed; if it is no longer kept, to the first one that is.

        This raises no RetentionGap: a caller that needs one record can compare its offset.
        """
        self._log.seek(self._full(topic, partition), offset)

    def _full(self, topic: Topic, partition: int) -> Partition:
        return self._names.of(topic), partition

    def _consumed(self, messages: Iterable[Message]) -> list[ConsumedRecord]:
        return [consumed_record(message, self._names, self._codec) for message in messages]

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
