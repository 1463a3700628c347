"""The records of one topic that have ended: every record ends exactly once, across stops.

A record has ended when a step trained it or excluded it. Records are told apart by their place; those that say the same
again are known by their id. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.schemas.records import StepExclusion, StepInput, StepPlan, TrainStep

DecidedStep = TrainStep | StepPlan
"""A step whose inputs and exclusions are decided, taken or not."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """How far a topic is used up; kept in the checkpoint."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    """By partition: every record before this offset has ended or is not this run's."""
    ended_above: Mapping[int, list[int]] = field(default_factory=dict)
    """By partition: offsets at or above `next_offsets` of records that have ended."""
    remembered: list[str] = field(default_factory=list)
    """Ids of records that have ended, oldest first."""


class Endings:
    """The ended records of one topic; at most `limit` of their ids are remembered from step to step."""

    def __init__(self, progress: TopicProgress, limit: int) -> None:
        self._limit = limit
        self._read = dict(progress.next_offsets)
        self._ended = {partition: set(offsets) for partition, offsets in progress.ended_above.items()}
        self._remembered = OrderedDict.fromkeys(progress.remembered)

    def read(self, place: StepInput) -> bool:
        """Note that a record was read: True when it has not ended."""
        self._read[place.partition] = max(self._read.get(place.partition, 0), place.offset + 1)
        return place.offset not in self._ended.get(place.partition, ())

    def next_offset(self, partition: int) -> int:
        """The offset after the last one read of a partition."""
        return self._read.get(partition, 0)

    def end(self, place: StepInput, *, remember: bool) -> None:
        """A record ends; `remember` its id, so that one that says the same is known, if only until `settle`."""
        self._ended.setdefault(place.partition, set()).add(place.offset)
        if remember:
            self._remembered[place.group_id] = None
            # The last said counts, so that steps read again from the log leave the same ids behind.
            self._remembered.move_to_end(place.group_id)

    def settle(self) -> None:
        """All endings of a step are in: forget the oldest ids beyond the limit."""
        while len(self._remembered) > self._limit:
            self._remembered.popitem(last=False)

    def remembers(self, record_id: str) -> bool:
        """Whether a record of this id has ended."""
        return record_id in self._remembered

    def progress(self, undecided: Sequence[StepInput], second: Collection[StepInput] = ()) -> TopicProgress:
        """Where to go on, when the records at `undecided` and `second` are to be decided again.

        Those at `second` only said again what another record had said: their ids stay remembered.
        """
        following = dict(self._read)
        open_places = [*undecided, *second]
        for place in open_places:
            following[place.partition] = min(following[place.partition], place.offset)
        again = {(place.partition, place.offset) for place in open_places}
        forgotten = {place.group_id for place in undecided}
        return TopicProgress(
            next_offsets=following,
            ended_above={p: _kept(p, offsets, following.get(p, 0), again) for p, offsets in self._ended.items()},
            remembered=[record_id for record_id in self._remembered if record_id not in forgotten],
        )


def place_of_exclusion(exclusion: StepExclusion) -> StepInput:
    """Where the excluded record lies."""
    return StepInput(exclusion.group_id, exclusion.topic, exclusion.partition, exclusion.offset)


def _kept(partition: int, offsets: Iterable[int], following: int, again: set[tuple[int, int]]) -> list[int]:
    return sorted(offset for offset in offsets if offset >= following and (partition, offset) not in again)
