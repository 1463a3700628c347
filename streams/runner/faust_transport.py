"""Faust's Kafka transport, corrected in four places.

- Reading continues at the positions in the state topic, not at the group's committed offsets: Faust may commit offsets
  of records whose state changes are still in its buffers (its flush ends after 0.1 s), and a crash would lose them.
- The wait time of fetches can be set. aiokafka has one fetch in flight for each broker, so with Faust's fixed 1.5 s a
  record of a partition that is not in this fetch may wait that long.
- Holes in the log are distinguished from records that Faust drops between fetch and stream, as it does when the flow
  is stopped: a hole is a range that the fetcher itself skips, because compaction removed its records.
- Records that the log deleted before they were read are distinguished from such holes by the first offset in the log:
  aiokafka would continue there silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from tidemill.schemas.log.guard import RetentionGap
from tidemill.streams.runner.base import check_position

LOG = logging.getLogger("tidemill.streams")


class OffsetGaps:
    """The holes in the log, by partition: offsets that follow each other although they are not consecutive.

    Recorded in the consumer's thread and queried in the worker's; each hole is queried once.

    Args:
        topics: full names of the topics in which compaction may make holes.
    """

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics
        self._next: dict[TP, int] = {}
        self._found: dict[tuple[TP, int], int] = {}
        self._deleted: dict[tuple[TP, int], int] = {}

    def expect(self, tp: TP, offset: int) -> None:
        """Record that the next fetch begins at `offset`."""
        self._next[tp] = offset

    def note(self, tp: TP, offsets: Iterable[int]) -> list[int]:
        """Record the offsets of one fetch, ascending. A lower offset than expected follows a seek and is not a hole.

        Returns the expected offsets that the fetch skipped.
        """
        stepped_over = []
        for offset in offsets:
            expected = self._next.get(tp, offset)
            if offset > expected:
                stepped_over.append(expected)
                if tp.topic in self._topics:
                    self._found[tp, expected] = offset
            self._next[tp] = offset + 1
        return stepped_over

    def note_first(self, tp: TP, stepped_over: Iterable[int], first: int) -> None:
        """Record that the log begins at `first`, so that skipped offsets before it were deleted."""
        self._deleted.update({(tp, expected): first for expected in stepped_over if expected < first})

    def first_kept(self, tp: TP, expected: int) -> int | None:
        """Return the first offset in the log if it deleted the expected one; otherwise None."""
        return self._deleted.pop((tp, expected), None)

    def take(self, tp: TP, expected: int, offset: int) -> bool:
        """Return whether the log has no records in [expected, offset)."""
        return self._found.pop((tp, expected), expected) == offset

    def clear(self) -> None:
        """Delete all entries; the next record of a partition is not checked."""
        self._next.clear()
        self._found.clear()
        self._deleted.clear()


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # faust is untyped here
    def _create_worker_consumer(self, transport: Any) -> Any:  # noqa: ANN401 - aiokafka's consumer
        consumer = super()._create_worker_consumer(transport)
        # Faust fixes the constructor's argument; aiokafka reads this attribute when the consumer starts.
        consumer._fetch_max_wait_ms = self.transport.fetch_wait_ms
        return consumer

    async def _fetch_records(self, consumer: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - aiokafka's
        found = await super()._fetch_records(consumer, *arguments, **options)
        holes, inputs = self.transport.holes, self.transport.positions()
        noted = {tp: holes.note(tp, [r.offset for r in found[tp]]) for tp in map(TP._make, found) if tp in inputs}
        stepped_over = {tp: expected for tp, expected in noted.items() if expected}
        if stepped_over:
            first = await consumer.beginning_offsets(list(stepped_over))
            for tp, expected in stepped_over.items():
                holes.note_first(tp, expected, first[tp])
        return found


class _Consumer(driver.Consumer):  # type: ignore[misc]  # faust is untyped here
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets, then to the positions in the state for partitions that have one."""
        found = await super().seek_to_committed()
        assigned = self.assignment()
        wanted = {tp: offset for tp, offset in self.transport.positions().items() if tp in assigned}
        ends = await self.highwaters(*wanted) if wanted else {}
        firsts = await self.earliest_offsets(*wanted) if wanted else {}
        for tp, offset in wanted.items():
            check_position(tp.topic, tp.partition, offset, ends.get(tp))
            self._check_kept(tp, offset, firsts.get(tp, 0))
        if wanted:
            # `seek_wait` runs in the consumer's own thread; `seek` would use aiokafka's futures from this one.
            await self.seek_wait(wanted)
        return {**found, **wanted}

    def _check_kept(self, tp: TP, offset: int, first: int) -> None:
        """Raise RetentionGap if records after the state's offset were deleted and gaps are not accepted."""
        if offset == 0 and first > 0:
            LOG.warning("%s[%d] is read from its beginning, which is now offset %d", tp.topic, tp.partition, first)
            return
        self.transport.holes.expect(tp, offset)
        if offset < first and not self.transport.accept_gaps:
            raise RetentionGap(tp.topic, tp.partition, offset, first)


class PositionedTransport(driver.Transport):  # type: ignore[misc]  # faust is untyped here
    """aiokafka transport that continues reading at the positions in the state.

    Args:
        positions: returns the next offset to read, by input partition; called whenever Faust seeks.
        fetch_wait_ms: longest time that a fetch waits for records.
        may_have_holes: full names of the inputs in which compaction may make holes.
        accept_gaps: continue if the log has deleted the next records.
    """

    Consumer = _Consumer

    def __init__(
        self,
        url: Any,  # noqa: ANN401 - a list of yarl URLs
        app: Any,  # noqa: ANN401 - faust.App
        *,
        positions: Callable[[], Mapping[TP, int]],
        fetch_wait_ms: int,
        may_have_holes: Collection[str] = (),
        accept_gaps: bool = False,
    ) -> None:
        super().__init__(url, app)
        self.positions = positions
        self.fetch_wait_ms = fetch_wait_ms
        self.accept_gaps = accept_gaps
        self.holes = OffsetGaps(may_have_holes)
