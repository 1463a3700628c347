"""Which segments of a block hold changes at all, and which exponents make up a class.

Segments are named where that is worth saying, as where a few rows of an embedding moved:

u1         0: all are active; 1: a bit for each segment, lowest first; 2: varint length and a frame of these bits

There are as many classes as pay for themselves.

A class costs its share of the block's fields; what it saves is that its elements are not taken as likely to change as
others. Neighbouring classes are merged as long as the merger is cheaper, the cheapest first.
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.classes import MAX_CLASSES, SEGMENT, Active, ClassTable, all_active, segments
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import Counts
from tidemill.kernels.fingerprint import Indices
from tidemill.kernels.models import BIT, choice_cost, log2
from tidemill.kernels.wire import DeltaError, WireReader, compress, decompress, varint

ALL, BITS, FRAME = 0, 1, 2
FIXED_COST = 300 * BIT


def find_active(indices: Indices, n_elements: int) -> Active:
    """The segments with changes, or all, whichever is cheaper, for ascending `indices` (i8[changed]) in the block."""
    active = np.zeros(segments(n_elements), np.uint8)
    _activate(indices, active)
    n_active = int(active.sum())
    saved = indices.size * (log2(active.size) - log2(n_active))
    return active if saved > choice_cost(active.size, n_active) + FIXED_COST else all_active(n_elements)


def write_active(active: Active) -> bytes:
    """The segments as bytes."""
    if active.all():
        return bytes([ALL])
    bits = np.packbits(active, bitorder="little").tobytes()
    frame = compress(bits)
    packed = varint(len(frame)) + frame
    return bytes([FRAME]) + packed if len(packed) < len(bits) else bytes([BITS]) + bits


def read_active(source: WireReader, n_elements: int) -> Active:
    """The inverse of `write_active`. Raises DeltaError."""
    form, n = source.byte(), segments(n_elements)
    size = -(-n // 8)
    if form == ALL:
        return all_active(n_elements)
    if form not in (BITS, FRAME):
        raise DeltaError(f"unknown form {form} of active segments")
    data = source.take(size) if form == BITS else decompress(source.take(source.varint()), size)
    return np.unpackbits(np.frombuffer(data, np.uint8), count=n, bitorder="little")


@compiled
def _activate(indices: Indices, active: Active) -> None:
    for i in range(indices.size):
        active[np.uint64(indices[i]) // np.uint64(SEGMENT)] = 1


CLASS_COST = 10 * BIT
"""A class's boundary and its count."""
STREAM_COST = 22 * BIT
"""What a class with changes adds: its gap code, a longer count, its share of a table of steps."""


def choose_table(elements: Counts, changed: Counts) -> ClassTable:
    """The cheapest classes for a block of which `changed` (i8[exponents]) of `elements` (i8[exponents]) changed."""
    seen = np.maximum(elements, changed)
    used = np.flatnonzero(seen)
    if not used.size:
        return np.zeros(elements.size, np.uint8)
    last = np.empty(used.size, np.int64)
    classes = _merge(seen[used], changed[used], last)
    # What does not occur costs nothing in a neighbour's class: the next one's, or the last.
    ends = used[last[:classes]]
    ends[-1] = elements.size - 1
    return np.searchsorted(ends, np.arange(elements.size)).astype(np.uint8)


def write_table(table: ClassTable) -> bytes:
    """How many classes there are beyond the first, and the first exponent of each of those."""
    firsts = np.flatnonzero(np.diff(table)) + 1
    return varint(firsts.size) + firsts.astype(np.uint8).tobytes()


def read_table(source: WireReader, exponents: int) -> ClassTable:
    """The inverse of `write_table` for a type of so many `exponents`. Raises DeltaError."""
    more = source.varint()
    if more >= min(MAX_CLASSES, exponents):
        raise DeltaError(f"{more + 1} classes of {exponents} exponents")
    firsts = np.frombuffer(source.take(more), np.uint8).astype(np.int64)
    if np.any(np.diff(firsts, prepend=0) <= 0) or np.any(firsts >= exponents):
        raise DeltaError(f"class boundaries {firsts.tolist()} do not divide {exponents} exponents")
    return np.searchsorted(firsts, np.arange(exponents), side="right").astype(np.uint8)


@compiled
def _cost(elements: int, changed: int) -> int:
    return CLASS_COST + (choice_cost(elements, changed) + STREAM_COST if changed else 0)


@compiled
def _merge(elements: Counts, changed: Counts, last: Counts) -> int:
    """Write the last exponent of each class into `last`; how many classes there are."""
    n, c = elements.copy(), changed.copy()
    classes = n.size
    cost, merged = np.zeros(classes + 1, np.int64), np.zeros(classes + 1, np.int64)
    for i in range(classes):
        last[i] = i
        cost[i] = _cost(n[i], c[i])
        if i + 1 < classes:
            merged[i] = _cost(n[i] + n[i + 1], c[i] + c[i + 1])
    while classes > 1:
        best = 0
        for i in range(1, classes - 1):
            if cost[i] + cost[i + 1] - merged[i] > cost[best] + cost[best + 1] - merged[best]:
                best = i
        if merged[best] > cost[best] + cost[best + 1] and classes <= MAX_CLASSES:
            break
        n[best] += n[best + 1]
        c[best] += c[best + 1]
        last[best] = last[best + 1]
        cost[best] = merged[best]
        for i in range(best + 1, classes - 1):
            n[i], c[i], last[i], cost[i], merged[i] = n[i + 1], c[i + 1], last[i + 1], cost[i + 1], merged[i + 1]
        classes -= 1
        for i in range(max(best - 1, 0), min(best + 1, classes - 1)):
            merged[i] = _cost(n[i] + n[i + 1], c[i] + c[i + 1])
    return classes
