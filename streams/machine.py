"""A stream processor without Kafka: one pure state machine for each partition, and the processor that creates them.

A runner (`tidemill.streams.runner`) runs any processor and guarantees:

- the records of each topic arrive in the order of their offsets; the order between topics is arbitrary, so a machine
  with several topics must decide by event time alone;
- a new machine continues from the state of the newest stored `Changes`, and reads each topic from `next_offset`; an
  output is written to the log before the changes that belong to it are stored, so each output is written at least once;
- ticks arrive while a topic is idle and something is due.
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
    """None: the partition is chosen from the key, by murmur2."""


@record(frozen=True, slots=True)
class Rejected:
    """A record that breaks the contract. It becomes a dead letter with this reason."""

    located: ConsumedRecord
    reason: str


Output = OutputRecord | Rejected


class Machine(Protocol):
    """The decisions of one partition: a function of the records alone, without clock, randomness or I/O."""

    def next_offset(self, topic: Topic) -> int:
        """Return the first offset of an input topic that is not decided. Reading continues there after a restart.

        Records that were observed and wait for another topic's clock are not decided; they are observed again.
        """
        ...

    def next_deadline_us(self) -> int | None:
        """Return the earliest event time at which something is due when the clock of every input has reached it."""
        ...

    def clock_us(self, topic: Topic) -> int:
        """Return the event time of an input topic, microseconds: the newest observed timestamp, ticks included."""
        ...

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Process one record of any input and return the outputs that it decides.

        A record at an offset that is already decided has no outputs. A tombstone has neither `record` nor `value`; a
        value that cannot be decoded has a `value`, no `record` and an `error`.
        """
        ...

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""
        ...


class TopicHead(Protocol):
    """The head of a machine with one topic: the position up to which the topic is decided."""

    offset: int
    """The last offset that is decided."""
    clock_us: int
    """Event time at that offset, microseconds."""


E = TypeVar("E", bound=TimedEntry)
Head = TypeVar("Head", bound=TopicHead)


class OneTopicMachine(ABC, Generic[E, Head]):
    """A machine with one input topic, which decides each record when it arrives."""

    def __init__(self, store: TimedEntries[E, Head], begin: Head) -> None:
        """`begin` is the head of a machine that has decided no record."""
        self._store = store
        self._head = store.head if store.head is not None else begin
        self._outputs: list[Output] = []
        """The outputs that the current record decides."""

    def next_offset(self, topic: Topic) -> int:
        return self._head.offset + 1

    def clock_us(self, topic: Topic) -> int:
        """Return the event time, microseconds: the newest observed record timestamp."""
        return self._head.clock_us

    def next_deadline_us(self) -> int | None:
        """Return the time at which the next awaited entry is due; None if there is none."""
        return self._store.next_awaited_us()

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Decide one record; a record at or below the head is already decided and has no outputs."""
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
        return self._store.changes(self._head)

    @abstractmethod
    def fall_due(self) -> None:
        """Process the entries that are due at the current event time."""

    @abstractmethod
    def decide(self, located: ConsumedRecord) -> str:
        """Decide a record. Return the reason for its rejection, or an empty string if it is accepted."""


@record(frozen=True, slots=True)
class Processor:
    """One stream application: the topics that it reads and writes, and its machines."""

    name: str
    """Name of the application. Topic prefix, name and run form the names of the consumer group and the state topic."""
    table: str
    """Name of its state table."""
    inputs: tuple[Topic, ...]
    """Topics that it reads, all with the same partition count; one machine gets the partitions of equal number."""
    outputs: tuple[Topic, ...]
    """Topics that it writes, except for dead letters of the inputs."""
    machine: Callable[[int, MachineState], Machine]
    """Creates the machine of a partition from a state. Raises ValueError if the state's bytes are invalid."""
