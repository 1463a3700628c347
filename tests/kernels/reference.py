"""Reference implementations of the compiled loops, in whole-array numpy and plain Python.

They are slow, need much memory and use no compiler. They define the correct results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.kernels import classes, elements, fingerprint
from tidemill.kernels.backend import KernelBackend
from tidemill.kernels.bounds import DeltaBounds, DeltaCounts
from tidemill.kernels.classes import SEGMENT, Active, ClassStreams, ClassTable
from tidemill.kernels.coder import write_fields
from tidemill.kernels.compiled import Bits, Indices
from tidemill.kernels.elements import BY_NAME, ElementType, Order
from tidemill.kernels.fingerprint import Fingerprint, TensorKey
from tidemill.kernels.models import ALL_ZERO, StepTable, fit_tables, gap_tables, low_bits, model_of, table_of
from tidemill.kernels.wire import BitWriter

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def fingerprint_reference(bits: Bits, key: TensorKey, indices: Indices) -> Fingerprint:
    """Return the sum of PRF(key, index) * (bits + 1) mod 2**64 for each lane. `bits` uN[n], `indices` i8[n]."""
    weights = bits.reshape(-1).astype(np.uint64) + np.uint64(1)
    return Fingerprint(*(int(np.sum(_prf(lane, indices) * weights, dtype=np.uint64)) for lane in (key.lo, key.hi)))


def _prf(key: int, indices: Indices) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014): output number `index` of the generator that starts at `key`."""
    state = np.uint64(key) + (indices.astype(np.uint64) + np.uint64(1)) * GAMMA
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def split_classes_reference(
    kind: ElementType, old: Bits, new_at: Bits, indices: Indices, table: ClassTable, active: Active
) -> ClassStreams:
    """Return the result of `kernels.classes.split_classes`."""
    exponents = (old.astype(np.int64) >> kind.mantissa_bits) & (kind.exponents - 1)
    classes, counted = table[exponents], np.repeat(active, SEGMENT)[: old.size] == 1
    steps = np.array(
        [_folded(kind, a, b) for a, b in zip(old[indices].tolist(), new_at.tolist(), strict=True)], np.int64
    )
    counts, gaps, order = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for which in range(int(table[-1]) + 1):
        ranks = np.cumsum((classes == which) & counted) - 1
        own = np.flatnonzero(classes[indices] == which)
        counts.append(own.size)
        gaps.append(np.diff(ranks[indices[own]], prepend=-1) - 1)
        order.append(own)
    return ClassStreams(
        np.array(counts, np.int64),
        np.concatenate(gaps).astype(np.uint32),
        steps[np.concatenate(order)].astype(np.uint32),
    )


def rans_reference(streams: ClassStreams) -> bytes:
    """Return the result of `RansCoder.encode`, with the codec's own choice of models and tables."""
    counts = streams.counts[streams.counts > 0]
    ends = np.cumsum(counts).tolist()
    spans = [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    models = [model_of(int(streams.gaps[span].sum(dtype=np.int64)), span.stop - span.start) for span in spans]
    tables, current = fit_tables(streams.steps, counts), StepTable(False, np.ones(1, np.uint8))
    raw = BitWriter()
    symbols: list[tuple[int, int, int, int]] = []
    for span, model, table in zip(spans, models, tables, strict=True):
        current = table or current
        for gap, step in zip(streams.gaps[span].tolist(), streams.steps[span].tolist(), strict=True):
            if model != ALL_ZERO:
                symbols.append(_code_gap(gap, model, raw))
            symbols.append(_code_step(step, current, raw))
    words, states = _code_symbols(symbols)
    return write_fields(models, tables, states, words, raw.getvalue())


def _folded(kind: ElementType, old: int, new: int) -> int:
    step = (_place(kind, new) - _place(kind, old)) % (1 << kind.width)
    if step >= 1 << (kind.width - 1):
        return 2 * ((1 << kind.width) - step) - 1
    return 2 * step - 2


def _place(kind: ElementType, pattern: int) -> int:
    sign = 1 << (kind.width - 1)
    if kind.order is Order.SIGN_MAGNITUDE:
        return 2 * sign - 1 - pattern if pattern >= sign else pattern + sign
    return pattern ^ sign if kind.order is Order.TWOS_COMPLEMENT else pattern


def _code_gap(gap: int, model: int, raw: BitWriter) -> tuple[int, int, int, int]:
    """Return state, precision, start and frequency of a gap's symbol; write its other bits to `raw`."""
    table, low = table_of(model), low_bits(model)
    last = int(gap_tables().last[table])
    symbol = min(gap >> low, last)
    if symbol == last:
        excess = (gap >> low) - last + 1
        raw.put(excess.bit_length() - 1, 5)
        raw.put(excess - (1 << excess.bit_length() - 1), excess.bit_length() - 1)
    raw.put(gap % (1 << low), low)
    return 0, 14, int(gap_tables().start[table, symbol]), int(gap_tables().frequency[table, symbol])


def _code_step(step: int, table: StepTable, raw: BitWriter) -> tuple[int, int, int, int]:
    """Do the same as `_code_gap` for a step."""
    length, direction = step >> 1, step & 1
    token, low = length, 0
    if length >= 8:
        low = length.bit_length() - 2
        token = 8 + 2 * (low - 2) + (length >> low & 1)
    raw.put(length % (1 << low), low)
    if table.directed:
        token = 2 * token + direction
    else:
        raw.put(direction, 1)
    frequencies = table.frequencies()
    return 1, 12, int(frequencies[:token].sum()), int(frequencies[token])


def _code_symbols(symbols: list[tuple[int, int, int, int]]) -> tuple[list[int], list[int]]:
    """Return the words, in decoding order, and both states."""
    words, states = [], [1 << 24, 1 << 24]
    for which, precision, start, frequency in reversed(symbols):
        if states[which] >= frequency << (40 - precision):
            words.append(states[which] & 0xFFFF)
            states[which] >>= 16
        states[which] = (states[which] // frequency << precision) + states[which] % frequency + start
    return words[::-1], states


def delta_bounds(dtype: str, old_bits: Bits, new_bits: Bits) -> DeltaBounds:
    """Return the bounds of one tensor's change (uN, equal shapes). Raises DeltaError."""
    counts = DeltaCounts(dtype)
    counts.count(old_bits, new_bits)
    return counts.bounds()


def assert_same_results(kernels: KernelBackend, place: Callable[[npt.NDArray[Any]], Any]) -> None:
    """Compare every kernel of a backend, on arrays that `place` moves, with the compiled loops."""
    kind, key, host = BY_NAME["bfloat16"], TensorKey.of("w"), KernelBackend.host
    first = np.arange(1000, dtype=np.uint16)
    second = np.where(first % 7 == 0, first + 3, first).astype(np.uint16)
    places, *patterns = elements.changed_elements(first, second)
    old, new, at = place(first.copy()), place(second), place(places)
    for made, expected in zip(kernels.changed_elements(old, new), (places, *patterns), strict=True):
        assert type(made) is type(old)
        np.testing.assert_array_equal(host(made), expected)
    old_at, new_at = map(place, patterns)
    table, active = np.repeat(np.arange(8, dtype=np.uint8), 32), classes.all_active(first.size)
    found = kernels.split_classes(kind, old, old_at, new_at, at, table, active)
    split = classes.split_classes(kind, first, *patterns, places, table, active)
    for part in ("counts", "gaps", "steps"):
        np.testing.assert_array_equal(getattr(found, part), getattr(split, part))
    np.testing.assert_array_equal(kernels.count_exponents(kind, old), classes.count_exponents(kind, first))
    assert kernels.fingerprint(old, key, 5) == fingerprint.fingerprint(first, key, 5)
    assert kernels.fingerprint_at(new_at, key, at) == fingerprint.fingerprint_at(patterns[1], key, places)
    change = fingerprint.fingerprint_change(key, places, *patterns)
    assert kernels.fingerprint_change(key, at, old_at, new_at) == change
