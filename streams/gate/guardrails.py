"""Guardrails: measures beside the reward, each with an alert that is valid at every moment. Pure.

Two comparisons, both by user: with the arm that is served the baseline at the same time (`ArmGuards`), and with numbers
that were frozen earlier (`FrozenGuards`), since many small steps, each within its tolerance, can go a long way. The
alerts of one comparison share its level, so that a comparison that is as it was gives any alert at all with a chance of
at most that. An alert stays.

Measures of an outcome are its reward, and beside it what a reward cannot be trusted to show. Rates are counted over
every outcome that came, excluded ones as well and whether the product reported the signal or not: an answer must not
leave a guardrail by being left out of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from tidemill.schemas.records import Outcome, OutcomeExclusion, SignalKind
from tidemill.streams.gate.sequential import Capital, Contrast, Side, TwoArms, difference, log_mean_exp, log_ratio

REWARD = "reward"
EDIT_RATE = "edit_rate"
QUESTION_RATE = "question_rate"
TOOL_ERROR_RATE = "tool_error_rate"
TOKENS = "tokens"
LATENCY_MS = "latency_ms"
EXCLUDED = "excluded/"
"""Before the reason of an exclusion."""

_SIGNALS = {
    EDIT_RATE: SignalKind.EDIT_MADE,
    QUESTION_RATE: SignalKind.QUESTION_ASKED,
    TOOL_ERROR_RATE: SignalKind.TOOL_ERROR,
}


class Harm(Enum):
    """Which way a guardrail must not move."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"


class Guardrail(NamedTuple):
    """A measure that is watched beside the reward."""

    name: str
    harm: Harm
    ratio: bool
    """Compared by ratio, as a positive quantity; else by difference, as a rate from 0 to 1."""


GUARDRAILS = (
    Guardrail(EDIT_RATE, Harm.DOWN, ratio=False),
    Guardrail(QUESTION_RATE, Harm.UP, ratio=False),
    Guardrail(TOOL_ERROR_RATE, Harm.UP, ratio=False),
    Guardrail(TOKENS, Harm.EITHER, ratio=True),
    Guardrail(LATENCY_MS, Harm.UP, ratio=True),
    *(Guardrail(EXCLUDED + reason, Harm.EITHER, ratio=False) for reason in OutcomeExclusion),
)
"""What is watched beside the reward."""


def measures(outcome: Outcome, low: float, high: float) -> dict[str, float]:
    """The measures of one outcome, by name; no reward for an excluded one.

    Args:
        low: least reward; a lower one counts as this.
        high: greatest reward.
    """
    found = {name: min(1.0, max(0.0, outcome.observed.get(kind.value, 0.0))) for name, kind in _SIGNALS.items()}
    found |= {EXCLUDED + reason: float(outcome.exclusion == reason) for reason in OutcomeExclusion}
    found |= {TOKENS: float(outcome.sampled_tokens), LATENCY_MS: outcome.latency_ms}
    if outcome.reward is not None:
        found[REWARD] = min(high, max(low, outcome.reward))
    return found


WIDEST_RATIO = 8.0
"""Ratios beyond count as this one: a single user must not decide."""


class Alert(NamedTuple):
    """A measure that has moved by more than its tolerance."""

    name: str
    candidate: float
    baseline: float
    p_value: float
    """Of any alert in the comparison: the measure's own, times how many measures are watched."""

    def __str__(self) -> str:
        return f"{self.name} is {self.candidate:.4g} against {self.baseline:.4g} (p = {self.p_value:.2g})"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may be, before it is an alert."""

    rate: float
    """Difference of two rates."""
    ratio: float
    """Factor between two positive quantities."""
    alpha: float
    """Chance of any alert where nothing is beyond tolerance."""
    ignored: frozenset[str] = frozenset()
    """Measures without an alert."""

    def guardrails(self) -> list[Guardrail]:
        """What is watched."""
        return [guardrail for guardrail in GUARDRAILS if guardrail.name not in self.ignored]

    def bound(self, guardrail: Guardrail) -> float:
        """The tolerated contrast."""
        return math.log(self.ratio) / math.log(WIDEST_RATIO) if guardrail.ratio else self.rate


class _Evidence:
    """Evidence that a contrast is beyond its bound, on the side that does harm or on either."""

    def __init__(self, harm: Harm, bound: float) -> None:
        self.capitals = []
        if harm is not Harm.DOWN:
            self.capitals.append(Capital(bound, Side.ABOVE))
        if harm is not Harm.UP:
            self.capitals.append(Capital(-bound, Side.BELOW))

    @property
    def log(self) -> float:
        """The mean of two supermartingales is one."""
        return log_mean_exp([capital.log_evidence for capital in self.capitals])


class _Bell:
    """Rings once for each measure."""

    def __init__(self, alpha: float, measures: int) -> None:
        self._measures = max(1, measures)
        self._threshold = math.log(self._measures / alpha)
        self.alerts: dict[str, Alert] = {}

    def hear(self, name: str, log_evidence: float, means: Callable[[], tuple[float, float]]) -> None:
        """`means`: candidate's and baseline's, asked for when it rings."""
        if log_evidence >= self._threshold and name not in self.alerts:
            self.alerts[name] = Alert(name, *means(), self._measures * math.exp(-log_evidence))


class ArmGuards:
    """Every guardrail between a candidate and a baseline that are served at the same time."""

    def __init__(self, share: float, tolerance: Tolerance) -> None:
        watched = tolerance.guardrails()
        self._bell = _Bell(tolerance.alpha, len(watched))
        self._evidence = {guard.name: _Evidence(guard.harm, tolerance.bound(guard)) for guard in watched}
        self._arms = {
            guard.name: TwoArms(share, _contrast(guard), self._evidence[guard.name].capitals) for guard in watched
        }

    def observe(self, arm: int, user_id: str, means: Mapping[str, float]) -> None:
        """Take a settled user in, or their corrected numbers."""
        for name, arms in self._arms.items():
            if name in means:
                arms.observe(arm, user_id, means[name])
                self._bell.hear(name, self._evidence[name].log, arms.means)

    @property
    def alerts(self) -> Sequence[Alert]:
        """Measures that have moved, in the order in which they did."""
        return list(self._bell.alerts.values())

    def means(self, arm: int) -> dict[str, float]:
        """Mean over an arm's users, by measure; without measures that nobody has."""
        return {name: arms.mean(arm) for name, arms in self._arms.items() if arms.count(arm)}


class FrozenGuards:
    """Measures of one version against numbers that were frozen before, the reward too where it is among them.

    Args:
        frozen: means by measure; measures that it does not have are not watched.
        tolerance: what may be.
        reward_width: greatest reward minus least.
        reward_tolerance: how far the reward's mean may fall. None: the reward is not watched.
    """

    def __init__(
        self, frozen: Mapping[str, float], tolerance: Tolerance, reward_width: float, reward_tolerance: float | None
    ) -> None:
        self._frozen = dict(frozen)
        self._evidence = {g.name: _Evidence(g.harm, tolerance.bound(g)) for g in tolerance.guardrails()}
        self._contrasts = {guard.name: _contrast(guard) for guard in tolerance.guardrails()}
        if reward_tolerance is not None:
            self._evidence[REWARD] = _Evidence(Harm.DOWN, reward_tolerance / reward_width)
            self._contrasts[REWARD] = difference(reward_width)
        watched = self._evidence.keys() & self._frozen.keys()
        self._bell = _Bell(tolerance.alpha, len(watched))
        self._values: dict[str, dict[str, float]] = {name: {} for name in sorted(watched)}

    def observe(self, user_id: str, means: Mapping[str, float]) -> None:
        """Take a settled user in, or their corrected numbers."""
        for name, values in self._values.items():
            if name in means:
                before, value = values.get(user_id), means[name]
                contrast, frozen = self._contrasts[name], [self._frozen[name]]
                for capital in self._evidence[name].capitals:
                    if before is None:
                        capital.bet(contrast([value], frozen))
                    else:
                        capital.correct(contrast([before], frozen), contrast([value], frozen))
                values[user_id] = value
                self._bell.hear(name, self._evidence[name].log, partial(self._means, name))

    def _means(self, name: str) -> tuple[float, float]:
        values = self._values[name].values()
        return math.fsum(values) / len(values), self._frozen[name]

    @property
    def alerts(self) -> Sequence[Alert]:
        """Measures that have moved, in the order in which they did."""
        return list(self._bell.alerts.values())


def _contrast(guardrail: Guardrail) -> Contrast:
    return log_ratio(WIDEST_RATIO) if guardrail.ratio else difference(1.0)


def names(alerts: Iterable[Alert]) -> str:
    """Alerts as one line."""
    return "; ".join(str(alert) for alert in alerts)
