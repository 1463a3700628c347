"""The loops of the asymmetric numeral system (Duda 2013) that code gaps and steps: two states, one stream of words.

A change is a gap, coded with the first state, and a step, coded with the second, so that a processor can compute both
at the same time; both read their words from one stream, in the order of decoding. Bits that are almost random (low
bits, most directions, the rest of a very long gap) are stored in a second stream, of bits. A state is at least 2**24
between changes and below 2**40, and shifts 16-bit words in and out. Decoding ends with the states that encoding began
with, and at the end of both streams: if it ends elsewhere, the input was invalid.

The input is almost random, so the loops use sums and shifts, if possible, instead of branches that depend on it. They
multiply by reciprocals instead of the divisions of the definition (`tests/kernels/reference.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import Counts, Values, bit_length, compiled, multiply_high
from tidemill.kernels.models import (
    GAP_PRECISION,
    GAP_TOTAL,
    STEP_PRECISION,
    STEP_TOTAL,
    GapTables,
    length_of,
    low_bits_of,
    token_of,
)

Words = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.uint64]
"""A stream of bits, lowest first."""
Table = npt.NDArray[np.uint64]
Symbols = npt.NDArray[np.uint8]

LOWEST = 1 << 24
"""The initial value of every state."""
EXCESS_BITS = 5
"""A gap's excess over its model's last symbol is sent as its number of bits, in a field of this width, and its bits."""
NO_GAPS = -1
"""Instead of a table number: every gap of the class is 0."""

GOOD, TRUNCATED, OVERLONG, LEFT_OVER = 0, 1, 2, 3

U = np.uint64
ZERO, ONE, LOW = U(0), U(1), U(LOWEST)
WORD_BITS, WORD_MASK = U(16), U(0xFFFF)
GAP_BITS, GAP_MASK = U(GAP_PRECISION), U(GAP_TOTAL - 1)
STEP_BITS, STEP_MASK = U(STEP_PRECISION), U(STEP_TOTAL - 1)
ROOM = U(24 + 16)
"""Number of bits of a state: it is below 2**40."""
PADDING = 4
"""Numbers after the end of a stream that a decoder may read before it detects the end."""


class ClassPlan(NamedTuple):
    """The coding of each class with changes."""

    counts: Counts
    """i8[classes], number of its changes."""
    tables: Counts
    """i8[classes], the table of its gaps (`models.GapTables`), or `NO_GAPS`."""
    low_bits: Counts
    """i8[classes], the number of lowest bits of a gap that are sent uncoded."""
    directed: Symbols
    """u1[classes], 1 if tokens of steps include the direction."""
    step_start: Table
    """u8[classes, tokens], the sum of the frequencies before a token's."""
    step_frequency: Table
    """u8[classes, tokens], with the sum 2**12 for each class."""
    step_symbol: Symbols
    """u1[classes, 2**12], the token of each place between 0 and the sum."""


class Reciprocals(NamedTuple):
    """The encoder's factors and summands for each symbol of each table (u8[tables, symbols])."""

    frequency: Table
    factor: Table
    """2**64 / frequency, rounded up; 2**64 - 1 for a frequency of 1."""
    bias: Table
    """The sum of the frequencies before the symbol; for a factor of 2**64 - 1 also total - 1, as a correction."""


def reciprocals(start: Table, frequency: Table, total: int) -> Reciprocals:
    """Compute the reciprocals of tables whose frequencies add up to `total`, at most 2**14.

    The quotient of a state, below 2**40, is exact: the factor's error is less than 1, the product's error after its
    division by 2**64 is less than 2**-24, and a quotient's fraction is at most 1 - 2**-14.
    """
    divisor = np.maximum(frequency, ONE)
    factor = np.where(divisor == ONE, ~ZERO, ~ZERO // divisor + ONE)
    return Reciprocals(frequency, factor, start + np.where(divisor == ONE, U(total - 1), ZERO))


@compiled
def _symbol_written(
    state: U, codes: Reciprocals, table: int, symbol: U, precision: U, words: Words, at: U
) -> tuple[U, U]:
    """Encode one more symbol; return the new state and the new beginning of the words."""
    frequency, factor, bias = codes.frequency[table, symbol], codes.factor[table, symbol], codes.bias[table, symbol]
    full = U(state >= frequency << (ROOM - precision))
    words[at - ONE] = state & WORD_MASK
    state >>= full * WORD_BITS
    return multiply_high(state, factor) * ((ONE << precision) - frequency) + state + bias, at - full


@compiled
def encode_symbols(
    gaps: Values,
    steps: Values,
    plan: ClassPlan,
    last: Counts,
    gap_codes: Reciprocals,
    step_codes: Reciprocals,
    words: Words,
) -> tuple[int, int, int]:
    """Fill `words` (u2, two per change) from its end, last change first; return where they begin, and both states.

    `last` (i8[60]) is the field of the gap tables.
    """
    counts, tables = plan.counts, plan.tables
    gap_state, step_state = LOW, LOW
    at = U(words.size)
    i = U(steps.size)
    for back in range(counts.size):
        which = counts.size - 1 - back
        low, table, direction = U(plan.low_bits[which]), tables[which], U(plan.directed[which])
        for _ in range(counts[which]):
            i -= ONE
            step = U(steps[i])
            token = (token_of(step >> ONE)[0] << direction) | (step & direction)
            step_state, at = _symbol_written(step_state, step_codes, which, token, STEP_BITS, words, at)
            if table != NO_GAPS:
                symbol = min(U(gaps[i]) >> low, U(last[table]))
                gap_state, at = _symbol_written(gap_state, gap_codes, table, symbol, GAP_BITS, words, at)
    return int(at), int(gap_state), int(step_state)


@compiled
def _appended(out: Bits, at: U, value: U, bits: U) -> U:
    """Append `bits` bits (at most 63); return the new position. The bits after a position in its word are always 0."""
    word, width = at >> U(6), at & U(63)
    out[word] |= value << width
    out[word + ONE] = (value >> ONE) >> (U(63) - width)
    return at + bits


@compiled
def write_low_bits(gaps: Values, steps: Values, plan: ClassPlan, last: Counts, out: Bits) -> int:
    """Write bits that are not entropy-coded into `out` (u8, one per change and two more); return their number."""
    counts, tables = plan.counts, plan.tables
    at, out[0] = ZERO, ZERO
    i = 0
    for which in range(counts.size):
        low, table, plain = U(plan.low_bits[which]), tables[which], ONE - U(plan.directed[which])
        for _ in range(counts[which]):
            value, width = ZERO, ZERO
            if table != NO_GAPS:
                gap = U(gaps[i])
                high, highest = gap >> low, U(last[table])
                if high >= highest:
                    excess = high - highest + ONE
                    bits = bit_length(excess) - ONE
                    value, width = bits | ((excess ^ (ONE << bits)) << U(EXCESS_BITS)), bits + U(EXCESS_BITS)
                value |= (gap & ((ONE << low) - ONE)) << width
                width += low
            step = U(steps[i])
            length = step >> ONE
            bits = token_of(length)[1]
            tail = (length & ((ONE << bits) - ONE)) | ((step & plain) << bits)
            at = _appended(out, at, value | (tail << width), width + bits + plain)
            i += 1
    return int(at)


@compiled
def _peeked(raw: Bits, at: U) -> U:
    """Return the next 64 bits."""
    word, width = at >> U(6), at & U(63)
    held: U = (raw[word] >> width) | ((raw[word + ONE] << ONE) << (U(63) - width))
    return held


@compiled
def _refilled(state: U, words: Words, at: U) -> tuple[U, U]:
    """Add a word to the state if it is below the lower limit; return the state and the position of the next word."""
    wanted = U(state < LOW)
    return (state << (wanted * WORD_BITS)) | (U(words[at]) * wanted), at + wanted


@compiled
def decode_changes(
    words: Words,
    raw: Bits,
    n_words: int,
    n_bytes: int,
    gap_state: int,
    step_state: int,
    plan: ClassPlan,
    gap_tables: GapTables,
    limit: int,
    gaps: Values,
    steps: Values,
) -> int:
    """Invert both encoders, for gaps below `limit`; return GOOD, or the code of the problem. Reads only its arrays.

    `words` and `raw` have `PADDING` zeros after their `n_words` and `n_bytes`. Both states are below 2**40.
    """
    counts, tables, directed = plan.counts, plan.tables, plan.directed
    step_start, step_frequency, step_symbol = plan.step_start, plan.step_frequency, plan.step_symbol
    first, second = U(gap_state), U(step_state)
    at, end = ZERO, U(n_words)
    bit, last_bit = ZERO, U(n_bytes) << U(3)
    i = U(0)
    for which in range(counts.size):
        low, table, direction = U(plan.low_bits[which]), tables[which], U(directed[which])
        highest = U(gap_tables.last[table]) if table != NO_GAPS else ZERO
        for _ in range(counts[which]):
            gap = ZERO
            if table != NO_GAPS:
                place = first & GAP_MASK
                gap = U(gap_tables.symbol[table, place])
                first = gap_tables.frequency[table, gap] * (first >> GAP_BITS) + place - gap_tables.start[table, gap]
                first, at = _refilled(first, words, at)
                held = _peeked(raw, bit)
                if gap == highest:
                    bits = held & ((ONE << U(EXCESS_BITS)) - ONE)
                    held >>= U(EXCESS_BITS)
                    gap += ((ONE << bits) | (held & ((ONE << bits) - ONE))) - ONE
                    held >>= bits
                    bit += U(EXCESS_BITS) + bits
                gap = (gap << low) | (held & ((ONE << low) - ONE))
                bit += low
            place = second & STEP_MASK
            token = U(step_symbol[which, place])
            second = step_frequency[which, token] * (second >> STEP_BITS) + place - step_start[which, token]
            second, at = _refilled(second, words, at)
            held = _peeked(raw, bit)
            bits = low_bits_of(token >> direction)
            length = length_of(token >> direction, held & ((ONE << bits) - ONE))
            sign = token & ONE if direction else (held >> bits) & ONE
            bit += bits + ONE - direction
            if at > end or bit > last_bit:
                return TRUNCATED
            if gap >= U(limit):
                return OVERLONG
            gaps[i] = gap
            steps[i] = (length << ONE) | sign
            i += ONE
    if at != end or last_bit - bit >= U(8) or _peeked(raw, bit) or first != LOW or second != LOW:
        return LEFT_OVER
    return GOOD
