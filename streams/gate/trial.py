"""One candidate's trial: its bench result, then its comparison with the baseline among users. Pure.

The comparison begins with the decision that gives the canary pool its share, and counts only answers that were served
after it, whole by the candidate in the canary arm or whole by the baseline in the stable arm. The first conclusion
stands: however often it is read, a verdict by evidence is wrong with a chance of `alpha` at most. The conclusion
depends on the outcomes in the log's order and on event time alone, so that a restarted gate concludes the same.

Outcomes are gathered by user, the unit that arms are compared by. Whole users are assigned to arms, and answers to one
user have their taste in common. Taken one by one they would look like far more evidence than they are, so that an A/A
test raises false alarms at any level (`bench_gate.py` shows how often). A user therefore counts once in a test: by the
means of their first outcomes in it. What stays true:

- a user is settled when they have `most` outcomes, or `window_us` of event time after their first; later ones do not
  count, except for corrections of what counted;
- a user belongs to the arm where they were first seen; what they say elsewhere does not count;
- the same outcome twice changes nothing, and a higher revision replaces a lower one.
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
        """By measure; without a measure that none of their outcomes has."""
        values = defaultdict[str, list[float]](list)
        for _, found in self.outcomes.values():
            for name, value in found.items():
                values[name].append(value)
        return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


class Users:
    """The users of one test.

    Args:
        most: outcomes of a user that count.
        window_us: how long after their first outcome a user is waited for, microseconds of event time.
    """

    def __init__(self, most: int, window_us: int) -> None:
        self._most, self._window_us = most, window_us
        self._users: dict[str, TrialUser] = {}
        self._due: list[tuple[int, str]] = []

    def observe(self, arm: str, name: str, outcome: Outcome, found: Mapping[str, float], at_us: int) -> list[TrialUser]:
        """Take an outcome of the user `name` in, at an event time. Returns who is settled or corrected by it."""
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
        """Event time has come to `at_us`: who is settled by it, in order."""
        found = []
        while self._due and self._due[0][0] <= at_us:
            user = self._users.get(heapq.heappop(self._due)[1])
            if user is not None and not user.settled:
                user.settled = True
                found.append(user)
        return found

    def settle_all(self) -> list[TrialUser]:
        """Settle everybody who was seen, in the order of their windows' ends."""
        return self.advance(max((due for due, _ in self._due), default=0))

    def forget(self, name: str) -> None:
        """Let go of a user's outcomes. Their settled means stand: a sum cannot be asked for one of its terms."""
        self._users.pop(name, None)


_NUMBER = {Arm.CANARY: CANDIDATE, Arm.STABLE: BASELINE}
"""The arms that are compared."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result of a trial."""

    verdict: GateVerdict
    reason: str
    on_evidence: bool = True
    """False where time or traffic ran out first."""


class ArmComparison:
    """The candidate against the baseline among users.

    Args:
        gate: the settings.
        candidate: version of the canary arm.
        baseline: version of the stable arm.
        share: part of the users in the canary arm.
        started_at: event time of the decision that began it, microseconds.
        origin: means that candidates must not drift away from; empty for none.
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
        self._guards = ArmGuards(share, tolerance(gate))
        self._drift = FrozenGuards(origin, drift_tolerance(gate), gate.reward_width, None)
        self._users = Users(gate.outcomes_per_user, to_us(gate.user_window_s))
        self._interactions: dict[Arm, set[str]] = {arm: set() for arm in _NUMBER}
        self.conclusion: Conclusion | None = None

    @property
    def alerts(self) -> list[Alert]:
        """Every alert so far, those against the first baseline last."""
        return self._guards.alerts + self._drift.alerts

    def observe(self, outcome: Outcome, at_us: int) -> None:
        """Take an outcome in, at an event time; what belongs to neither arm is left alone."""
        self.advance(at_us)
        arm = self._arm(outcome)
        if arm is None or self.conclusion is not None:
            return
        self._interactions[arm].add(outcome.interaction_id)
        found = measures(outcome, self._gate.reward_low, self._gate.reward_high)
        self._take(self._users.observe(arm, unit_of(outcome), outcome, found, at_us))
        if len(self._interactions[Arm.CANARY]) >= self._gate.max_interactions:
            self._end("as many outcomes as may be")

    def advance(self, at_us: int) -> None:
        """Event time has come to `at_us`."""
        if self.conclusion is None:
            self._take(self._users.advance(at_us))
        if at_us - self.started_at >= to_us(self._gate.max_seconds):
            self._end("as long as may be")

    def forget(self, user_id: str) -> None:
        """Let go of what a user said, as far as they are not counted yet."""
        self._users.forget(user_id)

    def numbers(self) -> dict[str, float]:
        """The numbers that are known now, by name: `canary/...`, `stable/...`, and the evidence."""
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

    def _arm(self, outcome: Outcome) -> Arm | None:
        if outcome.served_at < self.started_at or outcome.arm not in _NUMBER:
            return None
        arm = Arm(outcome.arm)
        return arm if outcome.version_min == outcome.version_max == self._version_of[arm] else None

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
            said = f"a guardrail has moved: {names(self._guards.alerts)}"
            return Conclusion(GateVerdict(self._gate.on_alert.value), said)
        if self._drift.alerts:
            said = f"drifted away from the first baseline: {names(self._drift.alerts)}"
            return Conclusion(GateVerdict(self._gate.on_drift.value), said)
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
        """A limit is reached: all users seen so far are counted, and the evidence so far decides."""
        self._take(self._users.settle_all())
        if self.conclusion is not None or not self._enough_users():
            return
        promote = self._gate.promote_without_evidence
        verdict = GateVerdict.PROMOTE if promote else GateVerdict.HOLD
        said = f"no evidence of harm, nor of its absence, after {limit}"
        self.conclusion = Conclusion(verdict, said, on_evidence=False)


def unit_of(outcome: Outcome) -> str:
    """The user that an outcome counts for; one without a user is a user of its own."""
    return outcome.user_id or outcome.interaction_id


def tolerance(gate: GateSettings) -> Tolerance:
    """Against a baseline served at the same time."""
    return Tolerance(gate.rate_tolerance, gate.ratio_tolerance, gate.guard_alpha, gate.ignored)


def drift_tolerance(gate: GateSettings) -> Tolerance:
    """Against numbers of an earlier time."""
    return Tolerance(gate.drift_rate_tolerance, gate.drift_ratio_tolerance, gate.guard_alpha, gate.ignored)


class PromotionWatch:
    """A promoted version against what its predecessor did, ready to be rolled back.

    Args:
        gate: the settings.
        version: the promoted version.
        since: event time of the promotion, microseconds.
        before: the predecessor's means in the comparison that promoted the version; empty where there was none.
    """

    def __init__(self, gate: GateSettings, version: int, since: int, before: Mapping[str, float]) -> None:
        self._gate, self.version, self.since = gate, version, since
        self._users = Users(gate.outcomes_per_user, to_us(gate.user_window_s))
        self._guards = FrozenGuards(before, drift_tolerance(gate), gate.reward_width, gate.watch_margin)
        self.users = 0
        """How many users were counted."""

    def over(self, at_us: int) -> bool:
        """Whether the window has passed."""
        return at_us - self.since > to_us(self._gate.watch_seconds)

    @property
    def alerts(self) -> list[Alert]:
        """The measures that have collapsed."""
        return self._guards.alerts

    def observe(self, outcome: Outcome, at_us: int) -> None:
        """Take an outcome in; only what the version served after its promotion counts, within the window."""
        self.advance(at_us)
        ours = outcome.version_min == outcome.version_max == self.version and outcome.served_at >= self.since
        if ours and not self.over(outcome.served_at):
            found = measures(outcome, self._gate.reward_low, self._gate.reward_high)
            self._take(self._users.observe("", unit_of(outcome), outcome, found, at_us))

    def advance(self, at_us: int) -> None:
        """Event time has come to `at_us`."""
        self._take(self._users.advance(at_us))

    def forget(self, user_id: str) -> None:
        """Let go of what a user said, as far as they are not counted yet."""
        self._users.forget(user_id)

    def _take(self, settled: Iterable[TrialUser]) -> None:
        for user in settled:
            self.users += 1
            self._guards.observe(user.user_id, user.means())
