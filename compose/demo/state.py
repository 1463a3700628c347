"""What the demonstration knows of the loop: a pure fold over the records of the log.

Every number that the screen and the summary show comes from here, and so from the log; nothing is asked of a process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.schemas.clock import to_s
from tidemill.schemas.records import (
    AckStatus,
    CloseReason,
    Group,
    GroupMember,
    Manifest,
    Mode,
    Record,
    RolloutStatus,
    Task,
    TrainStep,
    WeightAck,
)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Success on held-out tasks that were issued under one version."""

    version: int
    successes: int
    rollouts: int
    tasks: int

    @property
    def rate(self) -> float:
        """Share of the completed rollouts that solved their task."""
        return self.successes / self.rollouts if self.rollouts else 0.0


@dataclass(slots=True)
class LoopState:
    """The loop as its log tells it, for one run."""

    run_id: str
    steps: dict[int, TrainStep] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    last_ack: dict[str, WeightAck] = field(default_factory=dict)
    served: dict[tuple[str, int], WeightAck] = field(default_factory=dict)
    """First proof of each version by each replica."""
    environments: dict[str, int] = field(default_factory=dict)
    """Tasks issued, by environment."""
    first_task_at: int = 0
    """When the first training task was issued, in microseconds since the epoch."""
    refusals: int = 0
    late: int = 0
    _issued: set[str] = field(default_factory=set)
    _eval_version: dict[str, int] = field(default_factory=dict)

    def observe(self, record: Record) -> None:
        """Take one record of the log; records of other runs and duplicates change nothing."""
        if getattr(record, "run_id", None) != self.run_id:
            return
        match record:
            case Task():
                self._issued.add(record.group_id)
                self.environments[record.environment] = self.environments.get(record.environment, 0) + 1
                if record.mode is Mode.EVAL:
                    self._eval_version[record.group_id] = record.issued_version
                elif not self.first_task_at or record.issued_at < self.first_task_at:
                    self.first_task_at = record.issued_at
            case Group(closed_by=CloseReason.LATE):
                self.late += 1
            case Group():
                self.groups.setdefault(record.group_id, record)
            case Manifest():
                self.manifests.setdefault(record.version, record)
            case TrainStep():
                self.steps.setdefault(record.step, record)
            case WeightAck():
                self.last_ack[record.replica_id] = record
                if record.status is AckStatus.REFUSED:
                    self.refusals += 1
                else:
                    self.served.setdefault((record.replica_id, record.version), record)
            case _:
                pass

    @property
    def version(self) -> int:
        """Newest committed version; -1 before the first."""
        return max(self.manifests, default=-1)

    @property
    def open_groups(self) -> int:
        """Groups that were asked for and are not closed."""
        return len(self._issued - self.groups.keys())

    def train_groups(self) -> list[Group]:
        """Groups assembled for training."""
        return [group for group in self.groups.values() if group.mode is Mode.TRAIN]

    def held_out(self) -> list[HeldOut]:
        """Held-out success by the version under which the tasks were issued, oldest first."""
        by_version: dict[int, list[Group]] = defaultdict(list)
        for group in self.groups.values():
            if group.mode is Mode.EVAL and group.group_id in self._eval_version:
                by_version[self._eval_version[group.group_id]].append(group)
        return [_held_out(version, groups) for version, groups in sorted(by_version.items())]

    def lag(self) -> Counter[int]:
        """Trained tokens by policy lag."""
        total: Counter[int] = Counter()
        for step in self.steps.values():
            for count in step.lag:
                total[count.lag] += count.tokens
        return total

    def trained_members(self) -> list[GroupMember]:
        """Every rollout that a step trained on."""
        trained = [self.groups[i.group_id] for s in self.steps.values() for i in s.inputs if i.group_id in self.groups]
        return [member for group in trained for member in group.members if member.advantage is not None]

    def taken_before(self, version: int) -> int:
        """Completed training rollouts that the steps up to a version took in."""
        return self._taken([step for step in self.steps.values() if step.version <= version])

    def rollouts_per_s(self) -> float:
        """Completed training rollouts of the groups that the steps took in, by the seconds from the first training task
        to the end of the last step; those without a signal count, since they were sampled, scored and judged too."""
        seconds = to_s(max((s.finished_at for s in self.steps.values()), default=0) - self.first_task_at)
        return self._taken(self.steps.values()) / seconds if self.first_task_at and seconds > 0 else 0.0

    def _taken(self, steps: Iterable[TrainStep]) -> int:
        taken: set[str] = set()
        for step in steps:
            taken |= {place.group_id for place in step.inputs} | {place.group_id for place in step.exclusions}
        groups = [self.groups[group_id] for group_id in taken if group_id in self.groups]
        return sum(member.status is RolloutStatus.COMPLETED for group in groups for member in group.members)

    def spanning(self) -> int:
        """Trained rollouts whose tokens were sampled under more than one version."""
        return sum(member.version_min != member.version_max for member in self.trained_members())

    def updates(self) -> list[WeightAck]:
        """Proved in-place updates, one a replica and version; joining from an anchor is none."""
        return [ack for ack in self.served.values() if ack.status is AckStatus.PROVED and ack.pause_ms > 0]

    def fingerprints_equal(self) -> bool:
        """Whether every proof equals its version's manifest and every replica serves the newest version."""
        proofs = [ack for ack in self.served.values() if ack.version in self.manifests]
        matches = all(ack.fingerprint == self.manifests[ack.version].fingerprint for ack in proofs)
        newest = all(ack.serving_version == self.version for ack in self.last_ack.values())
        return bool(proofs) and matches and newest

    def mean_reward(self, step: TrainStep) -> float:
        """Mean reward of the rollouts of a step."""
        groups = [self.groups[i.group_id] for i in step.inputs if i.group_id in self.groups]
        rewards = [m.reward for g in groups for m in g.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0


def _held_out(version: int, groups: list[Group]) -> HeldOut:
    finished = [member for group in groups for member in group.members if member.success is not None]
    return HeldOut(version, sum(bool(m.success) for m in finished), len(finished), len(groups))
