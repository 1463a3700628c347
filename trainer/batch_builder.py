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
- no batch has more exclusions than a record can name: those that are left over go with the next one, unless `in_order`,
  where it must not depend on stops which step says what;
- `in_order`, a batch is a function of the groups before it alone: each group is decided at the version that all full
  batches before it lead to, whenever it is read;
- `progress()` after a batch was closed says where to go on reading, so that nothing is trained twice or skipped.

A trainer that is started over a copy of another run's topics may set every group aside and wait for ever. It is told
so, once and then rarely, only while these groups would have filled the batch that does not come. The clock is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import (
    CloseReason,
    Exclusion,
    Group,
    Mode,
    StepExclusion,
    StepInput,
)
from tidemill.trainer.advantages import GroupTooSmallError
from tidemill.trainer.choices import AdvantageKind
from tidemill.trainer.trainable import (
    Endings,
    TopicProgress,
    TrainableBatch,
    TrainableGroup,
    completed,
    has_signal,
    other_sampling,
)

REMINDED_S = 600.0
"""From one warning to the next."""
NAMED = 3
"""Incarnations that a warning names, those of most groups first."""


@dataclass(slots=True)
class SetAside:
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


@dataclass(slots=True)
class Reminder:
    """When to warn of what lasts: at once, then no sooner than `every_s` after the time before."""

    every_s: float = REMINDED_S
    _not_before: float | None = None

    def due(self, now: float) -> bool:
        """Whether to warn at time `now`, in seconds of a clock that only rises."""
        if self._not_before is not None and now < self._not_before:
            return False
        self._not_before = now + self.every_s
        return True


MOST_EXCLUSIONS = 4_096
"""As many references fit into one record."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings that decide."""

    run_id: str
    groups_per_step: int
    max_policy_lag: int
    min_completed: int
    skip_no_signal: bool
    remembered_groups: int
    advantage: AdvantageKind = AdvantageKind.CENTRED
    """How a group's rewards become advantages; most ways compare the rollouts of a group."""
    accept_replays: frozenset[str] = frozenset()
    """Replays whose groups and rollouts are trained."""
    accept_other_sampling: bool = False
    in_order: bool = False
    max_waiting: int | None = None
    """Groups that may wait; None: no bound."""
    most_exclusions: int = MOST_EXCLUSIONS
    """Exclusions that one step names."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step, and what ended untrained since the step before."""

    groups: list[TrainableGroup]
    exclusions: list[StepExclusion]
    online: TrainableBatch | None = None
    """What users made of the model's answers; None in a step on simulated groups alone."""


class BatchBuilder:
    """The builder of batches from groups, which it gets in the order in which they are read.

    Args:
        incarnation: of the run's versions; None where versions of different incarnations are not told apart.
    """

    def __init__(self, rules: StepRules, progress: TopicProgress | None = None, incarnation: str | None = None) -> None:
        self._rules = rules
        self._incarnation = incarnation
        self._endings = Endings(Topic.GROUPS, progress or TopicProgress(), rules.remembered_groups)
        self.observe_step = self._endings.observe_step
        self._abandoned: frozenset[int] = frozenset()
        self._waiting: list[TrainableGroup] = []
        self._set_aside = SetAside()

    @property
    def missed(self) -> SetAside | None:
        """The groups set aside that the next batch lacks; None while it would not be full with them either."""
        size = self._rules.groups_per_step
        lacking = self._set_aside.groups and len(self._waiting) < size <= len(self._waiting) + self._set_aside.groups
        return self._set_aside if lacking else None

    @property
    def incarnation(self) -> str | None:
        """Of the versions that groups have to be sampled under; None: of any."""
        return self._incarnation

    @property
    def waiting(self) -> int:
        """Groups that could be trained now."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no group is to be read until a batch is closed."""
        bound = self._rules.groups_per_step if self._rules.in_order else self._rules.max_waiting
        return bound is not None and len(self._waiting) >= bound

    @property
    def in_order(self) -> bool:
        """Whether batches are a function of the groups in the log alone; they then have to come from one partition."""
        return self._rules.in_order

    def abandon(self, versions: Collection[int]) -> None:
        """Train on no group from now on that was sampled under one of `versions`."""
        self._abandoned = frozenset(versions)

    def wants(self, place: StepInput, group: Group, version: int, replay_id: str = "") -> bool:
        """Read one group at trainer version `version`: True when `accept` or `exclude` has to follow.

        `replay_id` names the replay that wrote it; empty: none did.

        A group that is not trainable is excluded here; one that ended before, or is of another run, is passed over.

        Raises GroupTooSmallError for a run whose groups are of one rollout each, where the objective compares rollouts:
        it would exclude every group.
        """
        if not self._endings.read(place) or group.run_id != self._rules.run_id:
            return False
        if group.mode is Mode.TRAIN and group.expected_size < 2 and self._rules.advantage is not AdvantageKind.RAW:
            raise GroupTooSmallError(self._rules.advantage.value, group.expected_size)
        reason = Exclusion.REPLAYED if self._is_foreign_replay(replay_id) else self._reason(group, version)
        if reason is Exclusion.UNDEFINED_LAG:
            self._set_aside.ahead += 1
            newest = max(member.version_max for member in completed(group))
            self._set_aside.newest = max(self._set_aside.newest, newest)
        if reason is not None:
            self.exclude(place, group, reason)
        return reason is None

    def accept(self, candidate: TrainableGroup) -> None:
        """Queue a wanted group with its rollouts, unless they may not be trained."""
        if any(map(self._is_foreign_replay, candidate.replays)):
            self.exclude(candidate.place, candidate.group, Exclusion.REPLAYED)
        elif self._incarnation is not None and (
            foreign := {r.incarnation for r in candidate.rollouts} - {"", self._incarnation}
        ):
            self._set_aside.of_others += 1
            self._set_aside.incarnations.update(foreign)
            self.exclude(candidate.place, candidate.group, Exclusion.UNDEFINED_LAG)
        elif not self._rules.accept_other_sampling and (how := other_sampling(candidate.rollouts)):
            self._set_aside.otherwise[how] += 1
            self.exclude(candidate.place, candidate.group, Exclusion.OTHER_SAMPLING)
        else:
            self._waiting.append(candidate)

    def exclude(self, place: StepInput, group: Group, reason: Exclusion) -> None:
        """End a group untrained."""
        self._endings.exclude(place, reason, len(group.members))

    def close(self, version: int) -> StepBatch | None:
        """The next batch at trainer version `version`, or None while too few groups wait. Stale ones are excluded."""
        self.sweep(version)
        return self.take(self._rules.groups_per_step) if len(self._waiting) >= self._rules.groups_per_step else None

    def sweep(self, version: int) -> None:
        """Exclude the waiting groups that are no longer trainable at trainer version `version`."""
        waiting, self._waiting = self._waiting, []
        for candidate in waiting:
            if self._is_abandoned(candidate.group):
                self.exclude(candidate.place, candidate.group, Exclusion.REJECTED_VERSION)
            elif self._is_stale(candidate.group, version):
                self.exclude(candidate.place, candidate.group, Exclusion.STALE)
            else:
                self._waiting.append(candidate)

    def take(self, size: int) -> StepBatch:
        """A batch of at most `size` groups, the oldest that wait, with the exclusions that no batch has named yet."""
        self._waiting.sort(key=lambda one: (one.group.closed_at, one.place.partition, one.place.offset))
        chosen, self._waiting = self._waiting[:size], self._waiting[size:]
        self._set_aside = SetAside()
        most = None if self._rules.in_order else self._rules.most_exclusions
        return StepBatch(chosen, self._endings.close((candidate.place for candidate in chosen), most))

    def progress(self) -> TopicProgress:
        """Where to go on, as of the batch closed last: exclusions since then are decided again."""
        return self._endings.progress(candidate.place for candidate in self._waiting)

    def _reason(self, group: Group, version: int) -> Exclusion | None:
        waiting = any(candidate.group.group_id == group.group_id for candidate in self._waiting)
        known = waiting or self._endings.remembers(group.group_id)
        checks = (
            (Exclusion.LATE, group.closed_by is CloseReason.LATE),
            (Exclusion.DUPLICATE, known),
            (Exclusion.EVAL, group.mode is Mode.EVAL),
            (Exclusion.TOO_FEW, len(completed(group)) < self._rules.min_completed),
            (Exclusion.NO_SIGNAL, self._rules.skip_no_signal and not has_signal(group)),
            (Exclusion.REJECTED_VERSION, self._is_abandoned(group)),
            (Exclusion.UNDEFINED_LAG, any(m.version_max > version for m in completed(group))),
            (Exclusion.STALE, self._is_stale(group, version)),
        )
        return next((reason for reason, applies in checks if applies), None)

    def _is_stale(self, group: Group, version: int) -> bool:
        oldest = min((member.version_min for member in completed(group)), default=version)
        return version - oldest > self._rules.max_policy_lag

    def _is_abandoned(self, group: Group) -> bool:
        return any(not self._abandoned.isdisjoint((m.version_min, m.version_max)) for m in completed(group))

    def _is_foreign_replay(self, replay_id: str) -> bool:
        return bool(replay_id) and replay_id not in self._rules.accept_replays
