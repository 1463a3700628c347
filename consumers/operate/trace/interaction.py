"""The path of one interaction through the log, stage by stage, and one sentence on where it ends and why. A pure fold.

Every topic may be observed in any order relative to the others, each in its own order. Nothing but the log is asked, so
that a trace of a replayed or copied log says the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidemill.consumers.operate import copied
from tidemill.consumers.operate.trace.versions import Ended, TracedVersion, VersionHistory
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Feedback, Interaction, OnlineBatch, Outcome


@dataclass(frozen=True, slots=True)
class Served:
    place: Position
    repeats: list[Position]
    """Further records of the same interaction: they count once."""
    run_id: str
    branch: str
    user_id: str
    arm: str
    propensity: float
    consent: bool
    replica_id: str
    version_min: int
    version_max: int
    finish_reason: str
    served_at: int


@dataclass(frozen=True, slots=True)
class Event:
    place: Position
    event_id: str
    user_id: str
    kind: str
    value: float | None
    corrects: str | None
    source: str
    observed_at: int
    fate: str
    """How it ended, in words."""


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record about it that was refused."""

    place: Position
    """Where it lay before it was refused."""
    reason: str
    found_by: str


@dataclass(frozen=True, slots=True)
class End:
    """Its outcome: how it ended, or a correction of that."""

    place: Position
    revision: int
    reward: float | None
    previous_reward: float | None
    exclusion: str
    map_version: str
    signals: dict[str, float]
    """Contribution of each event to the reward."""
    closed_at: int


@dataclass(frozen=True, slots=True)
class InBatch:
    """An online batch that it is in."""

    place: Position
    batch_id: str
    sequence: int
    version: int
    reward: float
    correction: bool
    closed_by: str
    ended: Ended


@dataclass(frozen=True, slots=True)
class InteractionPath:
    interaction_id: str
    served: Served | None
    erased: Position | None
    """The tombstone that erased it."""
    feedback: list[Event]
    letters: list[RefusedRecord]
    outcomes: list[End]
    batches: list[InBatch]
    versions: list[TracedVersion]
    """Versions whose step trained on it."""
    end: str
    """Where the path ends, and why."""


def explain(
    served: Served | None,
    erased: Position | None,
    ends: Sequence[End],
    batches: Sequence[InBatch],
    versions: Sequence[TracedVersion],
    dropped: Sequence[tuple[Position, OnlineBatch]],
) -> str:
    """Where the path ends. The stages are those of a `InteractionPath`; `dropped` are the batches that count what was
    left out of all batches, by reason, without saying who it was."""
    if versions:
        made = versions[-1]
        trained = ", ".join(str(each.version) for each in versions)
        serving = {replica: version for each in versions for replica, version in each.served_by.items()}
        if made.manifest_place is None:
            return f"trained into version {trained}, which is not published yet"
        if serving:
            by = ", ".join(f"{replica} (version {version})" for replica, version in sorted(serving.items()))
            return f"trained into version {trained}, and served now by {by}"
        last = made.decisions[-1] if made.decisions else None
        why = "" if last is None else f": last decision {last.verdict} by {last.by}, {last.reason}"
        return f"trained into version {trained}, which no replica serves now{why}"
    if batches:
        newest = batches[-1]
        if newest.ended.reason:
            return f"left out by the trainer ({newest.ended.reason}), as {newest.ended.step} says"
        return f"waits for the trainer in batch {newest.batch_id}"
    if ends:
        end = ends[-1]
        if end.exclusion:
            return f"excluded: {end.exclusion}, as {end.place} says; it is in no batch"
        for place, batch in dropped:
            of_branch = served is None or (batch.run_id, batch.branch) == (served.run_id, served.branch)
            if of_branch and batch.closed_at >= end.closed_at:
                reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(batch.dropped.items()))
                return f"has a reward and is in no batch: {place} closed after it and counts as dropped: {reasons}"
        return "has a reward and waits for its online batch to be closed by tokens or by time"
    if erased is not None:
        return f"erased: a tombstone at {erased} ends it, and nothing trained on it"
    if served is None:
        return "the log holds no such interaction: never served, or past the log's retention"
    return "waits for its end: the join closes it when the longest horizon of its signals has passed in event time"


class InteractionTrace:
    def __init__(self, interaction_id: str) -> None:
        self._id = interaction_id
        self._served: Interaction | None = None
        self._places: list[Position] = []
        self._erased: Position | None = None
        self._feedback: dict[str, tuple[Position, Feedback]] = {}
        self._repeated: Counter[str] = Counter()
        self._letters: list[RefusedRecord] = []
        self._outcomes: list[tuple[Position, Outcome]] = []
        self._batches: list[tuple[Position, OnlineBatch]] = []
        self._dropped: list[tuple[Position, OnlineBatch]] = []

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to; None while none of its records was observed."""
        told = [self._served, *(end for _, end in self._outcomes), *(batch for _, batch in self._batches)]
        return next((record.run_id for record in told if record is not None), None)

    @property
    def found(self) -> bool:
        return bool(self._served or self._erased or self._feedback or self._outcomes or self._batches or self._letters)

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in; what is not about the interaction is let pass."""
        record = located.record
        if located.value is None:
            # What was erased is not told again, though the broker may not have removed its bytes yet.
            interaction_id, _, event_id = (located.key or b"").decode("utf-8", "replace").partition("/")
            if interaction_id != self._id:
                return
            if located.topic is Topic.INTERACTIONS:
                self._served, self._places, self._erased = None, [], located.position
            elif located.topic is Topic.OUTCOMES:
                self._outcomes = []
            elif located.topic is Topic.FEEDBACK:
                self._feedback.pop(event_id, None)
        elif isinstance(record, Interaction) and record.interaction_id == self._id:
            self._served = self._served or record
            self._places.append(located.position)
        elif isinstance(record, Feedback) and record.interaction_id == self._id:
            self._repeated[record.event_id] += record.event_id in self._feedback
            self._feedback.setdefault(record.event_id, (located.position, record))
        elif isinstance(record, Outcome) and record.interaction_id == self._id:
            if all(record.revision != known.revision for _, known in self._outcomes):
                self._outcomes.append((located.position, record))
        elif isinstance(record, OnlineBatch) and all(record.batch_id != known.batch_id for _, known in self._batches):
            if any(member.interaction_id == self._id for member in record.members):
                self._batches.append((located.position, record))
            elif record.dropped:
                self._dropped.append((located.position, replace(record, members=[])))

    def observe_letter(self, row: Row) -> None:
        """Take a dead letter in; its key says what it is about."""
        letter = row.record
        if isinstance(letter, DeadLetter) and row.key.split(b"/")[0] == self._id.encode():
            topic = letter.source_topic.rpartition(".")[2]
            place = Position(topic, letter.source_partition, letter.source_offset)
            self._letters.append(RefusedRecord(place, letter.reason, letter.found_by))

    def path(self, history: VersionHistory) -> InteractionPath:
        """Everything observed so far, with the versions of its run."""
        served = None
        if self._served is not None:
            served = copied(Served, self._served, place=self._places[0], repeats=self._places[1:])
        outcomes = sorted(self._outcomes, key=lambda one: one[1].revision)
        ends = [
            copied(End, end, place=place, signals={use.event_id: use.contribution for use in end.signals})
            for place, end in outcomes
        ]
        events = []
        for place, record in self._feedback.values():
            again = self._repeated[record.event_id]
            fate = self._use(record, place) + (f"; sent {1 + again} times, counted once" if again else "")
            events.append(copied(Event, record, place=place, fate=fate))
        batches = [
            copied(
                InBatch,
                batch,
                place=place,
                reward=member.reward,
                correction=member.correction,
                ended=history.ended(Topic.ONLINE_BATCHES, batch.batch_id, self._id),
            )
            for place, batch in self._batches
            for member in batch.members
            if member.interaction_id == self._id
        ]
        versions = sorted({one.ended.version for one in batches if one.ended.version is not None})
        made = [history.made(version) for version in versions]
        return InteractionPath(
            interaction_id=self._id,
            served=served,
            erased=self._erased,
            feedback=events,
            letters=self._letters,
            outcomes=ends,
            batches=batches,
            versions=made,
            end=explain(served, self._erased, ends, batches, made, self._dropped),
        )

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
