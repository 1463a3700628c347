"""Which offsets may be committed when work finishes out of order. Pure.

What holds: the offset to commit of a partition is never past a record whose work is unfinished, so that whatever a
crash interrupts is delivered again; a record delivered again while its work runs, or after it, is not begun twice.
"""

from __future__ import annotations

from tidemill.schemas.catalogue import Topic

Partition = tuple[Topic, int]


class OffsetTracker:
    """Offsets begun and finished, by partition."""

    def __init__(self) -> None:
        self._running: dict[Partition, set[int]] = {}
        self._next: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}

    def begin(self, partition: Partition, offset: int) -> bool:
        """A record arrived; whether its work is to be begun. Offsets of a partition arrive in order, with gaps."""
        if offset < self._next.get(partition, 0):
            return False
        self._running.setdefault(partition, set()).add(offset)
        self._next[partition] = offset + 1
        return True

    def finish(self, partition: Partition, offset: int) -> None:
        """The work of a record is done. One of a partition that was dropped is ignored."""
        self._running.get(partition, set()).discard(offset)

    def drop(self, partition: Partition) -> None:
        """The partition belongs to another member now."""
        for state in (self._running, self._next, self._committed):
            state.pop(partition, None)

    def partitions(self) -> set[Partition]:
        """Partitions of which a record has arrived."""
        return set(self._next)

    def committable(self) -> dict[Partition, int]:
        """The next offset to read of each partition where it moved since `committed`."""
        marks = {partition: min(self._running[partition], default=end) for partition, end in self._next.items()}
        return {partition: mark for partition, mark in marks.items() if mark > self._committed.get(partition, 0)}

    def committed(self, offsets: dict[Partition, int]) -> None:
        """The offsets were committed."""
        self._committed.update(offsets)
