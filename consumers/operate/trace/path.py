"""The path of one interaction through the log, stage by stage, and one sentence on where it ends and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.consumers.operate.trace.versions import Ended, TracedVersion
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import Interaction, OnlineMember, Outcome


@dataclass(frozen=True, slots=True)
class Served:
    """The answer."""

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
    """One signal about it."""

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
    """Everything that the log says of one interaction."""

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


def served_of(record: Interaction, places: list[Position]) -> Served:
    """The answer as a stage."""
    return Served(
        place=places[0],
        repeats=places[1:],
        run_id=record.run_id,
        branch=record.branch,
        user_id=record.user_id,
        arm=record.arm,
        propensity=record.propensity,
        consent=record.consent,
        replica_id=record.replica_id,
        version_min=record.version_min,
        version_max=record.version_max,
        finish_reason=record.finish_reason,
        served_at=record.served_at,
    )


def end_of(record: Outcome, place: Position) -> End:
    """An outcome as a stage."""
    return End(
        place=place,
        revision=record.revision,
        reward=record.reward,
        previous_reward=record.previous_reward,
        exclusion=record.exclusion,
        map_version=record.map_version,
        signals={use.event_id: use.contribution for use in record.signals},
        closed_at=record.closed_at,
    )


def member_of(members: list[OnlineMember], interaction_id: str) -> list[OnlineMember]:
    """The members of a batch that are this interaction: its end, and the corrections."""
    return [member for member in members if member.interaction_id == interaction_id]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a batch says was left out of all batches, by reason. Who it was, it does not say."""

    place: Position
    run_id: str
    branch: str
    closed_at: int
    counts: dict[str, int]


def explain(
    served: Served | None,
    erased: Position | None,
    ends: Sequence[End],
    batches: Sequence[InBatch],
    versions: Sequence[TracedVersion],
    dropped: Sequence[Dropped],
) -> str:
    """Where the path ends. The stages are those of a `InteractionPath`."""
    if versions:
        return _in_weights(versions)
    if batches:
        newest = batches[-1]
        if newest.ended.reason:
            return f"left out by the trainer ({newest.ended.reason}), as {newest.ended.step} says"
        return f"waits for the trainer in batch {newest.batch_id}"
    if ends:
        return _at_end(ends, served, dropped)
    if erased is not None:
        return f"erased: a tombstone at {erased} ends it, and nothing trained on it"
    if served is None:
        return "the log holds no such interaction: never served, or past the log's retention"
    return "waits for its end: the join closes it when the longest horizon of its signals has passed in event time"


def _in_weights(versions: Sequence[TracedVersion]) -> str:
    newest = versions[-1]
    trained = ", ".join(str(made.version) for made in versions)
    if newest.manifest_place is None:
        return f"trained into version {trained}, which is not published yet"
    serving = {replica: version for made in versions for replica, version in made.served_by.items()}
    if serving:
        served = ", ".join(f"{replica} (version {version})" for replica, version in sorted(serving.items()))
        return f"trained into version {trained}, and served now by {served}"
    last = newest.decisions[-1] if newest.decisions else None
    why = "" if last is None else f": last decision {last.verdict} by {last.by}, {last.reason}"
    return f"trained into version {trained}, which no replica serves now{why}"


def _at_end(ends: Sequence[End], served: Served | None, dropped: Sequence[Dropped]) -> str:
    newest = ends[-1]
    if newest.exclusion:
        return f"excluded: {newest.exclusion}, as {newest.place} says; it is in no batch"
    later = [one for one in dropped if served is None or (one.run_id, one.branch) == (served.run_id, served.branch)]
    suspects = [one for one in later if one.closed_at >= newest.closed_at]
    if suspects:
        first = suspects[0]
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(first.counts.items()))
        return f"has a reward and is in no batch: {first.place} closed after it and counts as dropped: {reasons}"
    return "has a reward and waits for its online batch to be closed by tokens or by time"
