"""Models for entropy coding: integer costs, and frequencies of gaps and of steps. The same on every machine.

Costs are in fixed point, so that encoders on every machine compute the same costs and make the same choices.

Gaps: elements of a class change independently of each other, so the gaps between changed ones are geometric, with the
mean as the only parameter. A block names, for each class, a model by one byte:

    0 .. 59     mean (4 + code % 4) / 4096 * 2**(code // 4): from 1/1024 to 28; the gap itself is the symbol
    60 .. 139   as 56 + code % 4, means 16 to 28, for the gap without its lowest k = (code - 60) // 4 + 1 bits, which
                are almost random
    255         every gap is 0

The last symbol of a model means all gaps from its own value on.

Steps: a step of length |step| - 1 = m has a token, and low bits that are sent uncoded:

    m < 8       token m
    m >= 8      with b the number of bits of m: token 8 + 2 * (b - 4) + the second highest bit of m; b - 2 low bits

The direction is a separate bit if both are equally likely, otherwise part of the token: 2 * token + direction. A table
holds each token's frequency as 6 bits on a logarithmic scale, four per octave, and is used until the next table.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import Counts, Values, bit_length, compiled
from tidemill.kernels.wire import BitReader, BitWriter, DeltaError

FRACTION = 24
"""Fractional bits of a cost: 2**24 logarithms add up to an error of at most one bit."""
BIT = 1 << FRACTION
"""One bit, as a cost."""


@compiled
def log2(value: int) -> int:
    """Return the binary logarithm of an integer from 1 to 2**31, in units of 2**-24, rounded down; 0 for 0."""
    if value <= 0:
        return 0
    whole = 0
    while value >> (whole + 1):
        whole += 1
    mantissa = np.uint64(value) << np.uint64(31 - whole)
    result = whole
    for _ in range(FRACTION):
        mantissa = (mantissa * mantissa) >> np.uint64(31)
        result <<= 1
        if mantissa >> np.uint64(32):
            result |= 1
            mantissa >>= np.uint64(1)
    return result


@compiled
def choice_cost(total: int, chosen: int) -> int:
    """Return the cost of naming `chosen` of `total` things, when all are equally likely."""
    other = total - chosen
    return total * log2(total) - chosen * log2(chosen) - other * log2(other)


@compiled
def kind_cost(counts: npt.NDArray[np.int64]) -> int:
    """Return the cost of naming the kind of each thing, when `counts` (i8[kinds]) of each kind occur."""
    total, cost = 0, 0
    for count in counts:
        total += count
        cost -= count * log2(count)
    return cost + total * log2(total)


TABLES = 60
MODELS = 140
ALL_ZERO = 255
GAP_PRECISION = 14
GAP_TOTAL = 1 << GAP_PRECISION
SYMBOLS = 256
EXACT = 1 << 80


class GapTables(NamedTuple):
    """Every model's frequencies, which add up to 2**14."""

    last: npt.NDArray[np.int64]
    """i8[60], the symbol that means its own value and all larger gaps."""
    start: npt.NDArray[np.uint64]
    """u8[60, 256], the sum of the frequencies before a symbol's."""
    frequency: npt.NDArray[np.uint64]
    """u8[60, 256], at least 1 up to the last symbol."""
    symbol: npt.NDArray[np.uint8]
    """u1[60, 2**14], the symbol of each place between 0 and the sum."""


def low_bits(model: int) -> int:
    """Return the number of lowest bits of a gap that are sent uncoded."""
    return (model - TABLES) // 4 + 1 if model >= TABLES else 0


def table_of(model: int) -> int:
    """Return the number of the table that a model uses."""
    return TABLES - 4 + model % 4 if model >= TABLES else model


def model_of(gap_sum: int, n_gaps: int) -> int:
    """Return the model nearest to the mean gap_sum / n_gaps."""
    return bisect_right(_borders(), gap_sum * 8192 // n_gaps) if gap_sum else ALL_ZERO


@cache
def gap_tables() -> GapTables:
    tables = GapTables(
        np.zeros(TABLES, np.int64),
        np.zeros((TABLES, SYMBOLS), np.uint64),
        np.zeros((TABLES, SYMBOLS), np.uint64),
        np.zeros((TABLES, GAP_TOTAL), np.uint8),
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
    """Return frequencies of 0, 1, 2 ... with mean numerator / denominator, then of all larger gaps; sum 2**14."""
    left, reached = EXACT, 0
    frequencies: list[int] = []
    while len(frequencies) < SYMBOLS - 1:
        left = left * numerator // (numerator + denominator)
        now = ((EXACT - left) * GAP_TOTAL + EXACT // 2) // EXACT
        if now == reached:
            break
        frequencies.append(now - reached)
        reached = now
    if reached == GAP_TOTAL:
        frequencies[0] -= 1
        reached -= 1
    return [*frequencies, GAP_TOTAL - reached]


@cache
def _borders() -> list[int]:
    """Return the means, in 1 / 8192, that are equally near to a model and to the next one."""
    means = []
    for model in range(MODELS):
        table, k = table_of(model), low_bits(model)
        means.append(((4 + table % 4 << table // 4) << k) + 4096 * ((1 << k) - 1) // 2)
    return [means[model] + means[model + 1] for model in range(MODELS - 1)]


STEP_PRECISION = 12
STEP_TOTAL = 1 << STEP_PRECISION
TOKENS = 128
"""Number of tokens with directions."""
LENGTH_BITS, LEVEL_BITS = 7, 6
TABLE_BITS = 1 + LENGTH_BITS
TOP_LEVEL = 56
TOP_WEIGHT = 7 << 13
TOKEN_LANES = 4
"""Number of counters for each token, used in turn, so that an addition does not wait for the previous one."""
ONE = np.uint64(1)


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    directed: bool
    """Whether tokens include the direction."""
    levels: npt.NDArray[np.uint8]
    """u1[tokens], frequency of each token on the logarithmic scale, 0 if it does not occur; the last is not 0."""

    def frequencies(self) -> Counts:
        """Return i8[tokens] with the sum 2**12; at least 1 for every token that occurs."""
        level = self.levels.astype(np.int64) - 1
        weights = np.where(level < 0, 0, (4 + level % 4) << np.maximum(level, 0) // 4)
        frequencies: Counts = np.maximum(weights * STEP_TOTAL // weights.sum(), weights > 0)
        while (missing := STEP_TOTAL - int(frequencies.sum())) != 0:
            largest = int(np.argmax(frequencies))
            frequencies[largest] += max(missing, -(int(frequencies[largest]) // 2))
        return frequencies

    def write(self, out: BitWriter) -> None:
        out.put(int(self.directed), 1)
        out.put(self.levels.size - 1, LENGTH_BITS)
        for level in self.levels.tolist():
            out.put(level, LEVEL_BITS)

    @classmethod
    def read(cls, source: BitReader) -> StepTable:
        """Read a table that `write` wrote. Raises DeltaError."""
        directed = bool(source.get(1))
        levels = [source.get(LEVEL_BITS) for _ in range(source.get(LENGTH_BITS) + 1)]
        if not levels[-1] or (not directed and len(levels) > TOKENS // 2):
            raise DeltaError(f"a table of steps with {len(levels)} tokens that ends in level {levels[-1]}")
        return cls(directed, np.array(levels, np.uint8))


def fit_tables(steps: Values, counts: Counts) -> list[StepTable | None]:
    """Return for each class with changes, in order, a new table, or None if sharing the previous one costs less.

    `steps` u4[changed], folded, class by class; `counts` (i8[classes]) are the numbers of steps.
    """
    tables: list[StepTable | None] = []
    first, group, group_cost, group_at = 0, np.zeros(TOKENS, np.int64), 0, 0
    for count in counts[counts > 0].tolist():
        own = _count_tokens(steps[first : first + count], np.zeros((TOKEN_LANES, TOKENS), np.int64))
        own_cost, shared_cost = min(_costs(own)), min(_costs(group + own))
        first += count
        if tables and shared_cost <= group_cost + own_cost:
            group, group_cost = group + own, shared_cost
        else:
            group, group_cost, group_at = own, own_cost, len(tables)
        tables.append(None)
        plain_cost, directed_cost = _costs(group)
        directed = directed_cost < plain_cost
        used = group if directed else group.reshape(-1, 2).sum(axis=1)
        # Up to the last token that occurs.
        used = used[: int(np.flatnonzero(used)[-1]) + 1]
        top = int(used.max())
        tables[group_at] = StepTable(
            directed, np.array([_level(count * TOP_WEIGHT // top, count) for count in used.tolist()], np.uint8)
        )
    return tables


@compiled
def _costs(counts: Counts) -> tuple[int, int]:
    """Return the cost of a table and of all steps that it codes, without and with directions."""
    plain = np.zeros(counts.size // 2, np.int64)
    plain_size, directed_size, total = 0, 0, 0
    for kind in range(counts.size):
        if counts[kind]:
            plain[kind >> 1] += counts[kind]
            plain_size, directed_size = (kind >> 1) + 1, kind + 1
            total += counts[kind]
    return (
        kind_cost(plain[:plain_size]) + (TABLE_BITS + LEVEL_BITS * plain_size + total) * BIT,
        kind_cost(counts[:directed_size]) + (TABLE_BITS + LEVEL_BITS * directed_size) * BIT,
    )


def _level(weight: int, count: int) -> int:
    """Return the level with the nearest weight."""
    if not count:
        return 0
    octave = max(weight.bit_length() - 3, 0)
    mantissa = max(4, (weight + (1 << octave >> 1)) >> octave)
    return min(TOP_LEVEL, 1 + 4 * octave + mantissa - 4)


@compiled
def token_of(length: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the token of a length, and the number of its lowest bits that are sent uncoded."""
    if length < np.uint64(8):
        return length, np.uint64(0)
    bits = bit_length(length)
    low = bits - np.uint64(2)
    return np.uint64(8) + ((bits - np.uint64(4)) << ONE) + ((length >> low) & ONE), low


@compiled
def length_of(token: np.uint64, low: np.uint64) -> np.uint64:
    """Return the length with this token and these lowest bits."""
    if token < np.uint64(8):
        return token
    bits = ((token - np.uint64(8)) >> ONE) + np.uint64(4)
    return ((np.uint64(2) | (token & ONE)) << (bits - np.uint64(2))) | low


@compiled
def low_bits_of(token: np.uint64) -> np.uint64:
    """Return the number of lowest bits that are sent uncoded for a length with this token."""
    return np.uint64(0) if token < np.uint64(8) else ((token - np.uint64(8)) >> ONE) + np.uint64(2)


@compiled
def _count_tokens(steps: Values, lanes: Counts) -> Counts:
    """Count each token with its direction; `lanes` (i8[4, tokens]) are zeros at first and are used in turn."""
    for i in range(steps.size):
        step = np.uint64(steps[i])
        token, _ = token_of(step >> ONE)
        lanes[np.uint64(i) % np.uint64(TOKEN_LANES), (token << ONE) | (step & ONE)] += 1
    counts: Counts = lanes.sum(axis=0)
    return counts
