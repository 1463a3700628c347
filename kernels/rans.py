"""The loops of the asymmetric numeral system (Duda 2013) that code gaps and steps: two states, one stream of words.

A change is a gap, coded with the first state, and a step, coded with the second, so that a processor can work on both
at once; both take their words from one stream, in the order of decoding. What is as good as random (low bits, most
directions, the rest of a very long gap) lies in a stream of bits beside it. A state is at least 2**24 between changes
and below 2**40; 16-bit words go in and out. Decoding ends in the states that encoding began with, and at the end of
both streams: a decoder that arrives anywhere else was given something else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.kernels import gap_models, step_tables
from tidemill.kernels.classes import Counts
from tidemill.kernels.compiled import compiled
from tidemill.kernels.gap_models import GapTables
from tidemill.kernels.step_tables import length_of, low_bits_of, token_of
from tidemill.kernels.ulp_steps import Values

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.uint64]
Symbols = npt.NDArray[np.uint8]

LOWEST = 1 << 24
"""Every state begins here."""
STATE_LIMIT = 1 << 40
EXCESS_BITS = 5
"""A gap beyond its model's last symbol: how many bits the excess has, then the excess."""
NO_GAPS = -1
"""In place of a table: every gap of the class is 0."""

GOOD, TRUNCATED, OVERLONG, LEFT_OVER = 0, 1, 2, 3

U = np.uint64
ZERO, ONE, SIXTEEN, LOW = U(0), U(1), U(16), U(LOWEST)
GAP_BITS, GAP_MASK = U(gap_models.PRECISION), U(gap_models.TOTAL - 1)
STEP_BITS, STEP_MASK = U(step_tables.PRECISION), U(step_tables.TOTAL - 1)
GAP_ROOM = U(24 - gap_models.PRECISION + 16)
STEP_ROOM = U(24 - step_tables.PRECISION + 16)


@compiled
def _put(out: Bytes, at: U, held: U, width: U, value: U, bits: U) -> tuple[U, U, U]:
    """Append `bits` bits (at most 32); the new position, and what is held of the last byte."""
    held |= value << width
    width += bits
    while width >= U(8):
        out[at] = held & U(255)
        at += ONE
        held >>= U(8)
        width -= U(8)
    return at, held, width


@compiled
def write_low_bits(
    gaps: Values,
    steps: Values,
    counts: Counts,
    tables: Counts,
    low_bits: Counts,
    directed: Symbols,
    last: Counts,
    out: Bytes,
) -> int:
    """Write what is not entropy-coded of every change into `out` (u1, 8 bytes a change and 8 more); how many."""
    at, held, width = ZERO, ZERO, ZERO
    i = 0
    for which in range(counts.size):
        low, table = U(low_bits[which]), tables[which]
        for _ in range(counts[which]):
            if table != NO_GAPS:
                gap = U(gaps[i])
                high, highest = gap >> low, U(last[table])
                if high >= highest:
                    excess, bits = high - highest + ONE, ZERO
                    while excess >> bits:
                        bits += ONE
                    at, held, width = _put(out, at, held, width, bits - ONE, U(EXCESS_BITS))
                    at, held, width = _put(out, at, held, width, excess & ((ONE << (bits - ONE)) - ONE), bits - ONE)
                at, held, width = _put(out, at, held, width, gap & ((ONE << low) - ONE), low)
            length = U(steps[i]) >> ONE
            bits = token_of(length)[1]
            at, held, width = _put(out, at, held, width, length & ((ONE << bits) - ONE), bits)
            if not directed[which]:
                at, held, width = _put(out, at, held, width, U(steps[i]) & ONE, ONE)
            i += 1
    if width:
        out[at] = held
        at += ONE
    return int(at)


@compiled
def encode_symbols(
    gaps: Values,
    steps: Values,
    counts: Counts,
    tables: Counts,
    low_bits: Counts,
    directed: Symbols,
    last: Counts,
    gap_start: Table,
    gap_frequency: Table,
    step_start: Table,
    step_frequency: Table,
    words: Words,
) -> tuple[int, int, int]:
    """Fill `words` (u2, two a change) from its end; where they begin, and both states. The last change comes first."""
    gap_state, step_state = LOW, LOW
    at = U(words.size)
    i = U(steps.size)
    for back in range(counts.size):
        which = counts.size - 1 - back
        low, table = U(low_bits[which]), tables[which]
        for _ in range(counts[which]):
            i -= ONE
            step = U(steps[i])
            token = token_of(step >> ONE)[0]
            if directed[which]:
                token = (token << ONE) | (step & ONE)
            frequency = step_frequency[which, token]
            if step_state >= frequency << STEP_ROOM:
                at -= ONE
                words[at] = step_state & U(0xFFFF)
                step_state >>= SIXTEEN
            step_state = ((step_state // frequency) << STEP_BITS) + step_state % frequency + step_start[which, token]
            if table != NO_GAPS:
                symbol = min(U(gaps[i]) >> low, U(last[table]))
                frequency = gap_frequency[table, symbol]
                if gap_state >= frequency << GAP_ROOM:
                    at -= ONE
                    words[at] = gap_state & U(0xFFFF)
                    gap_state >>= SIXTEEN
                gap_state = ((gap_state // frequency) << GAP_BITS) + gap_state % frequency + gap_start[table, symbol]
    return int(at), int(gap_state), int(step_state)


@compiled
def decode_changes(
    words: Words,
    raw: Bytes,
    gap_state: int,
    step_state: int,
    counts: Counts,
    tables: Counts,
    low_bits: Counts,
    directed: Symbols,
    gap_tables: GapTables,
    step_start: Table,
    step_frequency: Table,
    step_symbol: Symbols,
    limit: int,
    gaps: Values,
    steps: Values,
) -> int:
    """The inverse of both; gaps of `limit` or more are refused. GOOD, or what is wrong. Reads within its arrays only.

    Both states are below 2**40; a row of `step_frequency` adds up to 2**12 and its row of `step_symbol` (u1[2**12])
    says whose each place is.
    """
    first, second = U(gap_state), U(step_state)
    at, n_words = ZERO, U(words.size)
    byte, n_bytes, held, width = ZERO, U(raw.size), ZERO, ZERO
    i = U(0)
    for which in range(counts.size):
        low, table = U(low_bits[which]), tables[which]
        highest = U(gap_tables.last[table]) if table != NO_GAPS else ZERO
        for _ in range(counts[which]):
            while width < U(32) and byte < n_bytes:
                held |= U(raw[byte]) << width
                byte += ONE
                width += U(8)
            if table != NO_GAPS:
                place = first & GAP_MASK
                symbol = U(gap_tables.symbol[table, place])
                frequency, start = gap_tables.frequency[table, symbol], gap_tables.start[table, symbol]
                first = frequency * (first >> GAP_BITS) + place - start
                if first < LOW:
                    if at >= n_words:
                        return TRUNCATED
                    first = (first << SIXTEEN) | U(words[at])
                    at += ONE
                gap = symbol
                if symbol == highest:
                    if width < U(EXCESS_BITS):
                        return TRUNCATED
                    bits = held & ((ONE << U(EXCESS_BITS)) - ONE)
                    held >>= U(EXCESS_BITS)
                    width -= U(EXCESS_BITS)
                    if width < bits:
                        return TRUNCATED
                    gap += ((ONE << bits) | (held & ((ONE << bits) - ONE))) - ONE
                    held >>= bits
                    width -= bits
                    while width < U(32) and byte < n_bytes:
                        held |= U(raw[byte]) << width
                        byte += ONE
                        width += U(8)
                if width < low:
                    return TRUNCATED
                gap = (gap << low) | (held & ((ONE << low) - ONE))
                held >>= low
                width -= low
                if gap >= U(limit):
                    return OVERLONG
                gaps[i] = gap
            else:
                gaps[i] = 0
            place = second & STEP_MASK
            token = U(step_symbol[which, place])
            second = step_frequency[which, token] * (second >> STEP_BITS) + place - step_start[which, token]
            if second < LOW:
                if at >= n_words:
                    return TRUNCATED
                second = (second << SIXTEEN) | U(words[at])
                at += ONE
            while width < U(32) and byte < n_bytes:
                held |= U(raw[byte]) << width
                byte += ONE
                width += U(8)
            direction = ZERO
            if directed[which]:
                direction = token & ONE
                token >>= ONE
            bits = low_bits_of(token)
            if width < bits + ONE - U(directed[which]):
                return TRUNCATED
            length = length_of(token, held & ((ONE << bits) - ONE))
            held >>= bits
            width -= bits
            if not directed[which]:
                direction = held & ONE
                held >>= ONE
                width -= ONE
            steps[i] = (length << ONE) | direction
            i += ONE
    if at != n_words or byte != n_bytes or width >= U(8) or held or first != LOW or second != LOW:
        return LEFT_OVER
    return GOOD
