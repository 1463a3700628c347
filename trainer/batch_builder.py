"""Which groups a step trains on, and what becomes of the others: a pure state machine over the `groups` topic.

What it keeps true:

- every group of this run ends exactly once: trained in one step, or excluded in one step with a reason;
- groups of other runs are left alone: their own trainer ends them;
- a batch holds the oldest groups waiting, none of them staler than the bound at the moment it is closed;
- `progress()` after a batch was closed says where to go on reading, so that nothing is trained twice or skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidemill.schemas.records import CloseReason, Group, Mode, StepExclusion, StepInput, TrainStep
from tidemill.trainer.groups import TrainableGroup, completed, has_signal


class Exclusion(StrEnum):
    """Why a group is not trained."""

    EVAL = "eval"
    LATE = "late"
    DUPLICATE = "duplicate"
    TOO_FEW = "too_few"
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    MISSING_ROLLOUT = "missing_rollout"
    INVALID_ROLLOUT = "invalid_rollout"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decide."""

    run_id: str
    groups_per_step: int
    max_policy_lag: int
    min_completed: int
    skip_no_signal: bool
    remembered_groups: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one step, and the groups that ended untrained since the step before."""

    groups: list[TrainableGroup]
    exclusions: list[StepExclusion]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the `groups` topic is used up; what a checkpoint keeps of the builder."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    """By partition: every group before this offset has ended or is not this run's."""
    ended_above: Mapping[int, list[int]] = field(default_factory=dict)
    """By partition: offsets at or above `next_offsets` of groups that have ended."""
    remembered: list[str] = field(default_factory=list)
    """Ids of groups that have ended, oldest first."""


class BatchBuilder:
    """Takes groups in the order they are read, gives batches."""

    def __init__(self, rules: Rules, progress: Progress | None = None) -> None:
        progress = progress or Progress()
        self._rules = rules
        self._read = dict(progress.next_offsets)
        self._ended = {partition: set(offsets) for partition, offsets in progress.ended_above.items()}
        self._remembered = OrderedDict.fromkeys(progress.remembered)
        self._waiting: list[TrainableGroup] = []
        self._excluded: list[StepExclusion] = []

    @property
    def waiting(self) -> int:
        """Groups that could be trained now."""
        return len(self._waiting)

    def observe_step(self, step: TrainStep) -> None:
        """Take over the decisions of a recorded step: its inputs and exclusions have ended."""
        entries: list[StepInput | StepExclusion] = [*step.inputs, *step.exclusions]
        for entry in entries:
            self._ended.setdefault(entry.partition, set()).add(entry.offset)
        self._remember(entry.group_id for entry in step.inputs)
        self._remember(entry.group_id for entry in step.exclusions if entry.reason != Exclusion.LATE)

    def wants(self, place: StepInput, group: Group, version: int) -> bool:
        """Read one group at trainer version `version`: True when `accept` or `exclude` has to follow.

        A group that is not trainable is excluded here; one that ended before, or is of another run, is passed over.
        """
        self._read[place.partition] = max(self._read.get(place.partition, 0), place.offset + 1)
        if group.run_id != self._rules.run_id or place.offset in self._ended.get(place.partition, ()):
            return False
        reason = self._reason(group, version)
        if reason is not None:
            self.exclude(place, group, reason)
        return reason is None

    def accept(self, candidate: TrainableGroup) -> None:
        """Queue a wanted group with its rollouts."""
        self._waiting.append(candidate)

    def exclude(self, place: StepInput, group: Group, reason: Exclusion) -> None:
        """End a group untrained."""
        self._excluded.append(
            StepExclusion(
                group_id=place.group_id,
                topic=place.topic,
                partition=place.partition,
                offset=place.offset,
                reason=reason.value,
                rollouts=len(group.members),
            )
        )
        self._end(place, remember=reason is not Exclusion.LATE)

    def close(self, version: int) -> Batch | None:
        """The next batch at trainer version `version`, or None while too few groups wait. Stale ones are excluded."""
        self._sweep_stale(version)
        size = self._rules.groups_per_step
        if len(self._waiting) < size:
            return None
        self._waiting.sort(key=_age)
        chosen, self._waiting = self._waiting[:size], self._waiting[size:]
        for candidate in chosen:
            self._end(candidate.place, remember=True)
        exclusions, self._excluded = self._excluded, []
        return Batch(chosen, exclusions)

    def progress(self) -> Progress:
        """Where to go on, as of the batch closed last: exclusions since then are decided again."""
        undecided = [c.place for c in self._waiting] + [
            StepInput(e.group_id, e.topic, e.partition, e.offset) for e in self._excluded
        ]
        following = dict(self._read)
        for place in undecided:
            following[place.partition] = min(following[place.partition], place.offset)
        again = {(place.partition, place.offset) for place in undecided}
        forgotten = {place.group_id for place in undecided}
        return Progress(
            next_offsets=following,
            ended_above={p: _kept(p, offsets, following.get(p, 0), again) for p, offsets in self._ended.items()},
            remembered=[group_id for group_id in self._remembered if group_id not in forgotten],
        )

    def _reason(self, group: Group, version: int) -> Exclusion | None:
        checks = (
            (Exclusion.LATE, group.closed_by is CloseReason.LATE),
            (Exclusion.DUPLICATE, self._is_known(group.group_id)),
            (Exclusion.EVAL, group.mode is Mode.EVAL),
            (Exclusion.TOO_FEW, len(completed(group)) < self._rules.min_completed),
            (Exclusion.NO_SIGNAL, self._rules.skip_no_signal and not has_signal(group)),
            (Exclusion.STALE, self._is_stale(group, version)),
        )
        return next((reason for reason, applies in checks if applies), None)

    def _is_known(self, group_id: str) -> bool:
        return group_id in self._remembered or any(c.group.group_id == group_id for c in self._waiting)

    def _is_stale(self, group: Group, version: int) -> bool:
        oldest = min((member.version_min for member in completed(group)), default=version)
        return version - oldest > self._rules.max_policy_lag

    def _sweep_stale(self, version: int) -> None:
        stale = [c for c in self._waiting if self._is_stale(c.group, version)]
        self._waiting = [c for c in self._waiting if not self._is_stale(c.group, version)]
        for candidate in stale:
            self.exclude(candidate.place, candidate.group, Exclusion.STALE)

    def _end(self, place: StepInput, *, remember: bool) -> None:
        self._ended.setdefault(place.partition, set()).add(place.offset)
        if remember:
            self._remember([place.group_id])

    def _remember(self, group_ids: Iterable[str]) -> None:
        self._remembered.update((group_id, None) for group_id in group_ids)
        while len(self._remembered) > self._rules.remembered_groups:
            self._remembered.popitem(last=False)


def _age(candidate: TrainableGroup) -> tuple[int, int, int]:
    return candidate.group.closed_at, candidate.place.partition, candidate.place.offset


def _kept(partition: int, offsets: Iterable[int], following: int, again: set[tuple[int, int]]) -> list[int]:
    return sorted(offset for offset in offsets if offset >= following and (partition, offset) not in again)
