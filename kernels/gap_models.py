"""Frequencies of geometric gaps, for every density, computed in whole numbers: the same on every machine.

Elements of a class change independently of each other, so the gaps between changed ones are geometric, with the mean
as their one parameter. A block names, for each class, a model by one byte:

    0 .. 59     mean (4 + code % 4) / 4096 * 2**(code // 4): from 1/1024 to 28; the gap itself is the symbol
    60 .. 139   as 56 + code % 4, means 16 to 28, for the gap without its lowest k = (code - 60) // 4 + 1 bits, which
                are as good as random
    255         every gap is 0

The last symbol of a model stands for all gaps from its own value on.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TABLES = 60
MODELS = 140
ALL_ZERO = 255
PRECISION = 14
TOTAL = 1 << PRECISION
SYMBOLS = 256
EXACT = 1 << 80


class GapTables(NamedTuple):
    """Every model's frequencies, which add up to 2**14."""

    last: npt.NDArray[np.int64]
    """i8[60], the symbol that stands for all larger gaps."""
    start: npt.NDArray[np.uint64]
    """u8[60, 256], the sum of the frequencies before a symbol's."""
    frequency: npt.NDArray[np.uint64]
    """u8[60, 256], at least 1 up to the last symbol."""
    symbol: npt.NDArray[np.uint8]
    """u1[60, 2**14], the symbol of each place between 0 and the sum."""


def low_bits(model: int) -> int:
    """How many lowest bits of a gap are sent as they are."""
    return (model - TABLES) // 4 + 1 if model >= TABLES else 0


def table_of(model: int) -> int:
    """Which table a model uses."""
    return TABLES - 4 + model % 4 if model >= TABLES else model


def model_of(gap_sum: int, n_gaps: int) -> int:
    """The model nearest to the mean gap_sum / n_gaps."""
    return bisect_right(_borders(), gap_sum * 8192 // n_gaps) if gap_sum else ALL_ZERO


@cache
def gap_tables() -> GapTables:
    """All tables."""
    tables = GapTables(
        np.zeros(TABLES, np.int64),
        np.zeros((TABLES, SYMBOLS), np.uint64),
        np.zeros((TABLES, SYMBOLS), np.uint64),
        np.zeros((TABLES, TOTAL), np.uint8),
    )
    for table in range(TABLES):
        frequency = _geometric(4 + table % 4 << table // 4, 4096)
        count = len(frequency)
        tables.last[table] = count - 1
        tables.frequency[table, :count] = frequency
        tables.start[table, :count] = np.cumsum(frequency) - frequency
        tables.symbol[table] = np.repeat(np.arange(count), frequency)
    return tables


def _geometric(numerator: int, denominator: int) -> list[int]:
    """Frequencies of 0, 1, 2 ... with mean numerator / denominator, then of all that follow, in sum 2**14."""
    left, reached = EXACT, 0
    frequencies: list[int] = []
    while len(frequencies) < SYMBOLS - 1:
        left = left * numerator // (numerator + denominator)
        now = ((EXACT - left) * TOTAL + EXACT // 2) // EXACT
        if now == reached:
            break
        frequencies.append(now - reached)
        reached = now
    if reached == TOTAL:
        frequencies[0] -= 1
        reached -= 1
    return [*frequencies, TOTAL - reached]


@cache
def _borders() -> list[int]:
    """Where, in 1 / 8192, a mean is as near to a model as to the next one."""
    means = []
    for model in range(MODELS):
        table, k = table_of(model), low_bits(model)
        means.append(((4 + table % 4 << table // 4) << k) + 4096 * ((1 << k) - 1) // 2)
    return [means[model] + means[model + 1] for model in range(MODELS - 1)]
