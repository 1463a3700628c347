"""One candidate's trial: its bench result, then its comparison with the baseline among users. Pure.

The comparison begins with the decision that gives the canary pool its share. It counts only answers that were served
after it, completely by the candidate in the canary arm or completely by the baseline in the stable arm. The first
conclusion is final: with any number of checks, a verdict by evidence is wrong with a probability of at most `alpha`.
It depends only on the outcomes in the log's order and on event time, so that a restarted gate concludes the same.

Outcomes are collected by user, the unit of the comparison. Whole users are assigned to arms, and answers to one user
share the user's taste. Counted one by one, they would look like far more evidence than they are, so that an A/A test
raises false alarms at any level (`bench_gate.py` shows how often). A user therefore counts once in a test, by the means
of their first outcomes in it. Invariants:

- a user is settled when they have `most` outcomes, or `window_us` of event time after their first; later ones do not
  count, except for corrections of counted ones;
- a user belongs to the arm in which they were first seen; their outcomes in the other arm do not count;
- after an erasure, a user who was not settled begins again with their next outcome; a settled one does not count again;
- a repeated outcome changes nothing, and a higher revision replaces a lower one;
- a settled user whose rewards are all withdrawn keeps the last mean: no block can do without one of its members.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidemill.schemas.clock import to_us
from tidemill.schemas.records import Arm, GateVerdict, Outcome
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.guardrails import REWARD, Alert, ArmGuards, FrozenGuards, Tolerance, measures, names
from tidemill.streams.gate.sequential import BASELINE, CANDIDATE, Capital, Side, TwoArms, difference


@dataclass(slots=True)
class TrialUser:
    """A user in one arm of a test."""

    arm: str
    user_id: str
    outcomes: dict[str, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    """Revision and measures by interaction."""
    settled: bool = False

    def means(self) -> dict[str, float]:
        """Return the means of the outcomes, by measure; without measures that no outcome has."""
        values = defaultdict[str, list[float]](list)
        for _, found in self.outcomes.values():
            for name, value in found.items():
                values[name].append(value)
        return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


class Users:
    """The users of one test.

    Args:
        most: number of outcomes of a user that count.
        window_us: how long after their first outcome a user is settled, microseconds of event time.
    """

    def __init__(self, most: int, window_us: int) -> None:
        self._most, self._window_us = most, window_us
        self._users: dict[str, TrialUser] = {}
        self._due: list[tuple[int, str]] = []

    def observe(self, arm: str, name: str, outcome: Outcome, found: Mapping[str, float], at_us: int) -> list[TrialUser]:
        """Add an outcome of the user `name`, at an event time. Return the users that it settles or corrects."""
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = TrialUser(arm, name)
            heapq.heappush(self._due, (at_us + self._window_us, name))
        if user.arm != arm:
            return []
        known = user.outcomes.get(outcome.interaction_id)
        if (known is None and user.settled) or (known is not None and known[0] >= outcome.revision):
            return []
        user.outcomes[outcome.interaction_id] = (outcome.revision, found)
        user.settled = user.settled or len(user.outcomes) == self._most
        return [user] if user.settled else []

    def advance(self, at_us: int) -> list[TrialUser]:
        """Advance event time to `at_us`. Return the users that are settled by it, in order."""
        found = []
        while self._due and self._due[0][0] <= at_us:
            user = self._users.get(heapq.heappop(self._due)[1])
            if user is not None and not user.settled:
                user.settled = True
                found.append(user)
        return found

    def settle_all(self) -> list[TrialUser]:
        """Settle all users, in the order in which their windows end. Return those that were not settled."""
        return self.advance(max((due for due, _ in self._due), default=0))

    def forget(self, name: str) -> None:
        """Delete a user's outcomes. Settled means remain in the sums: they cannot be extracted from these."""
        user = self._users.get(name)
        if user is None:
            return
        user.outcomes.clear()
        if not user.settled:
            # Otherwise a later outcome would count at the end of the window of the deleted ones.
            del self._users[name]
            self._due = [(due, other) for due, other in self._due if other != name]
            heapq.heapify(self._due)


_NUMBER = {Arm.CANARY: CANDIDATE, Arm.STABLE: BASELINE}
"""The arms that are compared."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result of a trial."""

    verdict: GateVerdict
    reason: str
    on_evidence: bool = True
    """False if the limit of time or traffic was reached first."""


class ArmComparison:
    """The comparison of the candidate with the baseline among users.

    Args:
        gate: the settings.
        candidate: version of the canary arm.
        baseline: version of the stable arm.
        share: share of the users in the canary arm.
        started_at: event time of the decision that started it, microseconds.
        origin: means from which candidates must not drift; empty for none.
    """

    def __init__(
        self,
        gate: GateSettings,
        candidate: int,
        baseline: int,
        share: float,
        started_at: int,
        origin: Mapping[str, float],
    ) -> None:
        self._gate, self.started_at = gate, started_at
        self._version_of = {Arm.CANARY: candidate, Arm.STABLE: baseline}
        margin = gate.margin / gate.reward_width
        self.worse = Capital(-margin, Side.BELOW)
        self.not_worse = Capital(-margin, Side.ABOVE)
        self.better = Capital(0.0, Side.ABOVE)
        capitals = (self.worse, self.not_worse, self.better)
        self._rewards = TwoArms(share, difference(gate.reward_width), capitals)
        tolerance = Tolerance(gate.rate_tolerance, gate.ratio_tolerance, gate.guard_alpha, gate.ignored)
        self._guards = ArmGuards(share, tolerance)
        self._drift = FrozenGuards(origin, drift_tolerance(gate), gate.reward_width, None)
        self._users = Users(gate.outcomes_per_user, to_us(gate.user_window_s))
        self._interactions: dict[Arm, set[str]] = {arm: set() for arm in _NUMBER}
        self.conclusion: Conclusion | None = None

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far; those against the first baseline are last."""
        return self._guards.alerts + self._drift.alerts

    def observe(self, outcome: Outcome, at_us: int) -> None:
        """Process an outcome, at an event time; outcomes of neither arm are ignored."""
        self.advance(at_us)
        if self.conclusion is not None or outcome.served_at < self.started_at or outcome.arm not in _NUMBER:
            return
        arm = Arm(outcome.arm)
        if not outcome.version_min == outcome.version_max == self._version_of[arm]:
            return
        self._interactions[arm].add(outcome.interaction_id)
        found = measures(outcome, self._gate.reward_low, self._gate.reward_high)
        self._take(self._users.observe(arm, unit_of(outcome), outcome, found, at_us))
        if len(self._interactions[Arm.CANARY]) >= self._gate.max_interactions:
            self._end("max_interactions")

    def advance(self, at_us: int) -> None:
        if self.conclusion is None:
            self._take(self._users.advance(at_us))
        if at_us - self.started_at >= to_us(self._gate.max_seconds):
            self._end("max_seconds")

    def forget(self, user_id: str) -> None:
        """Delete a user's outcomes, unless they are counted already."""
        self._users.forget(user_id)

    def numbers(self) -> dict[str, float]:
        """Return the current numbers, by name: `canary/...`, `stable/...`, and the evidence."""
        found = {
            "p_worse": self.worse.p_value,
            "p_not_worse": self.not_worse.p_value,
            "p_better": self.better.p_value,
            "e_worse": math.exp(self.worse.log_evidence),
            "e_not_worse": math.exp(self.not_worse.log_evidence),
            "e_better": math.exp(self.better.log_evidence),
            "blocks": float(self._rewards.blocks),
            "alpha": self._gate.alpha,
            "margin": self._gate.margin,
        }
        for arm, number in _NUMBER.items():
            found[f"{arm}/interactions"] = float(len(self._interactions[arm]))
            found[f"{arm}/users"] = float(self._rewards.count(number))
            if self._rewards.count(number):
                found[f"{arm}/{REWARD}"] = self._rewards.mean(number)
            found |= {f"{arm}/{name}": mean for name, mean in self._guards.means(number).items()}
        return found | {f"p_alert/{alert.name}": alert.p_value for alert in self.alerts}

    def _take(self, settled: Iterable[TrialUser]) -> None:
        for user in settled:
            if self.conclusion is None:
                arm, means = Arm(user.arm), user.means()
                if REWARD in means:
                    self._rewards.observe(_NUMBER[arm], user.user_id, means[REWARD])
                self._guards.observe(_NUMBER[arm], user.user_id, means)
                if arm is Arm.CANARY:
                    self._drift.observe(user.user_id, means)
                self.conclusion = self._judge()

    def _judge(self) -> Conclusion | None:
        threshold = -math.log(self._gate.alpha)
        if self.worse.log_evidence >= threshold:
            return Conclusion(GateVerdict.REJECT, f"worse than the baseline by more than {self._gate.margin:g}")
        if self._guards.alerts:
            reason = f"a guardrail changed by more than its tolerance: {names(self._guards.alerts)}"
            return Conclusion(GateVerdict(self._gate.on_alert), reason)
        if self._drift.alerts:
            reason = f"differs from the first baseline by more than the tolerance: {names(self._drift.alerts)}"
            return Conclusion(GateVerdict(self._gate.on_drift), reason)
        if not self._enough_users():
            return None
        if self.better.log_evidence >= threshold:
            return Conclusion(GateVerdict.PROMOTE, "better than the baseline")
        if self.not_worse.log_evidence >= threshold:
            return Conclusion(GateVerdict.PROMOTE, f"not worse than the baseline by more than {self._gate.margin:g}")
        return None

    def _enough_users(self) -> bool:
        return all(self._rewards.count(number) >= self._gate.min_users for number in _NUMBER.values())

    def _end(self, limit: str) -> None:
        """End the comparison at a limit: count all users seen so far, and conclude from the evidence so far."""
        self._take(self._users.settle_all())
        if self.conclusion is not None or not self._enough_users():
            return
        promote = self._gate.promote_without_evidence
        verdict = GateVerdict.PROMOTE if promote else GateVerdict.HOLD
        reason = f"no evidence of harm, nor of its absence, before the limit {limit}"
        self.conclusion = Conclusion(verdict, reason, on_evidence=False)


def unit_of(outcome: Outcome) -> str:
    """Return the user of an outcome; an outcome without a user counts as a separate user."""
    return outcome.user_id or outcome.interaction_id


def drift_tolerance(gate: GateSettings) -> Tolerance:
    """Return the tolerance against numbers of an earlier time."""
    return Tolerance(gate.drift_rate_tolerance, gate.drift_ratio_tolerance, gate.guard_alpha, gate.ignored)


class PromotionWatch:
    """The comparison of a promoted version with its predecessor's results, for a possible roll-back.

    Args:
        gate: the settings.
        version: the promoted version.
        since: event time of the promotion, microseconds.
        before: the predecessor's means in the comparison that promoted the version; empty if there was none.
    """

    def __init__(self, gate: GateSettings, version: int, since: int, before: Mapping[str, float]) -> None:
        self._gate, self.version, self.since = gate, version, since
        self._users = Users(gate.outcomes_per_user, to_us(gate.user_window_s))
        self._guards = FrozenGuards(before, drift_tolerance(gate), gate.reward_width, gate.watch_margin)
        self._counted: set[str] = set()

    def over(self, at_us: int) -> bool:
        """Whether the window has passed."""
        return at_us - self.since > to_us(self._gate.watch_seconds)

    @property
    def users(self) -> int:
        """Number of users that were counted."""
        return len(self._counted)

    @property
    def alerts(self) -> list[Alert]:
        """Alerts for the measures that have collapsed."""
        return self._guards.alerts

    def observe(self, outcome: Outcome, at_us: int) -> None:
        """Process an outcome; only answers by the version after its promotion and within the window count."""
        self.advance(at_us)
        ours = outcome.version_min == outcome.version_max == self.version and outcome.served_at >= self.since
        if ours and not self.over(outcome.served_at):
            found = measures(outcome, self._gate.reward_low, self._gate.reward_high)
            self._take(self._users.observe("", unit_of(outcome), outcome, found, at_us))

    def advance(self, at_us: int) -> None:
        """Advance event time to `at_us`. At the end of the window, all users seen so far count."""
        self._take(self._users.settle_all() if self.over(at_us) else self._users.advance(at_us))

    def forget(self, user_id: str) -> None:
        """Delete a user's outcomes, unless they are counted already."""
        self._users.forget(user_id)

    def _take(self, settled: Iterable[TrialUser]) -> None:
        for user in settled:
            self._counted.add(user.user_id)
            self._guards.observe(user.user_id, user.means())
