"""The gate's state of one branch, from the records of the log. Pure; it takes no decisions.

A decision counts when it is read here, not when it is proposed, and only once if the log delivers it repeatedly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from tidemill.schemas.config import RunSettings
from tidemill.schemas.gate_decisions import EVIDENCE, NAMES, BranchDecisions, CanaryTrial, by_gate
from tidemill.schemas.records import (
    AckStatus,
    Arm,
    GateDecision,
    GateVerdict,
    Group,
    Manifest,
    Outcome,
    Record,
    UserRequest,
    UserWish,
    WeightAck,
)
from tidemill.streams.gate.bench import Bench
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.trial import ArmComparison, PromotionWatch


class BranchVersions(BranchDecisions):
    """The versions of a branch, the decisions on each, and the version that all users get."""

    def __init__(self) -> None:
        super().__init__()
        self.head = -1
        """The newest version; -1 before the first."""
        self._anchored: set[int] = set()

    @property
    def baseline(self) -> int:
        """The version that all users get: the one named last; if none is named, the oldest with an anchor. -1: none."""
        return self.named[-1] if self.named else self._first

    def publish(self, manifest: Manifest) -> None:
        """Add a version; if it is published twice, the first contents count."""
        version, parent = manifest.version, manifest.parent
        if version not in self.versions:
            self.made(version, parent if parent is not None and parent < version else None)
            self.head = max(self.head, version)
        if manifest.anchor is not None:
            self._anchored.add(version)

    def fallback(self, version: int, proved: Iterable[int]) -> int | None:
        """Return the version to roll back to: the newest other named one, if possible a proved one; None if none."""
        choices = [known for known in (self._first, *self.named) if known not in (-1, version, *self.rejected)]
        sure = set(proved)
        return next((known for known in reversed(choices) if known in sure), choices[-1] if choices else None)

    @property
    def _first(self) -> int:
        return min(self._anchored, default=min(self.versions, default=-1))


REMEMBERED = 20
"""Number of decisions in a snapshot."""


class Branch:
    """One branch of one run; records of others are ignored."""

    def __init__(self, run: RunSettings, gate: GateSettings) -> None:
        self.run, self._gate = run, gate
        self.standing = BranchVersions()
        self.bench = Bench(gate.bench_rollouts)
        self.trial: CanaryTrial | None = None
        """The current trial of a candidate."""
        self.trial_baseline = -1
        """The version that all users got when the trial began."""
        self.comparison: ArmComparison | None = None
        """The comparison of the trial; None during the bench."""
        self.watch: PromotionWatch | None = None
        self.clock = 0
        """The newest record timestamp seen, microseconds."""
        self.settled_at = 0
        """Event time of the last decision that ended a trial."""
        self.admissible: set[int] = set()
        """Versions whose bench result reached the floor."""
        self.decisions: deque[GateDecision] = deque(maxlen=REMEMBERED)
        self.serving: dict[str, int] = {}
        """Version served by each replica."""
        self.proved: set[int] = set()
        """Versions that a replica has proved."""
        self._origin: dict[str, float] = {}
        self._known: set[object] = set()

    def observe(self, record: Record, at_us: int) -> None:
        """Process a record, with its event time in microseconds."""
        self.clock = max(self.clock, at_us)
        # A group belongs to a run, and to no branch.
        place = getattr(record, "run_id", None), getattr(record, "branch", self.run.branch)
        match record:
            case UserRequest(wish=UserWish.ERASE):
                for party in self._parties():
                    party.forget(record.user_id)
            case _ if place != (self.run.run_id, self.run.branch):
                pass
            case Group():
                for version, result in self.bench.observe(record):
                    if result.lower(self._gate.bench_alpha) >= self._gate.floor:
                        self.admissible.add(version)
            case Manifest():
                self.standing.publish(record)
            case WeightAck():
                self.serving[record.replica_id] = record.serving_version
                if record.status is not AckStatus.REFUSED:
                    self.proved.add(record.version)
            case Outcome():
                for party in self._parties():
                    party.observe(record, self.clock)
            case GateDecision():
                self._take_decision(record)
            case _:
                pass
        for party in self._parties():
            party.advance(self.clock)
        if self.watch is not None and self.watch.over(self.clock) and not self.watch.alerts:
            self.watch = None

    def candidate(self) -> int | None:
        """Return the newest version; None if its trial is over or all users already get it."""
        head = self.standing.head
        return head if head > self.standing.baseline and head not in self.standing.decided else None

    def skipped(self, version: int) -> list[int]:
        """Return the versions after the last one tried and before `version`."""
        standing = self.standing
        tried = {*standing.decided, standing.baseline, *([] if self.trial is None else [self.trial.version])}
        last = max((known for known in tried if known < version), default=-1)
        return [known for known in sorted(standing.versions) if last < known < version]

    def _parties(self) -> Iterator[ArmComparison | PromotionWatch]:
        if self.comparison is not None:
            yield self.comparison
        if self.watch is not None:
            yield self.watch

    def _take_decision(self, decision: GateDecision) -> None:
        # Equal if one decision is read twice
        numbers = tuple(sorted(decision.numbers.items()))
        key = decision.verdict, decision.version, decision.decided_by, decision.reason, decision.at, numbers
        if key in self._known:
            return
        self._known.add(key)
        self.decisions.append(decision)
        held, before, settled = self.standing.hold, self.standing.baseline, self.standing.settled
        self.standing.observe(decision)
        trial = self.standing.trial
        if trial is not self.trial:
            self.trial, self.trial_baseline, self.comparison = trial, self.standing.baseline, None
        if trial is not None and 0.0 < trial.share < 1.0 and self.comparison is None:
            self.comparison = ArmComparison(
                self._gate, trial.version, self.trial_baseline, trial.share, decision.at, self._origin
            )
        if held is not None and by_gate(decision):
            return
        of_stable = f"{Arm.STABLE}/"
        stable = {name.removeprefix(of_stable): n for name, n in numbers if name.startswith(of_stable)}
        means = {name: n for name, n in stable.items() if name not in ("users", "interactions")}
        if self.standing.settled is not settled:
            # Later candidates must not drift from the first baseline that was compared with enough users
            if not self._origin and stable.get("users", 0.0) >= self._gate.min_users:
                self._origin = means
            self.settled_at = decision.at
        # Old decisions do not say whether evidence decided.
        found_change = held is not None and by_gate(held) and held.numbers.get(EVIDENCE, 1.0) > 0.0
        if decision.verdict is GateVerdict.RELEASE and found_change:
            self._origin = {}
        if decision.verdict is GateVerdict.PROMOTE:
            self.watch = None
            if decision.version is not None and decision.version != before and means and self._gate.watch_seconds > 0:
                self.watch = PromotionWatch(self._gate, decision.version, decision.at, means)
        elif self.watch is not None and (decision.verdict in NAMES or self.watch.version in self.standing.rejected):
            self.watch = None
