"""What a stream processor is, apart from Kafka: a pure machine a partition, and the processor that makes them.

The worker (`tidemill.streams.runner.faust.worker`) runs any of them and keeps these promises to it:

- records come in the order of their offsets, topic by topic; how the topics interleave is chance, so that a machine of
  several topics must decide by event time alone;
- outputs are acknowledged by the log before the states that they left are written, and states before heads, heads
  before deletions; a crash may cut that off anywhere;
- a fresh machine is made of every state that was written, and reads each topic on from `next_offset`;
- ticks come while a topic is idle and something is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Record


@dataclass(frozen=True, slots=True)
class Emit:
    """A record to write."""

    topic: Topic
    key: str
    record: Record
    partition: int | None
    """None: the partition of the key, by murmur2."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that breaks the contract, to be dead-lettered with the reason."""

    located: ConsumedRecord
    reason: str


Output = Emit | Rejected


@dataclass(frozen=True, slots=True)
class Changes:
    """State to write down: `states`, then `heads`, then deletions. Each entry is written whole or not at all.

    A key is unique over all partitions of a processor: the key of what every partition has of its own names the
    partition. A head is an entry that says how far the records of a topic are decided; it is written once every state
    before it is safe, so that a restart can meet states that are newer than the heads, and never older ones.
    """

    states: dict[str, bytes]
    heads: dict[str, bytes]
    forgotten: list[str]
    """Keys to delete."""


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
        """What changed since the last call."""
        ...


class Processor(Protocol):
    """One stream application: which topics it reads and writes, and its machines."""

    @property
    def name(self) -> str:
        """Name of the application: with topic prefix and run it makes the consumer group and the state topic."""
        ...

    @property
    def table(self) -> str:
        """Name of its state table."""
        ...

    @property
    def inputs(self) -> tuple[Topic, ...]:
        """Topics that it reads, all of one partition count; equal partitions go to one machine."""
        ...

    @property
    def outputs(self) -> tuple[Topic, ...]:
        """Topics that it writes, dead letters of the inputs aside."""
        ...

    def partition_of_state(self, key: str, value: bytes) -> int:
        """The partition that a written state belongs to. Raises ValueError for bytes that are no state."""
        ...

    def machine(self, partition: int, states: Iterable[tuple[str, bytes]]) -> Machine:
        """The machine of a partition, going on from its written states. Raises ValueError for bytes that are none."""
        ...
