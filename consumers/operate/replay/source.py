"""Reads ranges of the log without a consumer group: no committed offsets move, and nothing is written.

The end of every range is fixed before reading begins. The order of a replay merges the records of many partitions by
(timestamp, topic, partition, offset). The order within a partition never changes: a record with an earlier timestamp
than the record before it counts as if it had the later time, so that the merged times never go back. The order depends
on the records alone, not on how they arrive from the broker.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaError, TopicPartition

from tidemill.consumers.operate.reading import SILENCE_S
from tidemill.consumers.operate.replay.records import RANK, Lane, RawRecord, raw_record
from tidemill.consumers.operate.replay.selection import READ_COMMITTED
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, groupless_settings, raise_lasting
from tidemill.schemas.log.partitions import offset_since, watermarks

CLIENT_ID = "tidemill-replay"
POLL_S = 0.1
BATCH = 500
HELD_BYTES = 8 * 2**20
"""A partition that is so far ahead of the others is not fetched from until they have caught up."""


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets [start, end) of a partition."""

    start: int
    end: int


class LogSource:
    """The topics under one prefix, by their names without it."""

    def __init__(self, kafka: KafkaSettings, isolation: str = READ_COMMITTED) -> None:
        self._prefix = kafka.topic_prefix
        own = {"isolation.level": isolation, "enable.partition.eof": True}
        self._settings = groupless_settings(kafka, CLIENT_ID) | own
        self._consumer = Consumer(self._settings)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 when it does not exist."""
        full = self._prefix + topic
        found = self._consumer.list_topics(full, timeout=METADATA_TIMEOUT_S).topics[full]
        return 0 if found.error is not None else len(found.partitions)

    def bounds(self, lane: Lane) -> Range:
        """What the log holds of a partition now: from its first offset to the one that the next record will have."""
        return Range(*watermarks(self._consumer, self._full(lane)))

    def first_since(self, lane: Lane, timestamp_ms: int) -> int | None:
        """The first offset whose record is not older than a time; None when there is none."""
        return offset_since(self._consumer, self._full(lane), timestamp_ms)

    def first(self, lane: Lane) -> RawRecord | None:
        """The oldest record that the log holds of a partition."""
        return next(self.scan({lane: self.bounds(lane)}), None)

    def scan(self, ranges: Mapping[Lane, Range]) -> Iterator[RawRecord]:
        """Every record of some ranges, in offset order within each partition.

        Raises TimeoutError when the broker delivers nothing for a minute.
        """
        with _Reading(self._settings, self._prefix, ranges) as reading:
            while reading.left:
                yield from reading.poll()

    def ordered(self, ranges: Mapping[Lane, Range]) -> Iterator[tuple[int, RawRecord]]:
        """Every record of some ranges in the order of `OrderedMerge`, with the time that the merge has reached.

        Raises like `scan`.
        """
        merge = OrderedMerge(ranges)
        with _Reading(self._settings, self._prefix, ranges) as reading:
            open_lanes = set(ranges)
            while open_lanes:
                for record in reading.poll():
                    merge.add(record)
                for lane in open_lanes - reading.left:
                    merge.end(lane)
                open_lanes &= reading.left
                yield from merge.take()
                reading.hold_back({lane for lane in open_lanes if merge.held_bytes(lane) > HELD_BYTES})

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def _full(self, lane: Lane) -> Lane:
        return self._prefix + lane[0], lane[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reading:
    """One pass over some ranges.

    It has a consumer of its own: pauses and positions outlive the assignment that they were made in.
    """

    def __init__(self, settings: dict[str, Any], prefix: str, ranges: Mapping[Lane, Range]) -> None:
        self._consumer, self._prefix = Consumer(settings), prefix
        self._ends = {lane: r.end for lane, r in ranges.items()}
        self.left = {lane for lane, r in ranges.items() if r.start < r.end}
        self._held_back: set[Lane] = set()
        self._heard = time.monotonic()
        self._assignment = [TopicPartition(prefix + lane[0], lane[1], ranges[lane].start) for lane in sorted(self.left)]

    def __enter__(self) -> Self:
        self._consumer.assign(self._assignment)
        return self

    def __exit__(self, *_error: object) -> None:
        self._consumer.close()

    def poll(self) -> list[RawRecord]:
        """The next records; partitions that have been read to their end are no longer `left`."""
        found = []
        ended: set[Lane] = set()
        for message in self._consumer.consume(BATCH, POLL_S):
            error = message.error()
            if error is not None:
                raise_lasting(error)
                if error.code() == KafkaError._PARTITION_EOF:
                    ended.add(((message.topic() or "").removeprefix(self._prefix), message.partition() or 0))
                continue
            record = raw_record(message, self._prefix)
            if record.offset >= self._ends[record.lane]:
                ended.add(record.lane)
            elif record.lane in self.left:
                found.append(record)
        before = len(self.left)
        self._settle(found, ended)
        if found or len(self.left) < before or not self.left - self._held_back:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE_S:
            raise TimeoutError(f"the broker delivered nothing of {_named(self.left)} for {SILENCE_S:g} s")
        return found

    def hold_back(self, lanes: Iterable[Lane]) -> None:
        """Fetch from every partition that is left but these."""
        wanted = set(lanes) & self.left
        self._consumer.pause([self._at(lane) for lane in sorted(wanted - self._held_back)])
        self._consumer.resume([self._at(lane) for lane in sorted((self._held_back - wanted) & self.left)])
        self._held_back = wanted

    def _settle(self, found: list[RawRecord], ended: set[Lane]) -> None:
        """Take note of what is read to its end. Markers and compacted records at the end bring no record: there the
        consumer's position, or its word that nothing more can be read, says so."""
        done = ended | {r.lane for r in found if r.offset + 1 >= self._ends[r.lane]}
        for place in self._consumer.position(self._assignment):
            lane = (place.topic.removeprefix(self._prefix), place.partition)
            if place.offset >= self._ends[lane]:
                done.add(lane)
        finished = done & self.left
        if finished:
            self._consumer.pause([self._at(lane) for lane in sorted(finished)])
            self.left -= finished
            self._held_back -= finished

    def _at(self, lane: Lane) -> TopicPartition:
        return TopicPartition(self._prefix + lane[0], lane[1])


def _named(lanes: Iterable[Lane]) -> str:
    return ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(lanes))


Order = tuple[int, int, int, int]
"""Time reached in the partition, rank of the topic, partition, offset."""

OVERHEAD_BYTES = 500
"""Memory of a record beside its bytes."""


class OrderedMerge:
    """Merges partitions: records go in with `add`, in offset order within each partition, and come out of `take`."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._held: dict[Lane, deque[tuple[Order, RawRecord]]] = {lane: deque() for lane in lanes}
        self._bytes = dict.fromkeys(self._held, 0)
        self._reached: dict[Lane, int] = {}
        self._heads: list[tuple[Order, Lane]] = []
        self._open = set(self._held)
        self._awaited = set(self._held)

    def add(self, record: RawRecord) -> None:
        """The next record of its partition."""
        lane = record.lane
        self._reached[lane] = max(record.timestamp_ms, self._reached.get(lane, record.timestamp_ms))
        order = (self._reached[lane], RANK[record.topic], record.partition, record.offset)
        self._held[lane].append((order, record))
        self._bytes[lane] += record.n_bytes + OVERHEAD_BYTES
        if len(self._held[lane]) == 1:
            self._awaited.discard(lane)
            heapq.heappush(self._heads, (order, lane))

    def end(self, lane: Lane) -> None:
        """Nothing more comes of this partition."""
        self._open.discard(lane)
        self._awaited.discard(lane)

    def held_bytes(self, lane: Lane) -> int:
        """Size of the records of a partition that wait for those of others."""
        return self._bytes[lane]

    def take(self) -> Iterator[tuple[int, RawRecord]]:
        """Every record whose turn is certain, with the time that the merge has reached."""
        while self._heads and not self._awaited:
            order, lane = heapq.heappop(self._heads)
            held = self._held[lane]
            _, record = held.popleft()
            self._bytes[lane] -= record.n_bytes + OVERHEAD_BYTES
            if held:
                heapq.heappush(self._heads, (held[0][0], lane))
            elif lane in self._open:
                self._awaited.add(lane)
            yield order[0], record
