"""A stream processor over a log as it lies: its machines, partition by partition, without workers, clock or writes.

Invariants:

- the records of a partition are given to its machine in one order, by the topic's event time, the place of the topic
  and the offset, in whichever order they come in here; so what comes out is a function of the records alone;
- it equals what workers write for the same records and rules, their repetitions after a crash aside;
- time moves with the records and ticks that are in the log, and stops where the log ends: what falls due later has not
  been decided, as it has not by a worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.streams.machine import Machine, Output, Processor
from tidemill.streams.state import MachineState

CHANGES_EVERY = 500
"""Records after which a machine's changes are taken and thrown away, so that it does not gather them for ever."""

Change = Callable[[ConsumedRecord], ConsumedRecord]
"""What is different about a record in a replay; the same record where nothing is."""


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Which offsets of a partition are replayed: [begin, end)."""

    begin: int
    end: int

    def __contains__(self, offset: int) -> bool:
        return self.begin <= offset < self.end


@dataclass(frozen=True, slots=True)
class Decided:
    """An output, and the record by which it was decided: the last one that its machine was given."""

    output: Output
    cause: Position
    at_ms: int
    """The cause's timestamp."""


@dataclass(slots=True)
class _Waiting:
    """The records of one topic that may not be given yet, each with the topic's clock at it."""

    span: RecordRange
    records: deque[tuple[int, ConsumedRecord]] = field(default_factory=deque)
    clock_ms: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.over = self.span.begin >= self.span.end

    def put(self, located: ConsumedRecord) -> None:
        self.clock_ms = max(self.clock_ms, located.timestamp_ms)
        self.records.append((self.clock_ms, located))
        self.over = located.offset >= self.span.end - 1


class Interleaved:
    """The equal partitions of some topics in one order: (clock of the topic, place of the topic, offset)."""

    def __init__(self, spans: Sequence[RecordRange]) -> None:
        """`spans` are those of the topics, in their places."""
        self._topics = [_Waiting(span) for span in spans]

    def put(self, place: int, located: ConsumedRecord) -> Iterator[ConsumedRecord]:
        """The next record of the topic at `place`; the records that are next in the order, as far as that is known."""
        self._topics[place].put(located)
        while all(topic.records or topic.over for topic in self._topics) and any(t.records for t in self._topics):
            yield self._pop()

    def rest(self) -> Iterator[ConsumedRecord]:
        """What waits, when no more records come."""
        while any(topic.records for topic in self._topics):
            yield self._pop()

    def _pop(self) -> ConsumedRecord:
        waiting = [(topic.records[0][0], place) for place, topic in enumerate(self._topics) if topic.records]
        _, place = min(waiting)
        return self._topics[place].records.popleft()[1]


class OfflineRun:
    """One pass of a processor over the records of its inputs.

    Args:
        spans: what is replayed of each partition of each input; records outside are passed over.
        change: a counterfactual: what each record is turned into before its machine sees it.
    """

    def __init__(
        self,
        processor: Processor,
        spans: Mapping[tuple[Topic, int], RecordRange],
        change: Change = lambda located: located,
    ) -> None:
        self._places = {topic: place for place, topic in enumerate(processor.inputs)}
        self._spans = spans
        self._change = change
        partitions = sorted({partition for _, partition in spans})
        self._machines: dict[int, Machine] = {p: processor.machine(p, MachineState()) for p in partitions}
        self._orders = {p: Interleaved([spans[topic, p] for topic in processor.inputs]) for p in partitions}
        self._observed = 0

    def take(self, located: ConsumedRecord) -> list[Decided]:
        """One record, in the order of its partition; what is decided by it and by those that it lets through."""
        if located.offset not in self._spans[located.topic, located.partition]:
            return []
        found = self._orders[located.partition].put(self._places[located.topic], located)
        return [decided for record in found for decided in self._observe(record)]

    def finish(self) -> list[Decided]:
        """What the records decide that wait for others; none comes after it."""
        return [
            decided
            for partition in sorted(self._orders)
            for record in self._orders[partition].rest()
            for decided in self._observe(record)
        ]

    def _observe(self, located: ConsumedRecord) -> list[Decided]:
        machine = self._machines[located.partition]
        outputs = machine.observe(self._change(located))
        self._observed += 1
        if self._observed % CHANGES_EVERY == 0:
            machine.take_changes()
        return [Decided(output, located.position, located.timestamp_ms) for output in outputs]
