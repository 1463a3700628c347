"""Follows one simulated rollout: to its group, the step that trained on it, and the version that it made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.trace.versions import Ended, TracedVersion, VersionHistory, ended
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Group, Rollout, RolloutStatus


@dataclass(frozen=True, slots=True)
class InGroup:
    """A group that it is in."""

    place: Position
    group_id: str
    closed_by: str
    reward: float | None
    advantage: float | None
    ended: Ended


@dataclass(frozen=True, slots=True)
class RolloutPath:
    """Everything that the log says of one rollout."""

    rollout_id: str
    place: Position
    run_id: str
    task_id: str
    mode: str
    status: str
    failure: str
    replica_id: str
    version_min: int
    version_max: int
    reward: float | None
    groups: list[InGroup]
    versions: list[TracedVersion]
    end: str
    """Where the path ends, and why."""


class RolloutTrace:
    """What the log says of one rollout."""

    def __init__(self, rollout_id: str) -> None:
        self._id = rollout_id
        self._rollout: tuple[Position, Rollout] | None = None
        self._groups: list[tuple[Position, Group]] = []

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to; None while it was not observed."""
        return self._rollout[1].run_id if self._rollout else None

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in; what is not about the rollout is let pass."""
        record = located.record
        if isinstance(record, Rollout) and record.rollout_id == self._id and self._rollout is None:
            self._rollout = (located.position, record)
        elif isinstance(record, Group) and any(member.rollout_id == self._id for member in record.members):
            self._groups.append((located.position, record))

    def path(self, history: VersionHistory) -> RolloutPath:
        """Everything observed so far. Raises LookupError while the rollout was not."""
        if self._rollout is None:
            raise LookupError(f"the log holds no rollout {self._id}")
        place, rollout = self._rollout
        groups = [self._in_group(where, group, history) for where, group in self._groups]
        versions = sorted({one.ended.version for one in groups if one.ended.version is not None})
        return RolloutPath(
            rollout_id=self._id,
            place=place,
            run_id=rollout.run_id,
            task_id=rollout.task_id,
            mode=rollout.mode.value,
            status=rollout.status.value,
            failure=rollout.failure,
            replica_id=rollout.replica_id,
            version_min=rollout.version_min,
            version_max=rollout.version_max,
            reward=rollout.reward,
            groups=groups,
            versions=[history.made(version) for version in versions],
            end=_explain(rollout, groups, versions),
        )

    def _in_group(self, place: Position, group: Group, history: VersionHistory) -> InGroup:
        member = next(member for member in group.members if member.rollout_id == self._id)
        return InGroup(
            place=place,
            group_id=group.group_id,
            closed_by=group.closed_by.value,
            reward=member.reward,
            advantage=member.advantage,
            ended=ended(history, Topic.GROUPS, group.group_id),
        )


def _explain(rollout: Rollout, groups: list[InGroup], versions: list[int]) -> str:
    if versions:
        failed = " (it failed: its group was trained without it)" if rollout.status is RolloutStatus.FAILED else ""
        return f"its group was trained into version {', '.join(map(str, versions))}{failed}"
    if not groups:
        return "waits for its group to close"
    reasons = [one.ended.reason for one in groups if one.ended.reason]
    return f"left out by the trainer: {reasons[-1]}" if reasons else "waits for the trainer"
