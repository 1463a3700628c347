"""A common order for the records of several topics that does not depend on the order in which they are read.

Each topic has a clock, the running maximum of its record timestamps; a record's time is its topic's clock at its
offset. Records are decided in the order (time, place of the topic, offset), each as soon as no later read can return
an earlier record. Invariant: the order is a function of the logs alone, and the decided records are a prefix of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.record_class import record
from tidemill.streams.state import NEVER

Item = TypeVar("Item")

NOT_BEGUN = -1
MILLISECOND_US = 1_000
"""Kafka's timestamps are whole milliseconds."""


@record(frozen=True, slots=True)
class SourceMark:
    """Position up to which a topic is decided: the last decided offset, and the clock at it in microseconds."""

    offset: int = NOT_BEGUN
    clock_us: int = 0


Step = tuple[int, int, Item]
"""Time in microseconds, offset and item of the next record in the common order; a record without an item only
advances the clock."""


@dataclass(slots=True)
class _Input(Generic[Item]):
    place: int
    decided: tuple[int, int]
    """The last decided offset, and the clock at it."""
    read_offset: int
    clock_us: int
    """Includes the waiting records."""
    waiting: deque[Step[Item]] = field(default_factory=deque)


class TopicMerge(Generic[Item]):
    """The common order of several topics' partitions of equal number. At equal times, the earlier topic comes first."""

    def __init__(self, topics: Sequence[Topic], marks: Mapping[Topic, SourceMark]) -> None:
        self._inputs: dict[Topic, _Input[Item]] = {}
        for place, topic in enumerate(topics):
            mark = marks.get(topic, SourceMark())
            self._inputs[topic] = _Input(place, (mark.offset, mark.clock_us), mark.offset, mark.clock_us)

    @property
    def marks(self) -> dict[Topic, SourceMark]:
        """Position up to which each topic is decided."""
        return {topic: SourceMark(*source.decided) for topic, source in self._inputs.items()}

    def next_offset(self, topic: Topic) -> int:
        """Return the first offset of a topic that is not decided."""
        return self._inputs[topic].decided[0] + 1

    def clock_us(self, topic: Topic) -> int:
        """Return the clock of a topic, including the waiting records."""
        return self._inputs[topic].clock_us

    def wanted_us(self) -> int | None:
        """Return the clock that every topic must reach to decide the first waiting item; None if no item waits.

        Records without an item are ignored: they would request a tick, the tick would wait too, and so on endlessly.
        """
        waiting = (
            (at_us, source.place)
            for source in self._inputs.values()
            for at_us, _offset, item in islice((step for step in source.waiting if step[2] is not None), 1)
        )
        at_us, place = min(waiting, default=(None, 0))
        return at_us + MILLISECOND_US if at_us is not None and place else at_us

    def has_read(self, topic: Topic, offset: int) -> bool:
        """Whether a record was already added."""
        return offset <= self._inputs[topic].read_offset

    def read(self, topic: Topic, offset: int, timestamp_us: int, item: Item) -> None:
        """Add the next record of a topic."""
        source = self._inputs[topic]
        source.read_offset = offset
        if timestamp_us > source.clock_us:
            source.clock_us = timestamp_us
        source.waiting.append((source.clock_us, offset, item))

    def end(self, topic: Topic) -> None:
        """Mark a topic as ended: no further record will be added."""
        self._inputs[topic].clock_us = NEVER

    def take(self) -> Step[Item] | None:
        """Return the next record in the common order; None while an earlier record may still arrive."""
        source: _Input[Item] | None = None
        at_us = 0
        for candidate in self._inputs.values():
            # At equal times the earlier topic wins: the loop visits it first.
            if candidate.waiting and (source is None or candidate.waiting[0][0] < at_us):
                source, at_us = candidate, candidate.waiting[0][0]
        if source is None:
            return None
        for other in self._inputs.values():
            # The next record of a topic may have the same time as the previous one.
            if other.clock_us < at_us + (other.place < source.place):
                return None
        first = source.waiting.popleft()
        source.decided = first[1], at_us
        return first
