"""Reads ranges of the log without a consumer group: no committed offsets move, and nothing is written.

The end of every range is fixed before reading begins. The order of a replay merges the records of many partitions by
(timestamp, topic, partition, offset). The order within a partition never changes: a record with an earlier timestamp
than the record before it counts as if it had the later time, so that the merged times never go back. The order depends
on the records alone, not on how they arrive from the broker.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tidemill.consumers.operate.replay.records import RANK, Lane, RawRecord, raw_record
from tidemill.consumers.operate.replay.selection import READ_COMMITTED
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S
from tidemill.schemas.log.reader import PartitionReader
from tidemill.schemas.log.watermarks import offset_since, watermarks

CLIENT_ID = "tidemill-replay"
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
        self._kafka, self._isolation = kafka, isolation
        self._log = self._reader()

    def _reader(self) -> PartitionReader:
        return PartitionReader(self._kafka, CLIENT_ID, isolation=self._isolation)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 when it does not exist."""
        full = self._kafka.topic_prefix + topic
        found = self._log.client.list_topics(full, timeout=METADATA_TIMEOUT_S).topics[full]
        return 0 if found.error is not None else len(found.partitions)

    def bounds(self, lane: Lane) -> Range:
        """What the log holds of a partition now: from its first offset to the one that the next record will have."""
        return Range(*watermarks(self._log.client, self._full(lane)))

    def first_since(self, lane: Lane, timestamp_ms: int) -> int | None:
        """The first offset whose record is not older than a time; None when there is none."""
        return offset_since(self._log.client, self._full(lane), timestamp_ms)

    def first(self, lane: Lane) -> RawRecord | None:
        """The oldest record that the log holds of a partition."""
        return next(self.scan({lane: self.bounds(lane)}), None)

    def scan(self, ranges: Mapping[Lane, Range]) -> Iterator[RawRecord]:
        """Every record of some ranges, in offset order within each partition.

        Raises TimeoutError when the broker delivers nothing for a minute.
        """
        with closing(self._reader()) as log:
            for messages in log.read_ranges(self._bounds(ranges)):
                yield from (raw_record(message, self._kafka.topic_prefix) for message in messages)

    def ordered(self, ranges: Mapping[Lane, Range]) -> Iterator[tuple[int, RawRecord]]:
        """Every record of some ranges in the order of `OrderedMerge`, with the time that the merge has reached.

        Raises like `scan`.
        """
        merge, open_lanes = OrderedMerge(ranges), set(ranges)
        with closing(self._reader()) as log:
            for messages in log.read_ranges(self._bounds(ranges)):
                for message in messages:
                    merge.add(raw_record(message, self._kafka.topic_prefix))
                left = {lane for lane in open_lanes if self._full(lane) in log.next_offsets()}
                for lane in open_lanes - left:
                    merge.end(lane)
                open_lanes = left
                yield from merge.take()
                log.hold_back(self._full(lane) for lane in open_lanes if merge.held_bytes(lane) > HELD_BYTES)

    def close(self) -> None:
        """Give the connections back."""
        self._log.close()

    def _full(self, lane: Lane) -> Lane:
        return self._kafka.topic_prefix + lane[0], lane[1]

    def _bounds(self, ranges: Mapping[Lane, Range]) -> dict[Lane, tuple[int, int]]:
        return {self._full(lane): (held.start, held.end) for lane, held in ranges.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
