"""The order of a replay: records of many partitions merged by (timestamp, topic, partition, offset).

The order within a partition is never changed. Where a record's timestamp lies before that of a record ahead of it, it
counts as if it were written at that time, so that the merged times never go back. The order depends on nothing but the
records: how they arrive from the broker does not matter.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from tidemill.consumers.operate.replay.raw import RANK, Lane, RawRecord

Order = tuple[int, int, int, int]
"""Time reached in the partition, rank of the topic, partition, offset."""

OVERHEAD_BYTES = 500
"""Memory of a record beside its bytes."""


class Merge:
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
