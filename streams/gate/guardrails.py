"""Guardrails: measures in addition to the reward, each with an alert that is valid at all times. Pure.

There are two comparisons, both by user: with the arm that gets the baseline at the same time (`ArmGuards`), and with
numbers that were frozen earlier (`FrozenGuards`), since many small steps, each within its tolerance, can add up. The
alerts of one comparison share its error bound: if no measure is beyond its tolerance, the probability of any alert is
at most that. An alert is permanent.

Measures of an outcome are its reward, and quantities that a reward does not show reliably. Rates are counted over all
outcomes, including excluded ones and those without a reported signal: an answer must not escape a guardrail by its
exclusion from the reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Prefix of the exclusion's reason."""

_SIGNALS = {
    EDIT_RATE: SignalKind.EDIT_MADE,
    QUESTION_RATE: SignalKind.QUESTION_ASKED,
    TOOL_ERROR_RATE: SignalKind.TOOL_ERROR,
}


WIDEST_RATIO = 8.0
"""Greater ratios are clipped to this one: a single user must not decide."""


class Guardrail(NamedTuple):
    """A measure that is watched in addition to the reward."""

    name: str
    harm: tuple[Side, ...]
    """The directions in which it must not change."""
    ratio: bool
    """Compared by ratio, as a positive quantity; otherwise by difference, as a rate from 0 to 1."""

    def contrast(self) -> Contrast:
        """Return the contrast for the comparison of two arms."""
        return log_ratio(WIDEST_RATIO) if self.ratio else difference(1.0)


UP, DOWN = Side.ABOVE, Side.BELOW
GUARDRAILS = (
    Guardrail(EDIT_RATE, (DOWN,), ratio=False),
    Guardrail(QUESTION_RATE, (UP,), ratio=False),
    Guardrail(TOOL_ERROR_RATE, (UP,), ratio=False),
    Guardrail(TOKENS, (UP, DOWN), ratio=True),
    Guardrail(LATENCY_MS, (UP,), ratio=True),
    *(Guardrail(EXCLUDED + reason, (UP, DOWN), ratio=False) for reason in OutcomeExclusion),
)
"""The measures that are watched in addition to the reward."""


def measures(outcome: Outcome, low: float, high: float) -> dict[str, float]:
    """Return the measures of one outcome, by name; without a reward if it is excluded.

    Args:
        low: least reward; a lower one is clipped to it.
        high: greatest reward; a greater one is clipped to it.
    """
    found = {name: min(1.0, max(0.0, outcome.observed.get(kind.value, 0.0))) for name, kind in _SIGNALS.items()}
    found |= {EXCLUDED + reason: float(outcome.exclusion == reason) for reason in OutcomeExclusion}
    found |= {TOKENS: float(outcome.sampled_tokens), LATENCY_MS: outcome.latency_ms}
    if outcome.reward is not None:
        found[REWARD] = min(high, max(low, outcome.reward))
    return found


class Alert(NamedTuple):
    """A measure that has changed by more than its tolerance."""

    name: str
    candidate: float
    baseline: float
    p_value: float
    """p-value of any alert in the comparison: the measure's own, times the number of watched measures."""

    def __str__(self) -> str:
        return f"{self.name} is {self.candidate:.4g} against {self.baseline:.4g} (p = {self.p_value:.2g})"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The difference that is allowed before an alert."""

    rate: float
    """Difference of two rates."""
    ratio: float
    """Factor between two positive quantities."""
    alpha: float
    """Probability of any alert if no measure is beyond its tolerance."""
    ignored: frozenset[str] = frozenset()
    """Measures without an alert."""

    def guardrails(self) -> list[Guardrail]:
        return [guardrail for guardrail in GUARDRAILS if guardrail.name not in self.ignored]

    def capitals(self, guardrail: Guardrail) -> list[Capital]:
        """Return the capitals that bet on a contrast beyond the tolerance, one for each harmful side."""
        bound = math.log(self.ratio) / math.log(WIDEST_RATIO) if guardrail.ratio else self.rate
        return [Capital(side.value * bound, side) for side in guardrail.harm]


class Guards:
    """The watched measures, each with an alert.

    Args:
        alpha: probability of any alert if no measure is beyond its tolerance.
        capitals: the capitals of each watched measure. The mean of two supermartingales is one.
    """

    def __init__(self, alpha: float, capitals: Mapping[str, Sequence[Capital]]) -> None:
        self._capitals, self._measures = capitals, max(1, len(capitals))
        self._threshold = math.log(self._measures / alpha)
        self._alerts: dict[str, Alert] = {}

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far, in order."""
        return list(self._alerts.values())

    def look(self, name: str, means: Callable[[], tuple[float, float]]) -> None:
        """Check the evidence about a measure; `means` returns candidate's and baseline's, called for an alert."""
        evidence = log_mean_exp([capital.log_evidence for capital in self._capitals[name]])
        if evidence >= self._threshold and name not in self._alerts:
            self._alerts[name] = Alert(name, *means(), self._measures * math.exp(-evidence))


class ArmGuards(Guards):
    """The guardrails between a candidate and a baseline that are served at the same time."""

    def __init__(self, share: float, tolerance: Tolerance) -> None:
        watched = tolerance.guardrails()
        super().__init__(tolerance.alpha, {guard.name: tolerance.capitals(guard) for guard in watched})
        self._arms = {guard.name: TwoArms(share, guard.contrast(), self._capitals[guard.name]) for guard in watched}

    def observe(self, arm: int, user_id: str, means: Mapping[str, float]) -> None:
        """Add a settled user, or their corrected numbers."""
        for name, arms in self._arms.items():
            if name in means:
                arms.observe(arm, user_id, means[name])
                self.look(name, arms.means)

    def means(self, arm: int) -> dict[str, float]:
        """Return the means over an arm's users, by measure; without measures that no user has."""
        return {name: arms.mean(arm) for name, arms in self._arms.items() if arms.count(arm)}


class FrozenGuards(Guards):
    """The guardrails between a version and numbers that were frozen earlier; they may include the reward.

    Args:
        frozen: means by measure; other measures are not watched.
        tolerance: the allowed differences.
        reward_width: greatest reward minus least.
        reward_tolerance: how far the reward's mean may fall. None: the reward is not watched.
    """

    def __init__(
        self, frozen: Mapping[str, float], tolerance: Tolerance, reward_width: float, reward_tolerance: float | None
    ) -> None:
        self._frozen = dict(frozen)
        capitals = {guard.name: tolerance.capitals(guard) for guard in tolerance.guardrails()}
        self._contrasts = {guard.name: guard.contrast() for guard in tolerance.guardrails()}
        if reward_tolerance is not None:
            capitals[REWARD] = [Capital(-reward_tolerance / reward_width, Side.BELOW)]
            self._contrasts[REWARD] = difference(reward_width)
        watched = sorted(capitals.keys() & self._frozen.keys())
        super().__init__(tolerance.alpha, {name: capitals[name] for name in watched})
        self._values: dict[str, dict[str, float]] = {name: {} for name in watched}

    def observe(self, user_id: str, means: Mapping[str, float]) -> None:
        """Add a settled user, or their corrected numbers."""
        for name, values in self._values.items():
            if name in means:
                before, value = values.get(user_id), means[name]
                contrast, frozen = self._contrasts[name], self._frozen[name]
                for capital in self._capitals[name]:
                    if before is None:
                        capital.bet(contrast([value], [frozen]))
                    else:
                        capital.correct(contrast([before], [frozen]), contrast([value], [frozen]))
                values[user_id] = value
                self.look(name, partial(self._means, name))

    def _means(self, name: str) -> tuple[float, float]:
        values = self._values[name].values()
        return math.fsum(values) / len(values), self._frozen[name]


def names(alerts: Iterable[Alert]) -> str:
    return "; ".join(str(alert) for alert in alerts)
