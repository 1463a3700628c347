"""A stream processor apart from Kafka: a pure machine a partition, and the processor that makes the machines.

A runner (`tidemill.streams.runner`) runs any of them and keeps these promises to it:

- records come in the order of their offsets, topic by topic; how the topics interleave is chance, so that a machine of
  several topics must decide by event time alone;
- a fresh machine goes on from the state of the newest `Changes` that were kept, and reads each topic on from
  `next_offset`; an output is in the log before the changes that it left are kept, so that it is there at least once;
- ticks come while a topic is idle and something is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Record
from tidemill.streams.state import Changes, MachineState, TimedEntries, TimedEntry


@record(frozen=True, slots=True)
class OutputRecord:
    """A record to write."""

    topic: Topic
    key: str
    record: Record
    partition: int | None
    """None: the partition of the key, by murmur2."""


@record(frozen=True, slots=True)
class Rejected:
    """A record that breaks the contract, to be dead-lettered with the reason."""

    located: ConsumedRecord
    reason: str


Output = OutputRecord | Rejected


class Machine(Protocol):
    """The decisions of one partition: a function of the records alone, without clock, randomness or I/O."""

    def next_offset(self, topic: Topic) -> int:
        """The first offset of an input topic that is not decided: reading goes on there after a restart.

        Records that were observed and wait for another topic's clock are not decided; they are observed again.
        """
        ...

    def next_deadline_us(self) -> int | None:
        """The earliest event time at which something falls due once the clock of every input has reached it."""
        ...

    def clock_us(self, topic: Topic) -> int:
        """Event time of an input topic, microseconds: the newest record timestamp observed, ticks included."""
        ...

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Take one record of any input; what is decided by it.

        A record at an offset that was decided before gives nothing. A tombstone has neither `record` nor `value`; a
        value that cannot be read has a `value`, no `record` and an `error`.
        """
        ...

    def take_changes(self) -> Changes:
        """The changes since the last call."""
        ...


class TopicHead(Protocol):
    """The head of a machine of one topic: how far the topic is decided."""

    offset: int
    """The last offset that is decided."""
    clock_us: int
    """Event time there."""


E = TypeVar("E", bound=TimedEntry)
Head = TypeVar("Head", bound=TopicHead)


class OneTopicMachine(ABC, Generic[E, Head]):
    """A machine of one input topic, which decides each record as it comes."""

    def __init__(self, store: TimedEntries[E, Head], begin: Head) -> None:
        """`begin` is the head of a machine that has decided nothing."""
        self._store = store
        self._head = store.head if store.head is not None else begin
        self._outputs: list[Output] = []
        """The outputs that the current record decides."""

    def next_offset(self, topic: Topic) -> int:
        """The first offset that is not decided yet."""
        return self._head.offset + 1

    def clock_us(self, topic: Topic) -> int:
        """Event time: the newest record timestamp seen, microseconds."""
        return self._head.clock_us

    def next_deadline_us(self) -> int | None:
        """When the next entry falls due from which something follows."""
        return self._store.next_awaited_us()

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Decide one record; a record at or below the head was decided before and gives nothing."""
        head = self._head
        if located.offset <= head.offset:
            return []
        head.offset = located.offset
        at_us = located.timestamp_ms * 1_000
        if at_us > head.clock_us:
            head.clock_us = at_us
        self._outputs = []
        self.fall_due()
        problem = self.decide(located)
        if problem:
            self._outputs.append(Rejected(located, problem))
        return self._outputs

    def take_changes(self) -> Changes:
        """The changes since the last call."""
        return self._store.changes(self._head)

    @abstractmethod
    def fall_due(self) -> None:
        """Look at the entries that are due by now."""

    @abstractmethod
    def decide(self, located: ConsumedRecord) -> str:
        """Decide a record; why it is rejected, empty where it is not."""


@record(frozen=True, slots=True)
class Processor:
    """One stream application: which topics it reads and writes, and its machines."""

    name: str
    """Name of the application: with topic prefix and run it makes the consumer group and the state topic."""
    table: str
    """Name of its state table."""
    inputs: tuple[Topic, ...]
    """Topics that it reads, all of one partition count; equal partitions go to one machine."""
    outputs: tuple[Topic, ...]
    """Topics that it writes, dead letters of the inputs aside."""
    machine: Callable[[int, MachineState], Machine]
    """Makes the machine of a partition, going on from a state. Raises ValueError for bytes that are none."""
