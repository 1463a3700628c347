"""Always-valid evidence about the mean of bounded observations: looked at after every one of them, and still at level.

The method is betting (I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random variables by betting", Journal of
the Royal Statistical Society B 86, 2024): against the claim that the mean of x in [-1, 1] is at most m, a capital of 1
is bet at fair or worse odds,

    K_t(l) = product over i <= t of (1 + l * (x_i - m)),    0 <= l < 1 / (1 + m),

and `Capital` is the mean of K_t(l) over a few fixed bets l ("diversified Kelly" there). Under the claim, and whenever
the mean given the past keeps to it, this is a non-negative supermartingale that starts at 1, so that it ever reaches
1/alpha with a probability of at most alpha (Ville's inequality). Hence 1 over its maximum so far is a p-value at every
moment at once. No distribution, variance or sample size is assumed: that is why it was taken before mixtures of normal
distributions (mixture SPRT, S. R. Howard and others, "Time-uniform, nonparametric, nonasymptotic confidence sequences",
Annals of Statistics 49, 2021), which need a known sub-Gaussian scale to be exact and then pay for the worst variance,
or a plugged-in variance, and then promise something about large samples only. Their stopping times are close.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

BETS = tuple(0.99 * 0.5**power for power in range(6))
"""Shares of the greatest bet that cannot ruin. Halves: a bet that is off by a factor of the square root of two still
grows at 5/6 of the best rate or more, and six of them cost log 6 of the evidence."""


class Side(Enum):
    """Which claim about the mean is bet against."""

    ABOVE = 1
    """Evidence that the mean is above the bound."""
    BELOW = -1
    """Evidence that the mean is below the bound."""


class Capital:
    """Evidence that the mean of observations in [-1, 1] lies on one side of a bound.

    Args:
        bound: the mean that is bet against, strictly between -1 and 1.
        side: the side on which the evidence is looked for.
    """

    __slots__ = ("_bets", "_bound", "_logs", "_sign", "peak")

    def __init__(self, bound: float, side: Side) -> None:
        if not -1.0 < bound < 1.0:
            raise ValueError(f"a bound of {bound:g} leaves nothing to bet on: it must lie strictly between -1 and 1")
        self._sign = side.value
        self._bound = bound * side.value
        self._bets = tuple(bet / (1.0 + self._bound) for bet in BETS)
        self._logs = [0.0] * len(BETS)
        self.peak = 0.0
        """The greatest log-evidence so far; never below 0, which is that of no observation."""

    def bet(self, observed: float) -> None:
        """Take one observation in. Raises ValueError outside of [-1, 1]: the guarantee would be gone."""
        self._move(observed, 1.0)
        self.peak = max(self.peak, self.log_evidence)

    def correct(self, before: float, after: float) -> None:
        """An observation was other than it was said to be: the capital becomes the one that it would have been."""
        self._move(before, -1.0)
        self.bet(after)

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the capital now."""
        return log_mean_exp(self._logs)

    @property
    def p_value(self) -> float:
        """Always-valid p-value of the claim that is bet against: 1 / (greatest capital so far)."""
        return math.exp(-self.peak)

    def _move(self, observed: float, direction: float) -> None:
        if not -1.0 <= observed <= 1.0:
            raise ValueError(f"an observation of {observed} is outside of [-1, 1]")
        gain = self._sign * observed - self._bound
        self._logs = [log + direction * math.log1p(bet * gain) for log, bet in zip(self._logs, self._bets, strict=True)]


def log_mean_exp(logs: Sequence[float]) -> float:
    """log(mean(exp(logs))), without overflow."""
    top = max(logs)
    return top + math.log(math.fsum(math.exp(log - top) for log in logs) / len(logs))
