"""Frequencies of steps: how far the changed elements of a class moved, as few bytes as say it well enough.

A step of length |step| - 1 = m has a token, and low bits that are sent as they are:

    m < 8       token m
    m >= 8      token 8 + 2 * (b - 4) + the second highest bit of m, of b bits, and its lowest b - 2 bits

The direction is a bit of its own where both are as likely, else part of the token: 2 * token + direction. A table holds
each token's frequency as 6 bits on a logarithmic scale, four to the octave, and serves all classes until the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.kernels.classes import Counts
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import DeltaError, Values
from tidemill.kernels.information import BIT, kind_cost
from tidemill.kernels.vectors import bit_length
from tidemill.kernels.wire import BitReader, BitWriter

PRECISION = 12
TOTAL = 1 << PRECISION
TOKENS = 128
"""Tokens with directions."""
LENGTH_BITS, LEVEL_BITS = 7, 6
TABLE_BITS = 1 + LENGTH_BITS
TOP_LEVEL = 56
TOP_WEIGHT = 7 << 13
LANES = 4
"""Counters of each token that take turns, so that none waits for itself."""
ONE = np.uint64(1)


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """One table, as it is sent."""

    directed: bool
    """Whether tokens include the direction."""
    levels: npt.NDArray[np.uint8]
    """u1[tokens], frequency of each token on the logarithmic scale, 0 for never; the last is not 0."""

    def frequencies(self) -> Counts:
        """i8[tokens], in sum 2**12; at least 1 for every token that occurs."""
        level = self.levels.astype(np.int64) - 1
        weights = np.where(level < 0, 0, (4 + level % 4) << np.maximum(level, 0) // 4)
        frequencies: Counts = np.maximum(weights * TOTAL // weights.sum(), weights > 0)
        while (missing := TOTAL - int(frequencies.sum())) != 0:
            largest = int(np.argmax(frequencies))
            frequencies[largest] += max(missing, -(int(frequencies[largest]) // 2))
        return frequencies

    def write(self, out: BitWriter) -> None:
        """Append the table."""
        out.put(int(self.directed), 1)
        out.put(self.levels.size - 1, LENGTH_BITS)
        for level in self.levels.tolist():
            out.put(level, LEVEL_BITS)

    @classmethod
    def read(cls, source: BitReader) -> StepTable:
        """The inverse of `write`. Raises DeltaError."""
        directed = bool(source.get(1))
        levels = [source.get(LEVEL_BITS) for _ in range(source.get(LENGTH_BITS) + 1)]
        if not levels[-1] or (not directed and len(levels) > TOKENS // 2):
            raise DeltaError(f"a table of steps with {len(levels)} tokens that ends in level {levels[-1]}")
        return cls(directed, np.array(levels, np.uint8))


def fit_tables(steps: Values, counts: Counts) -> list[StepTable | None]:
    """For each class with changes, in order, a new table, or None where the one before serves it more cheaply.

    `steps` u4[changed], folded, class by class as `counts` (i8[classes]) says.
    """
    tables: list[StepTable | None] = []
    first, group, group_cost, group_at = 0, np.zeros(TOKENS, np.int64), 0, 0
    for count in counts[counts > 0].tolist():
        own = _count_tokens(steps[first : first + count], np.zeros((LANES, TOKENS), np.int64))
        own_cost, shared_cost = _cost(own), _cost(group + own)
        first += count
        if tables and shared_cost <= group_cost + own_cost:
            group, group_cost = group + own, shared_cost
            tables.append(None)
        else:
            group, group_cost, group_at = own, own_cost, len(tables)
            tables.append(None)
        plain_cost, directed_cost = _costs(group)
        directed = directed_cost < plain_cost
        used = _trimmed(group if directed else group.reshape(-1, 2).sum(axis=1))
        top = int(used.max())
        tables[group_at] = StepTable(
            directed, np.array([_level(count * TOP_WEIGHT // top, count) for count in used.tolist()], np.uint8)
        )
    return tables


def _cost(counts: Counts) -> int:
    return int(min(_costs(counts)))


@compiled
def _costs(counts: Counts) -> tuple[int, int]:
    """Cost of a table and of all that it codes, without and with directions."""
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
    """The level whose weight is nearest."""
    if not count:
        return 0
    octave = max(weight.bit_length() - 3, 0)
    mantissa = max(4, (weight + (1 << octave >> 1)) >> octave)
    return min(TOP_LEVEL, 1 + 4 * octave + mantissa - 4)


def _trimmed(counts: Counts) -> Counts:
    """Up to the last kind that occurs."""
    return counts[: int(np.flatnonzero(counts)[-1]) + 1]


@compiled
def token_of(length: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The token of a length, and how many of its lowest bits are sent as they are."""
    if length < np.uint64(8):
        return length, np.uint64(0)
    bits = bit_length(length)
    low = bits - np.uint64(2)
    return np.uint64(8) + ((bits - np.uint64(4)) << ONE) + ((length >> low) & ONE), low


@compiled
def length_of(token: np.uint64, low: np.uint64) -> np.uint64:
    """The length with this token and these lowest bits."""
    if token < np.uint64(8):
        return token
    bits = ((token - np.uint64(8)) >> ONE) + np.uint64(4)
    return ((np.uint64(2) | (token & ONE)) << (bits - np.uint64(2))) | low


@compiled
def low_bits_of(token: np.uint64) -> np.uint64:
    """How many lowest bits of a length with this token are sent as they are."""
    return np.uint64(0) if token < np.uint64(8) else ((token - np.uint64(8)) >> ONE) + np.uint64(2)


@compiled
def _count_tokens(steps: Values, lanes: Counts) -> Counts:
    """How often each token with its direction occurs; `lanes` (i8[4, tokens]) take turns and are zeros."""
    for i in range(steps.size):
        step = np.uint64(steps[i])
        token, _ = token_of(step >> ONE)
        lanes[np.uint64(i) % np.uint64(LANES), (token << ONE) | (step & ONE)] += 1
    counts: Counts = lanes.sum(axis=0)
    return counts
