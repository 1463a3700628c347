"""The gate as a pure state machine: records of the log in, decisions out; no clock, no network, no randomness.

A candidate has one trial: the canary pool serves it without users (CANARY, share 0) while the bench measures it, then
to a share of the users (CANARY), and the comparison promotes, rejects or holds it. Invariants:

- the decisions are a function of the log: a restarted gate, or a second one, has the state that the log gives;
- the newest version is tried; versions that were published during a trial and are no longer the newest are skipped,
  and the next decision names them;
- one trial at a time, and no decision while the branch is held, except to repeat a hold after a later decision;
- time is the newest record timestamp seen, so that reading the log again gives the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidemill.schemas.clock import to_s
from tidemill.schemas.config import RunSettings
from tidemill.schemas.gate_decisions import EVIDENCE, GENERATION, CanaryTrial
from tidemill.schemas.records import CANARY_SHARE, GateDecision, GateVerdict, Record
from tidemill.streams.gate.branch import Branch
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.guardrails import names


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a branch."""

    run_id: str
    branch: str
    at: int
    """Event time of the snapshot, microseconds."""
    stage: str
    """One of held, bench, comparison, idle."""
    candidate: int | None
    promoted: int
    """The version that all users get; before the first promotion, the oldest anchor. -1: no version exists."""
    head: int
    admitted: bool
    """Whether the promoted version may learn from users."""
    held_by: GateDecision | None
    watched: int | None
    """The promoted version that may still be rolled back without a person."""
    numbers: dict[str, float]
    """Numbers of the trial."""
    decisions: list[GateDecision]
    """The newest ones, oldest first."""
    serving: dict[str, int]
    """Version served by each replica."""


class GateController:
    """The state machine for the gate of one branch of one run.

    Args:
        run: names the run and the branch; records of others are ignored.
        gate: the settings.
        generation: generation of this gate process; a process that started later has a greater one.
    """

    def __init__(self, run: RunSettings, gate: GateSettings, generation: float) -> None:
        self._gate, self.generation = gate, generation
        self._branch = Branch(run, gate)

    def observe(self, record: Record, at_us: int) -> list[GateDecision]:
        """Process a record, with its event time in microseconds. Return the decisions to write now.

        A decision is returned until it is observed itself, or a record changes its reasons.
        """
        self._branch.observe(record, at_us)
        return self.due()

    def due(self) -> list[GateDecision]:
        """Return the decisions to write now; at most one."""
        if self._branch.clock == 0:
            return []
        hold, late = self._branch.standing.hold, self._branch.standing.overrun
        if hold is not None and late is not None:
            later = f"{late.verdict.value} {late.version} was decided after it"
            reason = f"{hold.verdict.value} by {hold.decided_by} applies; {later}"
            return [self._decision(GateVerdict.ROLL_BACK, hold.version, reason, {})]
        if hold is not None:
            return []
        steps = (self._admission, self._roll_back, self._in_trial)
        decisions = next((found for step in steps if (found := list(step()))), [])
        rested = self._seconds_since(self._branch.settled_at) >= self._gate.settle_s
        if not decisions and self._branch.trial is None and rested:
            decisions = list(self._open_newest("the newest version"))
        return decisions

    def greatest_generation(self) -> float:
        """Return the generation of the last-started gate that decided; 0 before the first decision."""
        return self._branch.standing.generation

    def snapshot(self) -> Snapshot:
        """Return the current state of the branch."""
        branch = self._branch
        standing, trial = branch.standing, branch.trial
        stage = "idle" if trial is None else "bench" if branch.comparison is None else "comparison"
        return Snapshot(
            run_id=branch.run.run_id,
            branch=branch.run.branch,
            at=branch.clock,
            stage="held" if standing.hold is not None else stage,
            candidate=None if trial is None else trial.version,
            promoted=standing.baseline,
            head=standing.head,
            admitted=standing.baseline in standing.learners,
            held_by=standing.hold,
            watched=None if branch.watch is None else branch.watch.version,
            numbers={} if trial is None else self._trial_numbers(trial),
            decisions=list(branch.decisions),
            serving=dict(sorted(branch.serving.items())),
        )

    def _admission(self) -> Iterator[GateDecision]:
        standing = self._branch.standing
        for version in sorted(self._branch.admissible - standing.learners - standing.rejected.keys()):
            if version in standing.versions:
                numbers = {**self._bench_numbers("bench", version), "floor": self._gate.floor}
                reason = f"the lower bound of the success on held-out tasks reaches the floor of {self._gate.floor:g}"
                yield self._decision(GateVerdict.ADMIT, version, reason, numbers)
                return

    def _roll_back(self) -> Iterator[GateDecision]:
        standing, watch = self._branch.standing, self._branch.watch
        baseline = standing.baseline
        if standing.collapsed is not None:
            reason = f"rolled back to {baseline}: it must not be served again"
            yield self._decision(GateVerdict.REJECT, standing.collapsed, reason, {})
        elif baseline in standing.rejected:
            older = standing.fallback(baseline, self._branch.proved)
            if older is not None:
                yield self._decision(GateVerdict.ROLL_BACK, older, f"version {baseline} was rejected", {})
        elif watch is not None and watch.alerts:
            older = standing.fallback(watch.version, self._branch.proved)
            if older is None:
                return
            numbers = {"seconds_in_stage": self._seconds_since(watch.since), "promoted/users": float(watch.users)}
            for alert in watch.alerts:
                numbers[f"promoted/{alert.name}"] = alert.candidate
                numbers[f"before/{alert.name}"] = alert.baseline
                numbers[f"p_alert/{alert.name}"] = alert.p_value
            reason = f"version {watch.version} collapsed after its promotion: {names(watch.alerts)}"
            yield self._decision(GateVerdict.ROLL_BACK, older, reason, numbers)

    def _in_trial(self) -> Iterator[GateDecision]:
        trial, comparison = self._branch.trial, self._branch.comparison
        if trial is None:
            return
        if comparison is None:
            yield from self._in_bench(trial)
        elif comparison.conclusion is not None:
            done = comparison.conclusion
            holds = done.verdict is GateVerdict.HOLD
            version = self._branch.trial_baseline if holds else trial.version
            reason = f"version {trial.version} waits for a person: {done.reason}" if holds else done.reason
            numbers = {**self._trial_numbers(trial), EVIDENCE: float(done.on_evidence)}
            yield self._decision(done.verdict, version, reason, numbers)
        elif trial.share == 0.0:
            numbers = {**self._trial_numbers(trial), CANARY_SHARE: self._gate.share}
            yield self._decision(GateVerdict.CANARY, trial.version, "the comparison continues", numbers)

    def _in_bench(self, trial: CanaryTrial) -> Iterator[GateDecision]:
        gate, bench, against = self._gate, self._branch.bench, self._branch.trial_baseline
        result, baseline = bench.result(trial.version), bench.result(against)
        if result is None:
            # A candidate without a bench result must not delay newer ones without limit.
            waited = self._seconds_since(trial.opened_at)
            if waited >= gate.bench_seconds and self._branch.candidate() not in (None, trial.version):
                rollouts = f"{bench.tally(trial.version).rollouts} of {gate.bench_rollouts} rollouts"
                yield from self._open_newest(f"version {trial.version} is skipped: {rollouts} in {waited:g} s")
            return
        numbers, objection = self._trial_numbers(trial), ""
        if result.rate < gate.floor:
            objection = f", below the floor of {gate.floor:g}"
        elif baseline is not None and result.is_significantly_worse(baseline, gate.bench_margin, gate.bench_alpha):
            objection = f" against {baseline.rate:.3g}: significantly worse by more than {gate.bench_margin:g}"
        if objection:
            reason = f"success on held-out tasks is {result.rate:.3g}{objection}"
            yield self._decision(GateVerdict.REJECT, trial.version, reason, {**numbers, EVIDENCE: 1.0})
            return
        reason = f"passed the bench with {result.rate:.3g}; to be compared with {against} among users"
        yield self._decision(GateVerdict.CANARY, trial.version, reason, {**numbers, CANARY_SHARE: gate.share})

    def _open_newest(self, reason: str) -> Iterator[GateDecision]:
        version = self._branch.candidate()
        if version is None:
            return
        skipped = self._branch.skipped(version)
        if skipped:
            reason = f"{reason}; skipped: {', '.join(map(str, skipped))}"
        numbers = {CANARY_SHARE: 0.0, "skipped": float(len(skipped)), "baseline": float(self._branch.standing.baseline)}
        yield self._decision(GateVerdict.CANARY, version, f"{reason}; the bench comes first", numbers)

    def _trial_numbers(self, trial: CanaryTrial) -> dict[str, float]:
        comparison, baseline = self._branch.comparison, self._branch.trial_baseline
        since = trial.opened_at if comparison is None else comparison.started_at
        return {
            "baseline": float(baseline),
            "seconds_in_stage": self._seconds_since(since),
            "replicas": float(sum(serving == trial.version for serving in self._branch.serving.values())),
            **self._bench_numbers("bench", trial.version),
            **self._bench_numbers("baseline_bench", baseline),
            **({} if comparison is None else comparison.numbers()),
        }

    def _bench_numbers(self, prefix: str, version: int) -> dict[str, float]:
        tally, alpha = self._branch.bench.tally(version), self._gate.bench_alpha
        found = {f"{prefix}/rollouts": float(tally.rollouts)}
        if tally.rollouts:
            found[f"{prefix}/rate"] = tally.rate
            found[f"{prefix}/lower"] = tally.lower(alpha)
            found[f"{prefix}/upper"] = tally.upper(alpha)
        return found

    def _seconds_since(self, at_us: int) -> float:
        return to_s(self._branch.clock - at_us)

    def _decision(
        self, verdict: GateVerdict, version: int | None, reason: str, numbers: Mapping[str, float]
    ) -> GateDecision:
        run = self._branch.run
        return GateDecision(
            run_id=run.run_id,
            branch=run.branch,
            verdict=verdict,
            version=version,
            reason=reason,
            decided_by=self._gate.name,
            numbers={**numbers, GENERATION: self.generation},
            at=self._branch.clock,
        )
