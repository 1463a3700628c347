"""What the demonstration knows of learning from users: a pure fold over the records of the log, like `LoopState`.

How satisfied users are is not in the log: only they know (`satisfaction`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_s, to_us
from tidemill.schemas.gate_decisions import BranchDecisions
from tidemill.schemas.records import (
    AckStatus,
    Feedback,
    GateDecision,
    Interaction,
    Manifest,
    OnlineBatch,
    Outcome,
    Record,
    SignalKind,
    TrainStep,
    WeightAck,
)

RATE_WINDOW_US = to_us(10)
REWARDED = "rewarded"
"""The ending of an interaction that is not excluded."""


@dataclass(slots=True)
class OnlineState:
    """Learning from users as the log of one run tells it."""

    run_id: str
    stable: frozenset[str]
    """Names of the replicas that serve promoted versions."""
    canary: frozenset[str]
    """Names of the replicas that serve the version under trial to its share of the users."""
    interactions: set[str] = field(default_factory=set)
    endings: dict[str, str] = field(default_factory=dict)
    """How each interaction ended: `REWARDED`, or why it was excluded."""
    corrections: int = 0
    votes: int = 0
    batches: dict[str, OnlineBatch] = field(default_factory=dict)
    decisions: list[GateDecision] = field(default_factory=list)
    branch: BranchDecisions = field(default_factory=BranchDecisions)
    """The meaning of the decisions."""
    serving: dict[str, int] = field(default_factory=dict)
    """Version served by each replica of a pool."""
    _recent: deque[int] = field(default_factory=deque)
    _learnt: dict[int, list[str]] = field(default_factory=dict)
    """Online batches that a version was made of."""
    _dropped: set[str] = field(default_factory=set)
    """Interactions that the trainer took out of their batches."""
    _parents: dict[int, int] = field(default_factory=dict)
    _fingerprints: dict[int, str] = field(default_factory=dict)
    _proofs: dict[tuple[str, int], WeightAck] = field(default_factory=dict)
    """First proof of each version by each replica of a pool."""
    _votes_seen: set[str] = field(default_factory=set)

    def observe(self, record: Record) -> None:
        """Take one record of the log; records of other runs and duplicates change nothing."""
        if getattr(record, "run_id", self.run_id) != self.run_id:
            return
        match record:
            case Interaction():
                self._observe_interaction(record)
            case Feedback(kind=SignalKind.THUMB) if record.event_id not in self._votes_seen:
                self._votes_seen.add(record.event_id)
                self.votes += 1
            case Outcome(revision=0):
                self.endings.setdefault(record.interaction_id, record.exclusion or REWARDED)
            case Outcome():
                self.corrections += 1
            case OnlineBatch():
                self.batches.setdefault(record.batch_id, record)
            case GateDecision():
                self.decisions.append(record)
                self.branch.observe(record)
            case Manifest():
                self._fingerprints.setdefault(record.version, record.fingerprint)
            case TrainStep():
                self._parents[record.version] = record.parent_version
                batches = [place.group_id for place in record.inputs if place.topic == Topic.ONLINE_BATCHES]
                if batches:
                    self._learnt[record.version] = batches
                self._dropped |= {e.group_id for e in record.exclusions if e.topic == Topic.INTERACTIONS}
            case WeightAck() if record.replica_id in self.stable | self.canary:
                self.serving[record.replica_id] = record.serving_version
                if record.status is not AckStatus.REFUSED:
                    self._proofs.setdefault((record.replica_id, record.version), record)
            case _:
                pass

    def _observe_interaction(self, interaction: Interaction) -> None:
        if interaction.interaction_id in self.interactions:
            return
        self.interactions.add(interaction.interaction_id)
        # Partitions are read one after another, so that times do not come in order.
        newest = self._recent[-1] if self._recent else 0
        self._recent.append(max(newest, interaction.served_at))
        while self._recent[0] < self._recent[-1] - RATE_WINDOW_US:
            self._recent.popleft()

    @property
    def interactions_per_s(self) -> float:
        """Answers a second over the last seconds of event time."""
        if len(self._recent) < 2:
            return 0.0
        span_us = self._recent[-1] - self._recent[0]
        return len(self._recent) / to_s(span_us) if span_us > 0 else 0.0

    def exclusions(self) -> dict[str, int]:
        """Interactions that ended without a reward, by reason."""
        counts = Counter(ending for ending in self.endings.values() if ending != REWARDED)
        return dict(sorted(counts.items()))

    @property
    def rewarded(self) -> int:
        """Interactions that ended in a reward."""
        return sum(ending == REWARDED for ending in self.endings.values())

    @property
    def learnt_batches(self) -> int:
        """Online batches that a step trained on."""
        return sum(len(batches) for batches in self._learnt.values())

    @property
    def learnt_versions(self) -> list[int]:
        """Versions that learnt from users, oldest first."""
        return sorted(self._learnt)

    def decided(self, version: int) -> bool:
        """Whether the trial of `version`, or of one made from it, ended with a decision about it."""
        return any(trial.decided and version in self._ancestry(trial.version) for trial in self.branch.trials)

    @property
    def trials_decided(self) -> int:
        """Trials that ended with a decision about their version."""
        return sum(trial.decided for trial in self.branch.trials)

    @property
    def decided_on_evidence(self) -> int:
        """Those that the gate's evidence decided; the others ended for want of time or traffic, or by a person."""
        return sum(trial.on_evidence for trial in self.branch.trials)

    def verdicts(self) -> dict[str, int]:
        """Decisions by verdict."""
        return dict(sorted(Counter(decision.verdict.value for decision in self.decisions).items()))

    def stage(self) -> str:
        """What the gate is doing, by its newest decision about what is served."""
        trial, settled = self.branch.trial, self.branch.settled
        if trial is not None:
            tried = f"is compared among {trial.share:.0%} of the users" if trial.share else "is benched"
            return f"v{trial.version} {tried}"
        return "no decision yet" if settled is None else f"{settled.verdict.value} v{settled.version}: {settled.reason}"

    def to_a_share_s(self) -> list[float]:
        """Seconds from each trained interaction's newest signal until some users were served what it taught."""
        return self._latencies(self.stable | self.canary)

    def to_everyone_s(self) -> list[float]:
        """Seconds from each trained interaction's newest signal until everyone was served what it taught."""
        return self._latencies(self.stable)

    def _latencies(self, replicas: Collection[str]) -> list[float]:
        found = []
        for version, batches in self._learnt.items():
            given_at = self._given_at(version, replicas)
            if given_at is not None:
                found += [to_s(given_at - at) for batch in batches for at in self._feedback_times(batch)]
        return found

    def _feedback_times(self, batch_id: str) -> Iterator[int]:
        batch = self.batches.get(batch_id)
        for member in batch.members if batch is not None else ():
            if member.feedback_at is not None and member.interaction_id not in self._dropped:
                yield member.feedback_at

    def _given_at(self, version: int, replicas: Collection[str]) -> int | None:
        """When users were first served `version`, or one that was made from it, by one of `replicas`."""
        times = [
            max(ack.at, shown_at)
            for (replica_id, proved), ack in self._proofs.items()
            if replica_id in replicas and version in self._ancestry(proved)
            if (shown_at := self._shown_at(proved, replica_id)) is not None
        ]
        return min(times, default=None)

    def _shown_at(self, version: int, replica_id: str) -> int | None:
        """When the gate gave users to a replica that serves `version`; None while it has none."""
        if replica_id in self.stable:
            return 0
        shown = (trial.users_at for trial in self.branch.trials if trial.version == version)
        return min((at for at in shown if at is not None), default=None)

    def _ancestry(self, version: int) -> Iterator[int]:
        at: int | None = version
        while at is not None:
            yield at
            at = self._parents.get(at)

    def fingerprints_equal(self) -> bool:
        """Whether every proof in a pool equals its version's manifest, and stable serves the version named last."""
        proofs = [ack for ack in self._proofs.values() if ack.version in self._fingerprints]
        matches = all(ack.fingerprint == self._fingerprints[ack.version] for ack in proofs)
        served = self.branch.served
        current = all(self.serving.get(replica_id) == served[-1] for replica_id in self.stable) if served else False
        return bool(proofs) and matches and current
