"""Selection of the online batches to train, and exclusion of the others: a pure state machine over `online-batches`.

Invariants:

- every batch of this run and branch ends exactly once: trained in one step, or excluded in one with a reason;
- every interaction of a trained batch is trained in it or excluded from it with a reason; a batch that is excluded as a
  whole is one exclusion that counts its interactions;
- a batch is trained at most `max_policy_lag` steps after the version that sampled it, counted along the ancestors of
  the trainer's version, and only if that version may learn from users;
- no step names more exclusions than a record can: the remaining batches are named by the next step;
- no interaction is trained if its user asked for erasure after it was served, if its policy lag is undefined, or if a
  replay wrote it that the settings do not accept.

`next` returns the oldest batch; the caller, which has the interactions, asks which of them remain (`settle`), and
trains these (`take`) or excludes the batch (`drop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.gate_decisions import BranchDecisions
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import (
    MOST_REWARD,
    Exclusion,
    GateDecision,
    Interaction,
    OnlineBatch,
    OnlineMember,
    StepExclusion,
    UserRequest,
    UserWish,
)
from tidemill.trainer.advantages import has_signal
from tidemill.trainer.choices import CorrectionKind
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.trainable import (
    MOST_EXCLUSIONS,
    DecidedStep,
    InputQueue,
    Reference,
    TopicProgress,
    TrainableBatch,
    other_sampling,
)


class WeightLine(BranchDecisions):
    """The versions of one branch of one run, and the decisions of the gate about them.

    `tidemill.schemas.gate_decisions` determines which versions are abandoned and which may learn from users;
    the next step starts from the newest version that is not abandoned.
    """

    def __init__(self, run_id: str, branch: str) -> None:
        super().__init__()
        self._run_id, self._branch = run_id, branch
        self.made(0, None, 0)

    @property
    def newest(self) -> int:
        """The newest version that was made, even if it is abandoned."""
        return max(self.versions)

    def observe(self, decision: GateDecision) -> str:
        """Observe as `BranchDecisions.observe`, but ignore decisions of another run or branch."""
        ours = (decision.run_id, decision.branch) == (self._run_id, self._branch)
        return super().observe(decision) if ours else ""

    def start(self) -> int:
        """Return the version from which the next step starts. Raises RuntimeError if there is none."""
        alive = self.versions - self.abandoned
        if not alive:
            raise RuntimeError(
                f"every version of run {self._run_id}, branch {self._branch}, was rejected, so there is nothing to "
                "train on from: roll back to one with `tidemill gate rollback`, or start a new run from a better model"
            )
        return max(alive)

    def lag(self, version: int, current: int) -> int | None:
        """Return the number of steps from `version` to `current`; None if `current` is not a descendant."""
        return next((steps for steps, at in enumerate(self.ancestry(current)) if at == version), None)

    def is_admitted(self, version: int) -> bool:
        """Return whether `version` is admitted or descends from an admitted version."""
        return version in self.versions and version in self.learners

    def milestones(self, number: int) -> set[int]:
        """Return the versions that the trainer may have to go back to: the newest `number` of those that were served to
        users, and of those that were admitted."""
        served, admitted = ([v for v in found if v in self.versions] for found in (self.named, self.admitted))
        return {*served[-number:], *admitted[-number:]}


class OnlineQueue(InputQueue[Reference[OnlineBatch]]):
    """The queue of online batches, which it receives in the order in which they are read."""

    def __init__(
        self,
        run: RunSettings,
        settings: TrainerSettings,
        line: WeightLine,
        progress: TopicProgress | None = None,
        incarnation: str | None = None,
    ) -> None:
        super().__init__(Topic.ONLINE_BATCHES, run, settings, progress, incarnation)
        self._line = line
        weighted = settings.correction.kind is not CorrectionKind.NONE
        self._correction_lag = run.max_policy_lag if weighted else 0
        """Maximum policy lag of a correction's tokens."""
        self._erased: dict[str, int] = {}

    def observe_request(self, request: UserRequest) -> None:
        """Register a user request: after an erasure, no interaction served before it is trained from now on."""
        if request.wish is UserWish.ERASE:
            self._erased[request.user_id] = max(request.at, self._erased.get(request.user_id, request.at))

    def erased(self, batch: TrainableBatch) -> bool:
        """Return whether a user asked to erase an interaction of a batch."""
        pairs = zip(batch.members, batch.interactions, strict=True)
        return any(self._is_erased(member, interaction) for member, interaction in pairs)

    def read(self, read: Reference[OnlineBatch]) -> None:
        """Queue one batch. A batch that has ended before, or is of another run or branch, is ignored."""
        batch = read.record
        if not self.is_new(read.place) or (batch.run_id, batch.branch) != (self._run.run_id, self._run.branch):
            return
        if self.refuses(read.replay_id):
            self.exclude(read.place, Exclusion.REPLAYED, len(batch.members))
        elif self.is_known(batch.batch_id):
            self.exclude(read.place, Exclusion.DUPLICATE, len(batch.members))
        else:
            self._waiting[batch.batch_id] = read

    def next(self, current: int) -> Reference[OnlineBatch] | None:
        """Return the next batch to train at version `current`; exclude those that cannot be trained any more.

        A batch of a version that is not made yet waits for it: this happens if a run is computed again from its log.
        """
        online, made = self._settings.online, list[Reference[OnlineBatch]]()
        for one in list(self._waiting.values()):
            version = one.record.version
            if version > self._line.newest:
                continue
            reason = self._version_problem(version, current, online.max_policy_lag)
            if reason is None and online.require_admission and not self._line.is_admitted(version):
                reason = Exclusion.BELOW_FLOOR
            if reason is None:
                made.append(one)
            else:
                self.drop(one, reason)
        return min(made, key=lambda one: (one.record.closed_at, one.place.partition, one.place.offset), default=None)

    def settle(
        self, waiting: Reference[OnlineBatch], found: Mapping[Position, Interaction | Exclusion], current: int
    ) -> TrainableBatch | Exclusion:
        """Return the trainable rest of a batch at version `current`, or the reason why there is none.

        Args:
            found: for each member's position, the checked interaction, or the reason why there is none.
        """
        kept: list[tuple[OnlineMember, Interaction]] = []
        problems: dict[str, StepExclusion] = {}
        for member in _distinct(waiting.record.members):
            interaction = found[Position.of(member)]
            problem = self._problem(member, interaction, waiting.record, current)
            if problem is not None:
                name, reason = member.interaction_id, problem.value
                own = StepExclusion(name, Topic.INTERACTIONS.value, member.partition, member.offset, reason, rollouts=1)
                problems.setdefault(name, own)
            elif isinstance(interaction, Interaction):
                kept.append((member, interaction))
        # An interaction is trained with its corrections or not at all, so that its exclusion covers all of them.
        pairs = [pair for pair in kept if pair[0].interaction_id not in problems]
        left = TrainableBatch(
            place=waiting.place,
            batch=waiting.record,
            members=tuple(member for member, _ in pairs),
            interactions=tuple(interaction for _, interaction in pairs),
            excluded=tuple(problems.values()),
        )
        reasons = Counter(excluded.reason for excluded in left.excluded)
        if len(left.excluded) > MOST_EXCLUSIONS:
            # A record cannot name so many: the batch ends as a whole, for the most frequent reason.
            return Exclusion(reasons.most_common(1)[0][0])
        if sum(not member.correction for member in left.members) < self._settings.online.min_members:
            alone = len(reasons) == 1 and not left.members
            return Exclusion(next(iter(reasons))) if alone else Exclusion.TOO_FEW
        if self._run.skip_no_signal and not has_signal(self._settings.online.baseline, left):
            return Exclusion.NO_SIGNAL
        return left

    def drop(self, waiting: Reference[OnlineBatch], reason: Exclusion) -> None:
        """Exclude a waiting batch."""
        del self._waiting[waiting.record.batch_id]
        self.exclude(waiting.place, reason, len(waiting.record.members))

    def take(self, chosen: TrainableBatch, most: int = MOST_EXCLUSIONS) -> list[StepExclusion]:
        """Remove a batch that is trained from the queue; return the exclusions that its step names: its own
        interactions, which `settle` limits, and the oldest excluded batches; at most `most` together."""
        self._waiting.pop(chosen.batch.batch_id, None)
        room = max(0, most - len(chosen.excluded))
        return [*self.name_exclusions([chosen.place], room), *chosen.excluded]

    def _version_problem(self, version: int, current: int, bound: int) -> Exclusion | None:
        if version in self._line.abandoned:
            return Exclusion.REJECTED_VERSION
        if version > self._line.newest:
            return Exclusion.UNDEFINED_LAG
        lag = self._line.lag(version, current)
        return Exclusion.STALE if lag is None or lag > bound else None

    def _problem(
        self, member: OnlineMember, found: Interaction | Exclusion, batch: OnlineBatch, current: int
    ) -> Exclusion | None:
        if self._is_erased(member, found):
            return Exclusion.ERASED
        if isinstance(found, Exclusion):
            return found
        # The batch and the interaction must agree, and the user must have consented to training on it.
        own = (found.run_id, found.branch, found.user_id) == (batch.run_id, batch.branch, member.user_id)
        on_policy = member.correction or found.version_min == found.version_max == batch.version
        # False for NaN as well.
        usable = abs(member.reward) <= MOST_REWARD
        if not own or not on_policy or not found.consent or not usable:
            return Exclusion.INVALID_INTERACTION
        if self._incarnation is not None and found.incarnation not in ("", self._incarnation):
            return Exclusion.UNDEFINED_LAG
        if not self._settings.accept_other_sampling and other_sampling([found]):
            return Exclusion.OTHER_SAMPLING
        if not member.correction:
            return None
        newest, oldest, bound = found.version_max, found.version_min, self._correction_lag
        return self._version_problem(newest, current, bound) or self._version_problem(oldest, current, bound)

    def _is_erased(self, member: OnlineMember, found: Interaction | Exclusion) -> bool:
        erased_at = self._erased.get(member.user_id)
        if erased_at is None:
            return False
        # A deleted interaction has no time of serving; for a user who asked for erasure, that is why it was deleted.
        return found.served_at <= erased_at if isinstance(found, Interaction) else True


def repeated(batch: OnlineBatch, step: DecidedStep) -> list[OnlineMember]:
    """Return the members of a batch that a decided step trains: all except those that it excluded."""
    excluded = {entry.group_id for entry in step.exclusions if entry.topic == Topic.INTERACTIONS}
    return [member for member in _distinct(batch.members) if member.interaction_id not in excluded]


def _distinct(members: list[OnlineMember]) -> Iterator[OnlineMember]:
    """Yield the members without repeated rewards; an interaction may also have corrections."""
    seen: set[str] = set()
    for member in members:
        if member.correction or member.interaction_id not in seen:
            yield member
        if not member.correction:
            seen.add(member.interaction_id)
