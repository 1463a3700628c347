"""Faust's Kafka transport, corrected in three places.

- Where to go on reading is what the state topic says, not the group's committed offsets: Faust may commit offsets of
  records whose state changes are still in its buffers (its flush gives up after 0.1 s), and a crash would lose them.
- Fetches wait for a set time. aiokafka has one fetch in flight a broker, and Faust's fixed 1.5 s is how long a record
  of a partition outside of that fetch may wait.
- Holes in the log are told from records that Faust drops between a fetch and the stream, as it does when the flow is
  stopped: a hole is what the fetcher itself steps over, since compaction removed the records in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from faust.transport.drivers import aiokafka as driver
from faust.types import TP


class PositionError(RuntimeError):
    """The state and the log do not belong together."""


class Holes:
    """Which offsets follow each other in the log although they are not neighbours, by partition.

    Noted in the consumer's thread and asked in the worker's; each hole is asked for once.

    Args:
        topics: full names of the topics that may have holes; others are not looked at.
    """

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics
        self._next: dict[TP, int] = {}
        self._found: dict[tuple[TP, int], int] = {}

    def note(self, tp: TP, offsets: Iterable[int]) -> None:
        """Offsets of one fetch, ascending. One that lies behind the fetch before begins anew: somebody sought."""
        if tp.topic not in self._topics:
            return
        for offset in offsets:
            expected = self._next.get(tp, offset)
            if offset > expected:
                self._found[tp, expected] = offset
            self._next[tp] = offset + 1

    def take(self, tp: TP, expected: int, offset: int) -> bool:
        """Whether the log has nothing in [expected, offset)."""
        return self._found.pop((tp, expected), expected) == offset

    def clear(self) -> None:
        """Forget what was noted; the next record of a partition begins anew."""
        self._next.clear()
        self._found.clear()


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # faust is untyped here
    def _create_worker_consumer(self, transport: Any) -> Any:  # noqa: ANN401 - aiokafka's consumer
        consumer = super()._create_worker_consumer(transport)
        # The constructor's argument is fixed by Faust; aiokafka reads this attribute when the consumer starts.
        consumer._fetch_max_wait_ms = self.transport.fetch_wait_ms
        return consumer

    async def _fetch_records(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - records by partition
        found = await super()._fetch_records(*arguments, **options)
        for tp, records in found.items():
            self.transport.holes.note(TP(tp.topic, tp.partition), [record.offset for record in records])
        return found


class _Consumer(driver.Consumer):  # type: ignore[misc]  # faust is untyped here
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets, then to the positions of the state where there is one."""
        found = await super().seek_to_committed()
        assigned = self.assignment()
        wanted = {tp: offset for tp, offset in self.transport.positions().items() if tp in assigned}
        ends = await self.highwaters(*wanted) if wanted else {}
        for tp, offset in wanted.items():
            _check_position(tp, offset, ends.get(tp))
        if wanted:
            # In the consumer's own thread: its plain `seek` would touch aiokafka's futures from this one.
            await self.seek_wait(wanted)
        return {**found, **wanted}


def _check_position(tp: TP, offset: int, end: int | None) -> None:
    if end is not None and offset > end:
        raise PositionError(
            f"the state of {tp.topic}[{tp.partition}] goes to offset {offset}, the log ends at {end}: the topic was "
            "made anew. Give the processor another `application` name, or delete its changelog topic as well"
        )


class PositionedTransport(driver.Transport):  # type: ignore[misc]  # faust is untyped here
    """aiokafka transport that reads on from the positions of the state.

    Args:
        positions: the next offset to read, by input partition; asked whenever Faust seeks.
        fetch_wait_ms: longest time that a fetch waits for records.
        may_have_holes: full names of the inputs from whose middle records may be gone.
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
    ) -> None:
        super().__init__(url, app)
        self.positions = positions
        self.fetch_wait_ms = fetch_wait_ms
        self.holes = Holes(may_have_holes)
