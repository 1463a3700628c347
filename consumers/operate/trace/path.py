"""The path of one interaction through the log, stage by stage, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.reading import RecordPlace
from tidemill.consumers.operate.trace.history import Made
from tidemill.consumers.operate.trace.trained import Ended
from tidemill.schemas.records import Interaction, OnlineMember, Outcome


@dataclass(frozen=True, slots=True)
class Served:
    """The answer."""

    place: RecordPlace
    repeats: list[RecordPlace]
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

    place: RecordPlace
    event_id: str
    user_id: str
    kind: str
    value: float | None
    corrects: str | None
    source: str
    observed_at: int
    fate: str
    """What became of it, in words."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A record about it that was refused."""

    place: RecordPlace
    """Where it lay before it was refused."""
    reason: str
    found_by: str


@dataclass(frozen=True, slots=True)
class End:
    """An outcome of it: how it ended, or a correction of that."""

    place: RecordPlace
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

    place: RecordPlace
    batch_id: str
    sequence: int
    version: int
    reward: float
    correction: bool
    closed_by: str
    ended: Ended


@dataclass(frozen=True, slots=True)
class Path:
    """Everything that the log says of one interaction."""

    interaction_id: str
    served: Served | None
    erased: RecordPlace | None
    """The tombstone that erased it."""
    feedback: list[Event]
    letters: list[Letter]
    outcomes: list[End]
    batches: list[InBatch]
    versions: list[Made]
    """Versions whose step trained on it."""
    end: str
    """Where the path ends, and why."""


def served_of(record: Interaction, places: list[RecordPlace]) -> Served:
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


def end_of(record: Outcome, place: RecordPlace) -> End:
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
    """The members of a batch that are this interaction: its end, and corrections of it."""
    return [member for member in members if member.interaction_id == interaction_id]
