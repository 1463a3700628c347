"""The demonstration's state of the loop, and of learning from users: pure folds over the records of the log.

Every number on the screen and in the summary comes from this state, and so from the log; no process is asked.
The only exception is the users' satisfaction, which is not in the log (`Satisfaction`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_s, to_us
from tidemill.schemas.gate_decisions import BranchDecisions


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
    """The state of the loop according to the log, for one run."""

    run_id: str
    steps: dict[int, r.TrainStep] = field(default_factory=dict)
    manifests: dict[int, r.Manifest] = field(default_factory=dict)
    groups: dict[str, r.Group] = field(default_factory=dict)
    last_ack: dict[str, r.WeightAck] = field(default_factory=dict)
    served: dict[tuple[str, int], r.WeightAck] = field(default_factory=dict)
    """First proof of each version by each replica."""
    environments: dict[str, int] = field(default_factory=dict)
    """Tasks issued, by environment."""
    first_task_at: int = 0
    """The time at which the first training task was issued, in microseconds since the epoch."""
    refusals: int = 0
    _issued: set[str] = field(default_factory=set)
    _eval_version: dict[str, int] = field(default_factory=dict)

    def observe(self, record: r.Record) -> None:
        """Process one record of the log; records of other runs and duplicates change nothing."""
        if getattr(record, "run_id", None) != self.run_id:
            return
        match record:
            case r.Task() if record.group_id not in self._issued:
                self._issued.add(record.group_id)
                self.environments[record.environment] = self.environments.get(record.environment, 0) + 1
                if record.mode is r.Mode.EVAL:
                    self._eval_version[record.group_id] = record.issued_version
                elif not self.first_task_at or record.issued_at < self.first_task_at:
                    self.first_task_at = record.issued_at
            case r.Group() if record.closed_by is not r.CloseReason.LATE:
                self.groups.setdefault(record.group_id, record)
            case r.Manifest():
                self.manifests.setdefault(record.version, record)
            case r.TrainStep():
                self.steps.setdefault(record.step, record)
            case r.WeightAck():
                self.last_ack[record.replica_id] = record
                if record.status is r.AckStatus.REFUSED:
                    self.refusals += 1
                else:
                    self.served.setdefault((record.replica_id, record.version), record)
            case _:
                pass

    @property
    def version(self) -> int:
        return max(self.manifests, default=-1)

    @property
    def open_groups(self) -> int:
        """The number of issued groups that are not closed."""
        return len(self._issued - self.groups.keys())

    def train_groups(self) -> list[r.Group]:
        return [group for group in self.groups.values() if group.mode is r.Mode.TRAIN]

    def held_out(self) -> list[HeldOut]:
        """Return held-out success by the version under which the tasks were issued, oldest first."""
        by_version: dict[int, list[r.Group]] = defaultdict(list)
        for group in self.groups.values():
            if group.mode is r.Mode.EVAL and group.group_id in self._eval_version:
                by_version[self._eval_version[group.group_id]].append(group)
        found = []
        for version, groups in sorted(by_version.items()):
            finished = [member for group in groups for member in group.members if member.success is not None]
            found.append(HeldOut(version, sum(bool(m.success) for m in finished), len(finished), len(groups)))
        return found

    def lag(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for step in self.steps.values():
            for count in step.lag:
                total[count.lag] += count.tokens
        return total

    def trained_members(self) -> list[r.GroupMember]:
        trained = [self.groups[i.group_id] for s in self.steps.values() for i in s.inputs if i.group_id in self.groups]
        return [member for group in trained for member in group.members if member.advantage is not None]

    def taken_before(self, version: int) -> int:
        """Return the number of completed training rollouts in the steps up to a version."""
        return self._taken([step for step in self.steps.values() if step.version <= version])

    def rollouts_per_s(self) -> float:
        """Return completed training rollouts in the steps' groups, per second from the first training task to the end
        of the last step. Rollouts without a signal count, because they were sampled, scored and judged too."""
        seconds = to_s(max((s.finished_at for s in self.steps.values()), default=0) - self.first_task_at)
        return self._taken(self.steps.values()) / seconds if self.first_task_at and seconds > 0 else 0.0

    def _taken(self, steps: Iterable[r.TrainStep]) -> int:
        taken: set[str] = set()
        for step in steps:
            taken |= {place.group_id for place in step.inputs} | {place.group_id for place in step.exclusions}
        groups = [self.groups[group_id] for group_id in taken if group_id in self.groups]
        return sum(member.status is r.RolloutStatus.COMPLETED for group in groups for member in group.members)

    def spanning(self) -> int:
        """Return the number of trained rollouts whose tokens were sampled under more than one version."""
        return sum(member.version_min != member.version_max for member in self.trained_members())

    def updates(self) -> list[r.WeightAck]:
        """Return the proved in-place updates, one per replica and version; a load from an anchor is not an update."""
        return [ack for ack in self.served.values() if ack.status is r.AckStatus.PROVED and ack.pause_ms > 0]

    def fingerprints_equal(self) -> bool:
        """Return whether every proof equals its version's manifest and every replica serves the newest version."""
        newest = all(ack.serving_version == self.version for ack in self.last_ack.values())
        return newest and self.proofs_equal(self.last_ack)

    def proofs_equal(self, replicas: Collection[str]) -> bool:
        """Return whether these replicas proved a version, and every proof equals its version's manifest."""
        proofs = [ack for ack in self.served.values() if ack.replica_id in replicas and ack.version in self.manifests]
        matches = all(ack.fingerprint == self.manifests[ack.version].fingerprint for ack in proofs)
        return bool(proofs) and matches

    def mean_reward(self, step: r.TrainStep) -> float:
        groups = [self.groups[i.group_id] for i in step.inputs if i.group_id in self.groups]
        rewards = [m.reward for g in groups for m in g.members if m.reward is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0


RATE_WINDOW_US = to_us(10)
REWARDED = "rewarded"
"""The ending of an interaction that is not excluded."""


@dataclass(slots=True)
class OnlineState:
    """The state of learning from users according to the log of one run."""

    loop: LoopState
    """The state of the loop of this run: its steps, versions and replicas."""
    stable: frozenset[str]
    """Names of the replicas that serve promoted versions."""
    canary: frozenset[str]
    """Names of the replicas that serve the version on trial to its share of the users."""
    interactions: set[str] = field(default_factory=set)
    endings: dict[str, str] = field(default_factory=dict)
    """The end of each interaction: `REWARDED`, or the reason of its exclusion."""
    batches: dict[str, r.OnlineBatch] = field(default_factory=dict)
    decisions: list[r.GateDecision] = field(default_factory=list)
    branch: BranchDecisions = field(default_factory=BranchDecisions)
    """The meaning of the decisions."""
    _recent: deque[int] = field(default_factory=deque)
    _corrections: set[tuple[str, int]] = field(default_factory=set)
    """Interaction and revision of each correction."""
    _votes: set[tuple[str, str]] = field(default_factory=set)
    """Interaction and event of each vote. Feedback names no run: votes of other runs are among them."""

    def observe(self, record: r.Record) -> None:
        """Process one record of the log, for the loop too; records of other runs and duplicates change nothing."""
        self.loop.observe(record)
        if getattr(record, "run_id", self.loop.run_id) != self.loop.run_id:
            return
        match record:
            case r.Interaction() if record.interaction_id not in self.interactions:
                self.interactions.add(record.interaction_id)
                # Partitions are read one after another, so that times do not arrive in order.
                newest = self._recent[-1] if self._recent else 0
                self._recent.append(max(newest, record.served_at))
                while self._recent[0] < self._recent[-1] - RATE_WINDOW_US:
                    self._recent.popleft()
            case r.Feedback(kind=r.SignalKind.THUMB):
                self._votes.add((record.interaction_id, record.event_id))
            case r.Outcome(revision=0):
                self.endings.setdefault(record.interaction_id, record.exclusion or REWARDED)
            case r.Outcome():
                self._corrections.add((record.interaction_id, record.revision))
            case r.OnlineBatch():
                self.batches.setdefault(record.batch_id, record)
            case r.GateDecision():
                self.decisions.append(record)
                self.branch.observe(record)
            case _:
                pass

    @property
    def serving(self) -> dict[str, int]:
        """Version served by each replica of a pool."""
        pools = self.stable | self.canary
        return {name: ack.serving_version for name, ack in self.loop.last_ack.items() if name in pools}

    @property
    def _learnt(self) -> dict[int, list[str]]:
        """The online batches from which each version was made."""
        found = {
            step.version: [place.group_id for place in step.inputs if place.topic == Topic.ONLINE_BATCHES]
            for step in self.loop.steps.values()
        }
        return {version: batches for version, batches in found.items() if batches}

    @property
    def corrections(self) -> int:
        return len(self._corrections)

    @property
    def votes(self) -> int:
        """The number of votes on interactions of the run."""
        return sum(interaction in self.interactions for interaction, _ in self._votes)

    @property
    def interactions_per_s(self) -> float:
        """Answers per second over the last seconds of event time."""
        if len(self._recent) < 2:
            return 0.0
        span_us = self._recent[-1] - self._recent[0]
        return len(self._recent) / to_s(span_us) if span_us > 0 else 0.0

    def exclusions(self) -> dict[str, int]:
        counts = Counter(ending for ending in self.endings.values() if ending != REWARDED)
        return dict(sorted(counts.items()))

    @property
    def rewarded(self) -> int:
        return sum(ending == REWARDED for ending in self.endings.values())

    @property
    def learnt_batches(self) -> int:
        """The number of online batches that a step trained on."""
        return sum(len(batches) for batches in self._learnt.values())

    @property
    def learnt_versions(self) -> list[int]:
        """Versions that learnt from users, oldest first."""
        return sorted(self._learnt)

    def decided(self, version: int) -> bool:
        """Return whether the trial of `version`, or of a descendant, ended with a decision about it."""
        return any(trial.decided and version in self._ancestry(trial.version) for trial in self.branch.trials)

    @property
    def trials_decided(self) -> int:
        """The number of trials that ended with a decision about their version."""
        return sum(trial.decided for trial in self.branch.trials)

    @property
    def decided_on_evidence(self) -> int:
        """The number of trials decided on the gate's evidence; the others ended by a limit or a person."""
        return sum(trial.on_evidence for trial in self.branch.trials)

    def verdicts(self) -> dict[str, int]:
        return dict(sorted(Counter(decision.verdict.value for decision in self.decisions).items()))

    def stage(self) -> str:
        """Return the current stage of the gate, from its newest decision about the served version."""
        trial, settled = self.branch.trial, self.branch.settled
        if trial is not None:
            tried = f"is compared among {trial.share:.0%} of the users" if trial.share else "is benched"
            return f"v{trial.version} {tried}"
        return "no decision yet" if settled is None else f"{settled.verdict.value} v{settled.version}: {settled.reason}"

    def to_a_share_s(self) -> list[float]:
        """Return the seconds from each trained interaction's newest signal until some users got a version from it."""
        return self._latencies(self.stable | self.canary)

    def to_everyone_s(self) -> list[float]:
        """Return the seconds from each trained interaction's newest signal until all users got a version from it."""
        return self._latencies(self.stable)

    def _latencies(self, replicas: Collection[str]) -> list[float]:
        found = []
        exclusions = (one for step in self.loop.steps.values() for one in step.exclusions)
        dropped = {one.group_id for one in exclusions if one.topic == Topic.INTERACTIONS}
        for version, batches in self._learnt.items():
            # The times at which users first got the version, or a descendant.
            times = []
            for (replica_id, proved), ack in self.loop.served.items():
                if replica_id not in replicas or version not in self._ancestry(proved):
                    continue
                # A canary replica has users from the time at which the gate gave it a share.
                shown = [trial.users_at for trial in self.branch.trials if trial.version == proved]
                shown = [0] if replica_id in self.stable else shown
                times += [max(ack.at, at) for at in shown if at is not None]
            taught = [self.batches[batch] for batch in batches if batch in self.batches] if times else []
            found += [
                to_s(min(times) - member.feedback_at)
                for batch in taught
                for member in batch.members
                if member.feedback_at is not None and member.interaction_id not in dropped
            ]
        return found

    def _ancestry(self, version: int) -> Iterator[int]:
        parents = {step.version: step.parent_version for step in self.loop.steps.values()}
        at: int | None = version
        while at is not None:
            yield at
            at = parents.get(at)

    def fingerprints_equal(self) -> bool:
        """Return whether every proof in a pool equals its version's manifest, and stable serves the last promoted."""
        served, serving = self.branch.served, self.serving
        current = bool(served) and all(serving.get(replica_id) == served[-1] for replica_id in self.stable)
        return current and self.loop.proofs_equal(self.stable | self.canary)
