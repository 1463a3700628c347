"""Two arms compared observation by observation, always valid.

Members of an arm are matched in the order in which they came, in blocks of one fixed shape (1 candidate to 4 baseline,
say, where a fifth of the users see the candidate), and each block gives one number in [-1, 1]: the contrast of its
members. `Capital` bets on those numbers. What stays true:

- of a block nothing but its members' order decides who is in it, so that a block's expected contrast is the difference
  of the arms, for any sizes of the arms; a drift that meets both arms alike cancels within the block;
- a member that is corrected corrects its block, and the evidence becomes that of the corrected numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.streams.gate.sequential import Capital

CANDIDATE, BASELINE = 0, 1
WAITING_BLOCKS = 64
"""So many blocks' worth of an arm wait for the other arm; beyond, the oldest go: they are no neighbours any more."""

Contrast = Callable[[Sequence[float], Sequence[float]], float]
"""(candidate's members, baseline's members) -> a number in [-1, 1], 0 where they are alike."""


def difference(width: float) -> Contrast:
    """Difference of the means, in units of `width`, the widest difference that there can be."""

    def contrast(candidate: Sequence[float], baseline: Sequence[float]) -> float:
        apart = math.fsum(candidate) / len(candidate) - math.fsum(baseline) / len(baseline)
        return min(1.0, max(-1.0, apart / width))

    return contrast


def log_ratio(widest: float) -> Contrast:
    """Mean logarithm of the members' ratios, each cut at `widest` and its inverse, in units of log(widest)."""

    def contrast(candidate: Sequence[float], baseline: Sequence[float]) -> float:
        ratios = [_cut_log(one, other, widest) for one in candidate for other in baseline]
        return math.fsum(ratios) / len(ratios)

    return contrast


def _cut_log(one: float, other: float, widest: float) -> float:
    if one <= 0 or other <= 0:
        return float((one > other) - (one < other))
    return min(1.0, max(-1.0, math.log(one / other) / math.log(widest)))


def block_shape(share: float) -> tuple[int, int]:
    """Candidate's and baseline's members of a block where the candidate has `share` of the users: (1, 4) for 0.2."""
    return max(1, round(share / (1.0 - share))), max(1, round((1.0 - share) / share))


@dataclass(slots=True)
class _Block:
    members: tuple[list[str], list[str]]
    contrast: float


class TwoArms:
    """The blocks of two arms and the capitals that bet on them.

    Args:
        share: part of the users that see the candidate, strictly between 0 and 1.
        contrast: what a block's number is.
        capitals: each bets on every block.
    """

    def __init__(self, share: float, contrast: Contrast, capitals: Sequence[Capital]) -> None:
        self._shape = block_shape(share)
        self._contrast, self._capitals = contrast, capitals
        self._values: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._waiting = tuple(deque[str](maxlen=WAITING_BLOCKS * size) for size in self._shape)
        self._blocks: list[_Block] = []
        self._block_of: dict[str, int] = {}

    @property
    def blocks(self) -> int:
        """How many blocks were bet on."""
        return len(self._blocks)

    def count(self, arm: int) -> int:
        """Members of an arm."""
        return len(self._values[arm])

    def mean(self, arm: int) -> float:
        """Mean of an arm's members; not a number for none."""
        values = self._values[arm].values()
        return math.fsum(values) / len(values) if values else math.nan

    def means(self) -> tuple[float, float]:
        """Candidate's and baseline's mean."""
        return self.mean(CANDIDATE), self.mean(BASELINE)

    def observe(self, arm: int, member: str, value: float) -> None:
        """Take a member's number in; one that has one already is corrected. No member is in both arms."""
        known = member in self._values[arm]
        self._values[arm][member] = value
        if known:
            self._correct(member)
            return
        self._waiting[arm].append(member)
        if all(len(waiting) >= size for waiting, size in zip(self._waiting, self._shape, strict=True)):
            candidate, baseline = (
                [waiting.popleft() for _ in range(size)]
                for waiting, size in zip(self._waiting, self._shape, strict=True)
            )
            members = (candidate, baseline)
            self._block_of.update((member, len(self._blocks)) for arm in members for member in arm)
            contrast = self._of(members)
            self._blocks.append(_Block(members, contrast))
            for capital in self._capitals:
                capital.bet(contrast)

    def _correct(self, member: str) -> None:
        number = self._block_of.get(member)
        if number is None:
            return
        block = self._blocks[number]
        before, block.contrast = block.contrast, self._of(block.members)
        for capital in self._capitals:
            capital.correct(before, block.contrast)

    def _of(self, members: tuple[list[str], list[str]]) -> float:
        candidate, baseline = ([self._values[arm][member] for member in names] for arm, names in enumerate(members))
        return self._contrast(candidate, baseline)
