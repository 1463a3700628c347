"""Follows one interaction through the log: a pure fold, and the path that it makes.

Every topic may be observed in any order relative to the others, each in its own order. Nothing but the log is asked, so
that a trace of a replayed or copied log says the same.
"""

from __future__ import annotations

from collections import Counter

from tidemill.consumers.operate.trace.path import (
    Dropped,
    Event,
    InBatch,
    InteractionPath,
    RefusedRecord,
    end_of,
    explain,
    member_of,
    served_of,
)
from tidemill.consumers.operate.trace.versions import VersionHistory, ended_in_batch
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Feedback, Interaction, OnlineBatch, Outcome


class InteractionTrace:
    """What the log says of one interaction.

    Args:
        history: the versions of its run; observed by the reader of the model's topics.
    """

    def __init__(self, interaction_id: str, history: VersionHistory | None = None) -> None:
        self._id = interaction_id
        self.history = history
        self._served: Interaction | None = None
        self._places: list[Position] = []
        self._erased: Position | None = None
        self._feedback: dict[str, tuple[Position, Feedback]] = {}
        self._repeated: Counter[str] = Counter()
        self._letters: list[RefusedRecord] = []
        self._outcomes: list[tuple[Position, Outcome]] = []
        self._batches: list[tuple[Position, OnlineBatch]] = []
        self._dropped: list[Dropped] = []

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to; None while none of its records was observed."""
        told = [self._served, *(end for _, end in self._outcomes), *(batch for _, batch in self._batches)]
        return next((record.run_id for record in told if record is not None), None)

    @property
    def found(self) -> bool:
        """Whether the log has a record of it."""
        return bool(self._served or self._erased or self._feedback or self._outcomes or self._batches or self._letters)

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in; what is not about the interaction is let pass."""
        record = located.record
        if located.value is None:
            self._take_tombstone(located)
        elif isinstance(record, Interaction) and record.interaction_id == self._id:
            self._served = self._served or record
            self._places.append(located.position)
        elif isinstance(record, Feedback) and record.interaction_id == self._id:
            self._repeated[record.event_id] += record.event_id in self._feedback
            self._feedback.setdefault(record.event_id, (located.position, record))
        elif isinstance(record, Outcome) and record.interaction_id == self._id:
            if all(record.revision != known.revision for _, known in self._outcomes):
                self._outcomes.append((located.position, record))
        elif isinstance(record, OnlineBatch):
            self._take_batch(record, located.position)

    def observe_letter(self, row: Row) -> None:
        """Take a dead letter in; its key says what it is about."""
        letter = row.record
        if isinstance(letter, DeadLetter) and row.key.split(b"/")[0] == self._id.encode():
            topic = letter.source_topic.rpartition(".")[2]
            place = Position(topic, letter.source_partition, letter.source_offset)
            self._letters.append(RefusedRecord(place, letter.reason, letter.found_by))

    def path(self) -> InteractionPath:
        """Everything observed so far."""
        history = self.history or VersionHistory(self.run_id or "")
        ends = [end_of(record, place) for place, record in sorted(self._outcomes, key=lambda one: one[1].revision)]
        batches = self._in_batches(history)
        versions = sorted({one.ended.version for one in batches if one.ended.version is not None})
        served = served_of(self._served, self._places) if self._served else None
        made = [history.made(version) for version in versions]
        return InteractionPath(
            interaction_id=self._id,
            served=served,
            erased=self._erased,
            feedback=self._events(),
            letters=self._letters,
            outcomes=ends,
            batches=batches,
            versions=made,
            end=explain(served, self._erased, ends, batches, made, self._dropped),
        )

    def _take_tombstone(self, located: ConsumedRecord) -> None:
        """What was erased is not told again, though the broker may not have removed its bytes yet."""
        key = (located.key or b"").decode("utf-8", "replace")
        interaction_id, _, event_id = key.partition("/")
        if interaction_id != self._id:
            return
        if located.topic is Topic.INTERACTIONS:
            self._served, self._places, self._erased = None, [], located.position
        elif located.topic is Topic.OUTCOMES:
            self._outcomes = []
        elif located.topic is Topic.FEEDBACK:
            self._feedback.pop(event_id, None)

    def _take_batch(self, batch: OnlineBatch, place: Position) -> None:
        if any(batch.batch_id == known.batch_id for _, known in self._batches):
            return
        if member_of(batch.members, self._id):
            self._batches.append((place, batch))
        elif batch.dropped:
            self._dropped.append(Dropped(place, batch.run_id, batch.branch, batch.closed_at, batch.dropped))

    def _in_batches(self, history: VersionHistory) -> list[InBatch]:
        return [
            InBatch(
                place=place,
                batch_id=batch.batch_id,
                sequence=batch.sequence,
                version=batch.version,
                reward=member.reward,
                correction=member.correction,
                closed_by=batch.closed_by.value,
                ended=ended_in_batch(history, batch.batch_id, self._id),
            )
            for place, batch in self._batches
            for member in member_of(batch.members, self._id)
        ]

    def _events(self) -> list[Event]:
        return [
            Event(
                place=place,
                event_id=record.event_id,
                user_id=record.user_id,
                kind=record.kind.value,
                value=record.value,
                corrects=record.corrects,
                source=record.source,
                observed_at=record.observed_at,
                fate=self._use(record, place) + (f"; sent {1 + again} times, counted once" if again else ""),
            )
            for place, record in self._feedback.values()
            for again in (self._repeated[record.event_id],)
        ]

    def _use(self, record: Feedback, place: Position) -> str:
        if any(letter.place == place for letter in self._letters):
            return "refused: see the dead letters"
        for _, end in sorted(self._outcomes, key=lambda one: one[1].revision):
            for use in end.signals:
                if use.event_id == record.event_id:
                    revision = f" of revision {end.revision}" if end.revision else ""
                    return f"counted {use.contribution:+g} in the reward{revision}"
        replaced = [other.event_id for _, other in self._feedback.values() if other.corrects == record.event_id]
        if replaced:
            return f"replaced by {replaced[-1]}"
        if self._served is not None and record.user_id != self._served.user_id:
            return "not counted: given by another user than the one who was served"
        return self._not_counted(record)

    def _not_counted(self, record: Feedback) -> str:
        if not self._outcomes:
            return "waits for the interaction's end"
        newest = max((end for _, end in self._outcomes), key=lambda end: end.revision)
        if newest.exclusion and newest.exclusion != "no_signal":
            return f"not counted: the interaction is excluded ({newest.exclusion})"
        if record.corrects is not None and record.value is None:
            return f"withdrew {record.corrects}"
        if record.kind.value in newest.observed:
            return "seen; the map gives its kind no weight, or another event of the kind holds"
        if record.observed_at > newest.closed_at:
            return "not counted: it came after the interaction's end"
        return "not counted: outside its horizon, or no kind that the map knows"
