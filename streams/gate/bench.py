"""The offline bench: the success rate of each version on held-out tasks, from its own rollouts. Pure.

A version's result is computed once, when it has the required number of rollouts, and never again: a second test with
more rollouts would be a second chance. Bounds are those of C. J. Clopper and E. S. Pearson (Biometrika 26, 1934), exact
for equal probabilities. Held-out tasks differ in difficulty, which only reduces the variance of the sum of successes
(W. Hoeffding, Annals of Mathematical Statistics 27, 1956), so that the bounds are conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.schemas.records import Group, Mode, RolloutStatus

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Successes of a version on held-out tasks."""

    successes: int
    rollouts: int

    @property
    def rate(self) -> float:
        """Share of the rollouts that succeeded."""
        return self.successes / self.rollouts

    def lower(self, alpha: float) -> float:
        """Return the lower bound: the true rate is below it with a probability of at most `alpha`."""
        if self.successes == 0:
            return 0.0
        return _crossing(lambda rate: 1.0 - _at_most(self.successes - 1, self.rollouts, rate) >= alpha)

    def upper(self, alpha: float) -> float:
        """Return the upper bound: the true rate is above it with a probability of at most `alpha`."""
        if self.successes == self.rollouts:
            return 1.0
        return _crossing(lambda rate: _at_most(self.successes, self.rollouts, rate) < alpha)

    def is_significantly_worse(self, other: BenchResult, margin: float, alpha: float) -> bool:
        """Return whether the rate is lower than the other's by more than `margin`, with error probability `alpha`."""
        return self.upper(alpha / 2) < other.lower(alpha / 2) - margin


def _at_most(successes: int, rollouts: int, rate: float) -> float:
    """Return P(binomial(rollouts, rate) <= successes), for a rate strictly between 0 and 1."""
    terms = []
    for count in range(successes + 1):
        ways = math.lgamma(rollouts + 1) - math.lgamma(count + 1) - math.lgamma(rollouts - count + 1)
        terms.append(math.exp(ways + count * math.log(rate) + (rollouts - count) * math.log1p(-rate)))
    return min(1.0, math.fsum(terms))


def _crossing(holds: Callable[[float], bool]) -> float:
    """Return the lowest rate at which `holds` is true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class Bench:
    """Bench results by version.

    Args:
        rollouts: number of rollouts for a result.
    """

    def __init__(self, rollouts: int) -> None:
        self._needed = rollouts
        self._tallies: dict[int, BenchResult] = {}
        self._seen: dict[int, set[str]] = {}

    def observe(self, group: Group) -> list[tuple[int, BenchResult]]:
        """Process a group. Only completed held-out rollouts that one version sampled completely count, each once.

        All members of a group are counted together, so that rollouts that finish first have no preference. Returns the
        versions whose results the group completes.
        """
        if group.mode is not Mode.EVAL:
            return []
        counted = [
            member
            for member in group.members
            if member.version_min == member.version_max
            and member.status is RolloutStatus.COMPLETED
            and member.success is not None
            and not self.complete(member.version_min)
        ]
        for member in counted:
            served, seen = member.version_min, self._seen.setdefault(member.version_min, set())
            if member.rollout_id not in seen:
                seen.add(member.rollout_id)
                tally = self.tally(served)
                self._tallies[served] = BenchResult(tally.successes + bool(member.success), tally.rollouts + 1)
        done = [version for version in sorted({m.version_min for m in counted}) if self.complete(version)]
        for version in done:
            del self._seen[version]
        return [(version, self.tally(version)) for version in done]

    def tally(self, version: int) -> BenchResult:
        return self._tallies.get(version, BenchResult(0, 0))

    def complete(self, version: int) -> bool:
        return self.tally(version).rollouts >= self._needed

    def result(self, version: int) -> BenchResult | None:
        """Return a version's result; None while rollouts are missing."""
        return self.tally(version) if self.complete(version) else None
