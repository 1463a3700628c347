"""Always-valid evidence about the mean of bounded observations: a test after each observation keeps the error bound.

The method is betting (I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random variables by betting", Journal of
the Royal Statistical Society B 86, 2024): against the claim that the mean of x in [-1, 1] is at most m, a capital of 1
is bet at fair or worse odds,

    K_t(l) = product over i <= t of (1 + l * (x_i - m)),    0 <= l < 1 / (1 + m),

and `Capital` is the mean of K_t(l) over a few fixed bets l ("diversified Kelly" there). Under the claim, and whenever
the conditional mean given the past satisfies it, this is a non-negative supermartingale that starts at 1. So the
probability that it ever reaches 1/alpha is at most alpha (Ville's inequality), and 1 over its maximum so far is a
p-value at all times simultaneously. It assumes no distribution, variance or sample size. Therefore it was preferred to
mixtures of normal distributions (mixture SPRT, S. R. Howard and others, "Time-uniform, nonparametric, nonasymptotic
confidence sequences", Annals of Statistics 49, 2021). These need a known sub-Gaussian scale to be exact and then assume
the worst variance, or use an estimated variance and are valid only for large samples. Their stopping times are close.

Two arms are compared (`TwoArms`) by matching their members in order of arrival, in blocks of one fixed shape (for
example 1 candidate to 4 baseline members, if a fifth of the users get the candidate). Each block gives one number in
[-1, 1] to bet on: the contrast of its members. Invariants:

- only the order of arrival decides which members a block has, so that a block's expected contrast is the difference of
  the arms, for any sizes of the arms; a drift that affects both arms equally cancels within the block;
- the correction of a member corrects its block, and the evidence becomes that of the corrected numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

BETS = tuple(0.99 * 0.5**power for power in range(6))
"""Shares of the greatest bet that cannot lose all capital. Each is half of the previous one: a bet that is wrong by a
factor of the square root of two still grows at 5/6 of the best rate or more, and six bets cost log 6 of evidence."""


class Side(Enum):
    """The side of a bound on which evidence for the mean is collected."""

    ABOVE = 1
    """Evidence that the mean is above the bound."""
    BELOW = -1
    """Evidence that the mean is below the bound."""


class Capital:
    """Evidence that the mean of observations in [-1, 1] is on one side of a bound.

    Args:
        bound: the mean that is bet against, strictly between -1 and 1.
        side: the side for which evidence is collected.
    """

    __slots__ = ("_bets", "_bound", "_logs", "_sign", "peak")

    def __init__(self, bound: float, side: Side) -> None:
        if not -1.0 < bound < 1.0:
            raise ValueError(f"a bound of {bound:g} is impossible: it must be strictly between -1 and 1")
        self._sign = side.value
        self._bound = bound * side.value
        self._bets = tuple(bet / (1.0 + self._bound) for bet in BETS)
        self._logs = [0.0] * len(BETS)
        self.peak = 0.0
        """The greatest log-evidence so far; at least 0, the value without observations."""

    def bet(self, observed: float) -> None:
        """Add one observation. Raises ValueError outside of [-1, 1]: the guarantee would not hold."""
        self._move(observed, 1.0)
        self.peak = max(self.peak, self.log_evidence)

    def correct(self, before: float, after: float) -> None:
        """Replace an earlier observation: the capital becomes the one with the corrected observation."""
        self._move(before, -1.0)
        self.bet(after)

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the current capital."""
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
    """Return log(mean(exp(logs))), without overflow."""
    top = max(logs)
    return top + math.log(math.fsum(math.exp(log - top) for log in logs) / len(logs))


CANDIDATE, BASELINE = 0, 1
WAITING_BLOCKS = 64
"""An arm's members for at most this many blocks wait for the other arm; older ones are dropped, as too old to match."""

Contrast = Callable[[Sequence[float], Sequence[float]], float]
"""(candidate's members, baseline's members) -> a number in [-1, 1], 0 if they are equal."""


def difference(width: float) -> Contrast:
    """Return a contrast: the difference of the means, in units of `width`, the greatest possible difference."""

    def contrast(candidate: Sequence[float], baseline: Sequence[float]) -> float:
        apart = math.fsum(candidate) / len(candidate) - math.fsum(baseline) / len(baseline)
        return min(1.0, max(-1.0, apart / width))

    return contrast


def log_ratio(widest: float) -> Contrast:
    """Return a contrast: the mean log of the members' ratios, clipped to `widest` and its inverse, over log(widest)."""

    def contrast(candidate: Sequence[float], baseline: Sequence[float]) -> float:
        ratios = [_cut_log(one, other, widest) for one in candidate for other in baseline]
        return math.fsum(ratios) / len(ratios)

    return contrast


def _cut_log(one: float, other: float, widest: float) -> float:
    if one <= 0 or other <= 0:
        return float((one > other) - (one < other))
    return min(1.0, max(-1.0, math.log(one / other) / math.log(widest)))


def block_shape(share: float) -> tuple[int, int]:
    """Return the numbers of candidate and baseline members of a block, for the candidate's share: (1, 4) for 0.2."""
    return max(1, round(share / (1.0 - share))), max(1, round((1.0 - share) / share))


@dataclass(slots=True)
class _Block:
    members: tuple[list[str], list[str]]
    contrast: float


class TwoArms:
    """The blocks of two arms and the capitals that bet on them.

    Args:
        share: share of the users who get the candidate, strictly between 0 and 1.
        contrast: computes a block's number.
        capitals: each bets on every block.
    """

    def __init__(self, share: float, contrast: Contrast, capitals: Sequence[Capital]) -> None:
        self._shape = block_shape(share)
        self._contrast, self._capitals = contrast, capitals
        self._values: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._waiting = tuple(deque[str](maxlen=WAITING_BLOCKS * size) for size in self._shape)
        self._block_of: dict[str, _Block] = {}
        self.blocks = 0
        """Number of blocks that were bet on."""

    def count(self, arm: int) -> int:
        return len(self._values[arm])

    def mean(self, arm: int) -> float:
        """Return the mean of an arm's members; NaN if there are none."""
        values = self._values[arm].values()
        return math.fsum(values) / len(values) if values else math.nan

    def means(self) -> tuple[float, float]:
        return self.mean(CANDIDATE), self.mean(BASELINE)

    def observe(self, arm: int, member: str, value: float) -> None:
        """Add a member's number; a second number of a member is a correction. No member is in both arms."""
        known = member in self._values[arm]
        self._values[arm][member] = value
        if known:
            block = self._block_of.get(member)
            if block is not None:
                before, block.contrast = block.contrast, self._of(block.members)
                for capital in self._capitals:
                    capital.correct(before, block.contrast)
            return
        self._waiting[arm].append(member)
        if all(len(waiting) >= size for waiting, size in zip(self._waiting, self._shape, strict=True)):
            candidate, baseline = (
                [waiting.popleft() for _ in range(size)]
                for waiting, size in zip(self._waiting, self._shape, strict=True)
            )
            members = (candidate, baseline)
            block = _Block(members, self._of(members))
            self._block_of |= dict.fromkeys([*candidate, *baseline], block)
            self.blocks += 1
            for capital in self._capitals:
                capital.bet(block.contrast)

    def _of(self, members: tuple[list[str], list[str]]) -> float:
        candidate, baseline = ([self._values[arm][member] for member in names] for arm, names in enumerate(members))
        return self._contrast(candidate, baseline)
