"""Which groups a step trains on, and what becomes of the others: a pure state machine over the `groups` topic.

What it keeps true:

- every group of this run ends exactly once: trained in one step, or excluded in one step with a reason;
- no group trains that was sampled under a version which the trainer went back from;
- groups of other runs are left alone: their own trainer ends them;
- no group trains whose policy lag is undefined: sampled under another incarnation's versions, or under one that is yet
  to be made; none that a replay wrote, unless it was told of the replay;
- no group trains that was sampled from another distribution than the model's own, unless it was told to;
- a batch holds the oldest groups waiting, none of them staler than the bound at the moment it is closed;
- no more groups wait than `full` allows: the caller reads no further then;
- no batch has more exclusions than a record can name: those that are left over go with the next one;
- `in_order`, a batch is a function of the groups before it alone: each group is decided at the version that all full
  batches before it lead to, whenever it is read, and read again. (The reason of an exclusion that is left over and
  decided again can be another one, if the id that it repeats was forgotten since: `trainer.remembered_groups`);
- `progress()` after a batch was closed says where to go on reading, so that nothing is trained twice or skipped.

A trainer that is started over a copy of another run's topics may set every group aside and wait for ever. It is told
so, once and then rarely, only while these groups would have filled the batch that does not come.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import CloseReason, Exclusion, Group, Mode, StepExclusion, StepInput
from tidemill.trainer.advantages import GroupTooSmallError
from tidemill.trainer.choices import AdvantageKind
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.objectives import OBJECTIVES
from tidemill.trainer.trainable import (
    MOST_EXCLUSIONS,
    InputQueue,
    Reference,
    TopicProgress,
    TrainableBatch,
    TrainableGroup,
    completed,
    has_signal,
    lag_of,
    other_sampling,
)

NAMED = 3
"""Incarnations that a warning names, those of most groups first."""


@dataclass(slots=True)
class ExclusionCounts:
    """Groups since the last batch that were set aside, by why."""

    of_others: int = 0
    incarnations: Counter[str] = field(default_factory=Counter)
    """Groups by the foreign incarnation that they were sampled under."""
    ahead: int = 0
    newest: int = -1
    """The newest version that a group was sampled under and that is yet to be made."""
    otherwise: Counter[str] = field(default_factory=Counter)
    """Groups of another distribution than the model's own, by how they were sampled."""

    @property
    def groups(self) -> int:
        return self.of_others + self.ahead + self.otherwise.total()

    def told(self, own: str | None, version: int) -> str:
        """How many, why, and what to do, for a trainer of incarnation `own` at `version`."""
        reasons = []
        if self.of_others:
            named = ", ".join(name for name, _ in self.incarnations.most_common(NAMED))
            reasons.append(
                f"{self.of_others} sampled under versions of another incarnation ({named}; this trainer's is "
                f"{own or 'unnamed'}): to train on a copy of another run's topics, begin a fresh chain with "
                "trainer.publish.incarnation set to theirs; else let the replicas follow this trainer's versions"
            )
        if self.ahead:
            reasons.append(
                f"{self.ahead} sampled under versions up to {self.newest}, and this trainer is at {version}: to make "
                "a run again from its groups, set trainer.in_order; else let the replicas follow this trainer's "
                "versions"
            )
        causes = [f"their policy lag is undefined: {'; and '.join(reasons)}"] if reasons else []
        if self.otherwise:
            how = " or ".join(name for name, _ in self.otherwise.most_common(NAMED))
            causes.append(
                f"{self.otherwise.total()} were sampled with {how} and cannot be trained exactly, as replicas report "
                "the logprobs of the model's own distribution: set rollout.temperature to 1, or "
                "trainer.accept_other_sampling to train them all the same"
            )
        return f"{self.groups} groups were set aside, since {'; and '.join(causes)}"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step, and what ended untrained since the step before."""

    groups: list[TrainableGroup]
    exclusions: list[StepExclusion]
    online: TrainableBatch | None = None
    """What users made of the model's answers; None in a step on simulated groups alone."""


class BatchBuilder(InputQueue[TrainableGroup]):
    """The builder of batches from groups, which it gets in the order in which they are read.

    Args:
        incarnation: of the run's versions; None where versions of different incarnations are not told apart.

    Raises GroupTooSmallError as `advantage_of`.
    """

    def __init__(
        self,
        run: RunSettings,
        settings: TrainerSettings,
        progress: TopicProgress | None = None,
        incarnation: str | None = None,
    ) -> None:
        super().__init__(Topic.GROUPS, progress, settings.remembered_groups, settings.accept_replays)
        self._run, self._settings, self._incarnation = run, settings, incarnation
        self._advantage = advantage_of(run, settings)
        self._abandoned: frozenset[int] = frozenset()
        self._set_aside = ExclusionCounts()

    def missed(self, version: int) -> str:
        """Which groups were set aside that the next batch lacks, why, and what to do; empty while it would not be full
        with them either."""
        size, aside = self._run.groups_per_step, self._set_aside
        lacking = aside.groups and len(self._waiting) < size <= len(self._waiting) + aside.groups
        return aside.told(self._incarnation, version) if lacking else ""

    @property
    def waiting(self) -> int:
        """Groups that could be trained now."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no group is to be read until a batch is closed."""
        most = self._run.groups_per_step
        if not self._settings.in_order:
            joining = self._settings.online.simulated_groups_per_batch
            most = max(self._settings.max_waiting_batches * most, joining)
        return len(self._waiting) >= most

    def abandon(self, versions: Collection[int]) -> None:
        """Train on no group from now on that was sampled under one of `versions`."""
        self._abandoned = frozenset(versions)

    def wants(self, read: Reference[Group], version: int) -> bool:
        """Take in one group at trainer version `version`: True when `accept` or `exclude` has to follow.

        A group that is not trainable is excluded here; one that ended before, or is of another run, is passed over.

        Raises GroupTooSmallError for a run whose groups are of one rollout each, where the objective compares rollouts:
        it would exclude every group.
        """
        group, place = read.record, read.place
        if not self.is_new(place) or group.run_id != self._run.run_id:
            return False
        if group.mode is Mode.TRAIN and group.expected_size < 2 and self._advantage is not AdvantageKind.RAW:
            raise GroupTooSmallError(self._advantage.value, group.expected_size)
        version -= -(-self._trained_behind(place) // self._run.groups_per_step)
        checks = (
            (Exclusion.REPLAYED, self.refuses(read.replay_id)),
            (Exclusion.LATE, group.closed_by is CloseReason.LATE),
            (Exclusion.DUPLICATE, self.is_known(group.group_id)),
            (Exclusion.EVAL, group.mode is Mode.EVAL),
            (Exclusion.TOO_FEW, len(completed(group)) < self._run.min_completed),
            (Exclusion.NO_SIGNAL, self._run.skip_no_signal and not has_signal(group)),
        )
        reason = next((reason for reason, applies in checks if applies), None) or self._version_problem(group, version)
        if reason is Exclusion.UNDEFINED_LAG:
            self._set_aside.ahead += 1
            newest = max(member.version_max for member in completed(group))
            self._set_aside.newest = max(self._set_aside.newest, newest)
        if reason is not None:
            self.exclude(place, reason, len(group.members))
        return reason is None

    def accept(self, candidate: TrainableGroup) -> None:
        """Queue a wanted group with its rollouts, unless they may not be trained."""
        reason = None
        if any(map(self.refuses, candidate.replays)):
            reason = Exclusion.REPLAYED
        elif self._incarnation is not None and (
            foreign := {r.incarnation for r in candidate.rollouts} - {"", self._incarnation}
        ):
            self._set_aside.of_others += 1
            self._set_aside.incarnations.update(foreign)
            reason = Exclusion.UNDEFINED_LAG
        elif not self._settings.accept_other_sampling and (how := other_sampling(candidate.rollouts)):
            self._set_aside.otherwise[how] += 1
            reason = Exclusion.OTHER_SAMPLING
        elif self._trained_behind(candidate.place):
            # It was excluded before the stop, and only the id of the group that it repeats is forgotten since.
            reason = Exclusion.DUPLICATE
        if reason is None:
            self._waiting.append(candidate)
        else:
            self.exclude(candidate.place, reason, len(candidate.group.members))

    def close(self, version: int) -> StepBatch | None:
        """The next batch at trainer version `version`, or None while too few groups wait. Stale ones are excluded."""
        self.sweep(version)
        return self.take(self._run.groups_per_step) if len(self._waiting) >= self._run.groups_per_step else None

    def sweep(self, version: int) -> None:
        """Exclude the waiting groups that are no longer trainable at trainer version `version`."""
        waiting, self._waiting = self._waiting, []
        for candidate in waiting:
            reason = self._version_problem(candidate.group, version)
            if reason is None:
                self._waiting.append(candidate)
            else:
                self.exclude(candidate.place, reason, len(candidate.group.members))

    def take(self, size: int, most: int = MOST_EXCLUSIONS) -> StepBatch:
        """A batch of at most `size` groups, the oldest that wait, with the oldest `most` exclusions that no batch has
        named yet."""
        self._waiting.sort(key=lambda one: (one.group.closed_at, one.place.partition, one.place.offset))
        chosen, self._waiting = self._waiting[:size], self._waiting[size:]
        self._set_aside = ExclusionCounts()
        return StepBatch(chosen, self.name_exclusions((candidate.place for candidate in chosen), most))

    def _trained_behind(self, place: StepInput) -> int:
        """`in_order`, how many groups behind this one were trained before a stop: above 0 for a group that no step has
        named yet, and that is decided again. Exclusions are named in order, so that none is behind it."""
        if not self._settings.in_order:
            return 0
        return len(self._ended_at_start) - bisect(self._ended_at_start, place.offset)

    @cached_property
    def _ended_at_start(self) -> list[int]:
        """Offsets that had ended when the first group was read; `in_order`, so of one partition."""
        return sorted(offset for offsets in self._ended.values() for offset in offsets)

    def _version_problem(self, group: Group, version: int) -> Exclusion | None:
        members = completed(group)
        if any(not self._abandoned.isdisjoint((m.version_min, m.version_max)) for m in members):
            return Exclusion.REJECTED_VERSION
        if any(member.version_max > version for member in members):
            return Exclusion.UNDEFINED_LAG
        return Exclusion.STALE if lag_of(group, version) > self._run.max_policy_lag else None


def advantage_of(run: RunSettings, settings: TrainerSettings) -> AdvantageKind:
    """How a group's rewards become advantages. Most ways compare its rollouts: raises GroupTooSmallError for these
    where groups with one completed rollout are let in."""
    advantage = OBJECTIVES[settings.objective].advantage
    if run.min_completed < 2 and advantage is not AdvantageKind.RAW:
        raise GroupTooSmallError(advantage.value, run.min_completed)
    return advantage
