"""Selection of the groups that a step trains on, and exclusion of the others: a pure state machine over `groups`.

Invariants:

- every group of this run ends exactly once: trained in one step, or excluded in one step with a reason;
- no group is trained that was sampled under a version which the trainer abandoned by going back;
- groups of other runs are ignored: their own trainer ends them;
- no group is trained if its policy lag is undefined: sampled under another incarnation's versions, or under a version
  that is not made yet; no group that a replay wrote is trained, unless the settings accept the replay;
- no group is trained that was sampled from another distribution than the model's own, unless the settings accept it;
- a batch contains the oldest waiting groups, and when it is closed none of them is staler than the bound;
- no more groups wait than `full` allows: the caller then stops reading;
- no batch has more exclusions than a record can name: the remaining ones are named by the next batch;
- with `in_order`, a batch depends only on the groups before it: each group is decided at the version that all full
  batches before it give, no matter when or how often it is read. (The reason of a remaining exclusion that is decided
  again can differ if the id that it repeats was forgotten in the meantime: `trainer.remembered_groups`);
- `progress()` after a batch was closed gives the offsets to continue from, so no group is trained twice or skipped.

A trainer that is started on a copy of another run's topics may set every group aside and wait forever. It then logs a
warning, at long intervals, but only while these groups would have filled the missing batch. So it does if no group can
teach anything, but only after several batches of such groups: some are normal.
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
from tidemill.trainer.advantages import raw, require_two
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.objectives import OBJECTIVES, Advantage
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

TAUGHT_NOTHING = {
    Exclusion.NO_SIGNAL: "had equal rewards ({}): look at the rewards, or give easier or harder tasks",
    Exclusion.TOO_FEW: "had fewer completed rollouts than run.min_completed ({}): look at the failures of rollouts",
}
"""Why a group cannot teach anything, and what to do, by the reason of its exclusion."""
PATIENCE = 4
"""Batches of groups that teach nothing, without one that does, after which a warning is given."""
NAMED = 3
"""Maximum number of incarnations that a warning names, starting with the most frequent."""


@dataclass(slots=True)
class ExclusionCounts:
    """Counts of the groups that were excluded for reasons that a person can change, since the last batch."""

    of_others: int = 0
    incarnations: Counter[str] = field(default_factory=Counter)
    """Groups by the foreign incarnation under which they were sampled."""
    ahead: int = 0
    newest: int = -1
    """The newest version under which a group was sampled and which is not made yet."""
    otherwise: Counter[str] = field(default_factory=Counter)
    """Groups from another distribution than the model's own, by the difference in sampling."""
    taught_nothing: Counter[Exclusion] = field(default_factory=Counter)

    @property
    def groups(self) -> int:
        """Groups that other settings would have trained."""
        return self.of_others + self.ahead + self.otherwise.total()

    def warning(self, own: str | None, version: int) -> str:
        """Return the warning: numbers, reasons and remedy, for a trainer of incarnation `own` at `version`."""
        reasons = []
        if self.of_others:
            named = ", ".join(name for name, _ in self.incarnations.most_common(NAMED))
            reasons.append(
                f"{self.of_others} sampled under versions of another incarnation ({named}; this trainer's is "
                f"{own or 'unnamed'}): to train on a copy of another run's topics, begin a fresh chain with "
                "trainer.publish.incarnation set to theirs; otherwise let the replicas follow this trainer's versions"
            )
        if self.ahead:
            reasons.append(
                f"{self.ahead} sampled under versions up to {self.newest}, and this trainer is at {version}: to make "
                "a run again from its groups, set trainer.in_order; otherwise let the replicas follow this trainer's "
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
        for exclusion, number in self.taught_nothing.items():
            causes.append(f"{number} {TAUGHT_NOTHING[exclusion].format(exclusion)}")
        return f"{self.groups + self.taught_nothing.total()} groups were excluded, since {'; and '.join(causes)}"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step, and the exclusions since the step before."""

    groups: list[TrainableGroup]
    exclusions: list[StepExclusion]
    online: TrainableBatch | None = None
    """Rewarded interactions with users; None in a step on simulated groups only."""


class BatchBuilder(InputQueue[TrainableGroup]):
    """The builder of batches from groups, which it receives in the order in which they are read.

    Raises ValueError as `advantage_of` does.
    """

    def __init__(
        self,
        run: RunSettings,
        settings: TrainerSettings,
        progress: TopicProgress | None = None,
        incarnation: str | None = None,
    ) -> None:
        super().__init__(Topic.GROUPS, run, settings, progress, incarnation)
        self._advantage = advantage_of(run, settings)
        self._abandoned: frozenset[int] = frozenset()
        self._set_aside = ExclusionCounts()

    def missed(self, version: int) -> str:
        """Return a message about the groups that were excluded, if the next batch would be full with them, or if too
        many taught nothing; otherwise an empty string."""
        size, aside = self._run.groups_per_step, self._set_aside
        lacking = aside.groups and len(self._waiting) < size <= len(self._waiting) + aside.groups
        if not self._settings.online.enabled and len(self._waiting) < size:
            lacking = lacking or aside.taught_nothing.total() >= PATIENCE * size
        return aside.warning(self._incarnation, version) if lacking else ""

    @property
    def waiting(self) -> int:
        """Number of groups that could be trained now."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether the caller must not read groups until a batch is closed."""
        most = self._run.groups_per_step
        if not self._settings.in_order:
            joining = self._settings.online.simulated_groups_per_batch
            most = max(self._settings.max_waiting_batches * most, joining)
        return len(self._waiting) >= most

    def abandon(self, versions: Collection[int]) -> None:
        """Exclude from now on every group that was sampled under one of `versions`."""
        self._abandoned = frozenset(versions)

    def wants(self, read: Reference[Group], version: int) -> bool:
        """Check one group at trainer version `version`; return True if `accept` or `exclude` must follow.

        A group that is not trainable is excluded here; one that has ended before, or is of another run, is ignored.

        Raises ValueError for a run with one rollout per group if the objective compares rollouts, or if the settings
        ask for more than one or for different rewards: it would exclude every group.
        """
        group, place, run = read.record, read.place, self._run
        if not self.is_new(place) or group.run_id != run.run_id:
            return False
        if group.mode is Mode.TRAIN and self._advantage is not raw:
            require_two(self._advantage.__name__, group.expected_size)
        elif group.mode is Mode.TRAIN and group.expected_size == 1 and (run.min_completed > 1 or run.skip_no_signal):
            raise ValueError("groups have one rollout: set run.min_completed to 1 and run.skip_no_signal to false")
        version -= -(-self._trained_behind(place) // run.groups_per_step)
        checks = (
            (Exclusion.REPLAYED, self.refuses(read.replay_id)),
            (Exclusion.LATE, group.closed_by is CloseReason.LATE),
            (Exclusion.DUPLICATE, self.is_known(group.group_id)),
            (Exclusion.EVAL, group.mode is Mode.EVAL),
            (Exclusion.TOO_FEW, len(completed(group)) < run.min_completed),
            (Exclusion.NO_SIGNAL, run.skip_no_signal and not has_signal(group)),
        )
        reason = next((reason for reason, applies in checks if applies), None) or self._version_problem(group, version)
        if reason is Exclusion.UNDEFINED_LAG:
            self._set_aside.ahead += 1
            newest = max(member.version_max for member in completed(group))
            self._set_aside.newest = max(self._set_aside.newest, newest)
        if reason in TAUGHT_NOTHING:
            self._set_aside.taught_nothing[reason] += 1
        if reason is not None:
            self.exclude(place, reason, len(group.members))
        return reason is None

    def accept(self, candidate: TrainableGroup) -> None:
        """Queue a wanted group with its rollouts, or exclude it if they must not be trained."""
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
            # It was excluded before the stop; only the id of the group that it repeats was forgotten since then.
            reason = Exclusion.DUPLICATE
        if reason is None:
            self._waiting[candidate.place.group_id] = candidate
        else:
            self.exclude(candidate.place, reason, len(candidate.group.members))

    def close(self, version: int) -> StepBatch | None:
        """Return the next batch at trainer version `version`, or None if too few groups wait. Exclude stale ones."""
        self.sweep(version)
        return self.take(self._run.groups_per_step) if len(self._waiting) >= self._run.groups_per_step else None

    def sweep(self, version: int) -> None:
        """Exclude the waiting groups that are no longer trainable at trainer version `version`."""
        for candidate in list(self._waiting.values()):
            reason = self._version_problem(candidate.group, version)
            if reason is not None:
                del self._waiting[candidate.place.group_id]
                self.exclude(candidate.place, reason, len(candidate.group.members))

    def take(self, size: int, most: int = MOST_EXCLUSIONS) -> StepBatch:
        """Return a batch of the oldest waiting groups, at most `size`, with the oldest exclusions that no batch has
        named yet, at most `most`."""
        by_age = sorted(
            self._waiting.values(), key=lambda one: (one.group.closed_at, one.place.partition, one.place.offset)
        )
        chosen = by_age[:size]
        for candidate in chosen:
            del self._waiting[candidate.place.group_id]
        self._set_aside = ExclusionCounts()
        return StepBatch(chosen, self.name_exclusions((candidate.place for candidate in chosen), most))

    def _trained_behind(self, place: StepInput) -> int:
        """Return, with `in_order`, the number of later groups that were trained before a stop: above 0 for a group that
        no step has named yet and that is decided again. Exclusions are named in order, so no later one has ended."""
        if not self._settings.in_order:
            return 0
        return len(self._ended_at_start) - bisect(self._ended_at_start, place.offset)

    @cached_property
    def _ended_at_start(self) -> list[int]:
        """Offsets of the groups that had ended when the first was read; of one partition, because of `in_order`."""
        return sorted(offset for offsets in self._ended.values() for offset in offsets)

    def _version_problem(self, group: Group, version: int) -> Exclusion | None:
        members = completed(group)
        if any(not self._abandoned.isdisjoint((m.version_min, m.version_max)) for m in members):
            return Exclusion.REJECTED_VERSION
        if any(member.version_max > version for member in members):
            return Exclusion.UNDEFINED_LAG
        return Exclusion.STALE if lag_of(group, version) > self._run.max_policy_lag else None


def advantage_of(run: RunSettings, settings: TrainerSettings) -> Advantage:
    """Return how a group's rewards become advantages. Most functions compare its rollouts: for these, raises ValueError
    if the settings allow groups with one completed rollout."""
    advantage = OBJECTIVES[settings.objective].advantage
    if advantage is not raw:
        require_two(advantage.__name__, run.min_completed)
    return advantage
