"""Splitting a block's changes by the exponent of the old weight, and finding them again: what both ends know for free.

A step of training moves every weight by about as much, and a small weight has close neighbours: the smaller a weight,
the more often it changes. So the elements of a block fall into classes, each an interval of exponents of the OLD
pattern, and each class has its own stream:

    rank     how many elements of the class come before this one in the block (in active segments)
    gap      rank - the rank of the class's previous changed element - 1; its first changed element: its rank
    step     place(new) - place(old) modulo 2**width, where `place` orders the patterns by value; folded to unsigned:
             +1, -1, +2, -2 ... become 0, 1, 2, 3 ...

The streams lie one after the other, class by class, each in ascending order. A block has segments of 256 elements; a
segment may be inactive, which takes its elements out of the count: it holds no change.

Plain arrays in, plain arrays out, integers only: other processors can do the same and must come to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import DeltaError, ElementType
from tidemill.kernels.fingerprint import Bits, Indices

ClassTable = npt.NDArray[np.uint8]
"""u1[exponents]: the class of each exponent; ascending, from 0, without holes. Integers have one exponent."""

Active = npt.NDArray[np.uint8]
"""u1[segments]: 1 where a segment may hold changes, else 0."""

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.uint32]
Form = tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]
"""Of an element type: where the exponent begins, its mask, the sign's bit, all bits, the order."""

MAX_CLASSES = 32
SEGMENT = 256
LANES = 4
"""Counters of each class that take turns, so that none waits for itself."""
ZERO, ONE = np.uint64(0), np.uint64(1)
NEVER = np.uint32(1 << 31)
"""More elements than a block has."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassStreams:
    """The changes of a block, class by class, ascending within a class."""

    counts: Counts
    """i8[classes], changed elements of each class."""
    gaps: Values
    """u4[changed]"""
    steps: Values
    """u4[changed], folded."""


def segments(n_elements: int) -> int:
    """How many segments a block of `n_elements` has; the last one may be short."""
    return -(-n_elements // SEGMENT)


def all_active(n_elements: int) -> Active:
    """Every segment may hold changes."""
    return np.ones(segments(n_elements), np.uint8)


def split_classes(
    kind: ElementType, old: Bits, new_at: Bits, indices: Indices, table: ClassTable, active: Active
) -> ClassStreams:
    """Split the changes of a block into classes.

    Args:
        kind: the element type.
        old: uN[n], the block's old patterns, contiguous.
        new_at: uN[changed], the new patterns of the changed elements.
        indices: i8[changed], ascending, where they are in the block; each in an active segment.
        table: class of each exponent.
        active: which segments count.
    """
    counts = np.zeros(int(table[-1]) + 1, np.int64)
    gaps, steps = np.empty(indices.size, np.uint32), np.empty(indices.size, np.uint32)
    _split(old, new_at, indices, table, active, _form(kind), counts, gaps, steps)
    return ClassStreams(counts, gaps, steps)


def select_classes(
    kind: ElementType, old: Bits, streams: ClassStreams, table: ClassTable, active: Active, start: int
) -> tuple[Indices, Bits, Bits]:
    """The changes that `split_classes` split: indices + `start` (i8[changed]), old and new patterns (uN[changed]).

    They come in ascending order. Raises DeltaError when a class has fewer elements in `old` (uN[n], contiguous) than
    its stream asks for.
    """
    indices = np.empty(streams.gaps.size, np.int64)
    old_at, new_at = np.empty(indices.size, kind.bits), np.empty(indices.size, kind.bits)
    found = _select(
        old, streams.counts, streams.gaps, streams.steps, table, active, _form(kind), start, indices, old_at, new_at
    )
    if found != indices.size:
        raise DeltaError(f"{indices.size - found} changed elements lie beyond the last element of their class")
    return indices, old_at, new_at


def count_exponents(kind: ElementType, bits: Bits) -> Counts:
    """i8[exponents]: how often each exponent occurs in `bits` (uN[n], contiguous)."""
    lanes = np.zeros((4, kind.exponents), np.int64)
    _count_exponents(bits, _form(kind), lanes)
    counts: Counts = lanes.sum(axis=0)
    return counts


def fold_steps(kind: ElementType, old: Bits, new: Bits) -> Values:
    """u4[n]: the folded steps from `old` to `new` (uN[n] each, contiguous), which differ everywhere."""
    steps = np.empty(old.size, np.uint32)
    _fold_all(old, new, _form(kind), steps)
    return steps


def move(kind: ElementType, old: Bits, step: int) -> Bits:
    """uN[n]: where one folded step leads from each of `old` (uN[n], contiguous)."""
    new = np.empty_like(old)
    _move_all(old, np.uint64(step), _form(kind), new)
    return new


def _form(kind: ElementType) -> Form:
    sign = 1 << (kind.width - 1)
    fields = (kind.mantissa_bits, kind.exponents - 1, sign, 2 * sign - 1, int(kind.order))
    shift, mask, sign_bit, ones, order = map(np.uint64, fields)
    return shift, mask, sign_bit, ones, order


@compiled
def _place(pattern: np.uint64, form: Form) -> np.uint64:
    """A pattern's place among all patterns by value."""
    sign, ones, order = form[2], form[3], form[4]
    if order == ZERO:
        return ones - pattern if pattern & sign else pattern | sign
    return pattern ^ sign if order == ONE else pattern


@compiled
def _pattern(place: np.uint64, form: Form) -> np.uint64:
    """The inverse of `_place`."""
    sign, ones, order = form[2], form[3], form[4]
    if order == ZERO:
        return place ^ sign if place & sign else ones - place
    return place ^ sign if order == ONE else place


@compiled
def _folded(old: np.uint64, new: np.uint64, form: Form) -> np.uint64:
    """The step from one pattern to another, which differs, as an unsigned number: small where the step is short."""
    step = (_place(new, form) - _place(old, form)) & form[3]
    if step & form[2]:
        return ((form[3] - step) << ONE) | ONE
    return (step - ONE) << ONE


@compiled
def _moved(old: np.uint64, folded: np.uint64, form: Form) -> np.uint64:
    """The pattern that a folded step leads to."""
    length = (folded >> ONE) + ONE
    step = ~length + ONE if folded & ONE else length
    return _pattern((_place(old, form) + step) & form[3], form)


@compiled
def _starts(counts: Counts) -> npt.NDArray[np.uint64]:
    """Where each class's stream begins."""
    starts = np.zeros(counts.size, np.uint64)
    for which in range(1, counts.size):
        starts[which] = starts[which - 1] + np.uint64(counts[which - 1])
    return starts


@compiled
def _split(
    old: Bits,
    new_at: Bits,
    indices: Indices,
    table: ClassTable,
    active: Active,
    form: Form,
    counts: Counts,
    gaps: Values,
    steps: Values,
) -> None:
    shift, mask = form[0], form[1]
    for index in indices:
        counts[table[(np.uint64(old[np.uint64(index)]) >> shift) & mask]] += 1
    place = _starts(counts)
    gap = np.zeros(LANES * MAX_CLASSES, np.uint32)
    size = np.uint64(old.size)
    at, changed = ZERO, np.uint64(indices.size)
    for segment in range(active.size):
        if not active[segment]:
            continue
        i = np.uint64(segment) * np.uint64(SEGMENT)
        last = min(i + np.uint64(SEGMENT), size)
        while i < last:
            stop = min(np.uint64(indices[at]), last) if at < changed else last
            while i + np.uint64(LANES) <= stop:
                for lane in range(LANES):
                    which = table[(np.uint64(old[i + np.uint64(lane)]) >> shift) & mask]
                    gap[np.uint64(which) + np.uint64(lane * MAX_CLASSES)] += 1
                i += np.uint64(LANES)
            while i < stop:
                gap[table[(np.uint64(old[i]) >> shift) & mask]] += 1
                i += ONE
            if i < last:
                before = np.uint64(old[i])
                which = table[(before >> shift) & mask]
                between = np.uint32(0)
                for lane in range(LANES):
                    between += gap[np.uint64(which) + np.uint64(lane * MAX_CLASSES)]
                    gap[np.uint64(which) + np.uint64(lane * MAX_CLASSES)] = 0
                gaps[place[which]] = between
                steps[place[which]] = _folded(before, np.uint64(new_at[at]), form)
                place[which] += ONE
                at += ONE
                i += ONE


@compiled
def _select(
    old: Bits,
    counts: Counts,
    gaps: Values,
    steps: Values,
    table: ClassTable,
    active: Active,
    form: Form,
    start: int,
    indices: Indices,
    old_at: Bits,
    new_at: Bits,
) -> int:
    """How many of the changes were found."""
    shift, mask = form[0], form[1]
    place = _starts(counts)
    end = place.copy()
    left = np.full(counts.size, NEVER, np.uint32)
    for which in range(counts.size):
        end[which] += np.uint64(counts[which])
        if counts[which]:
            left[which] = gaps[place[which]]
    found, size = ZERO, np.uint64(old.size)
    for segment in range(active.size):
        if not active[segment]:
            continue
        first = np.uint64(segment) * np.uint64(SEGMENT)
        for i in range(first, min(first + np.uint64(SEGMENT), size)):
            before = np.uint64(old[i])
            which = table[(before >> shift) & mask]
            still = left[which]
            left[which] = still - np.uint32(1)
            if still == 0:
                at = place[which]
                indices[found] = start + np.int64(i)
                old_at[found] = before
                new_at[found] = _moved(before, np.uint64(steps[at]), form)
                found += ONE
                place[which] = at + ONE
                left[which] = gaps[at + ONE] if at + ONE < end[which] else NEVER
    return int(found)


@compiled
def _count_exponents(bits: Bits, form: Form, lanes: Counts) -> None:
    shift, mask = form[0], form[1]
    whole = bits.size // 4 * 4
    for first in range(0, whole, 4):
        for lane in range(4):
            lanes[np.uint64(lane), (np.uint64(bits[first + lane]) >> shift) & mask] += 1
    for i in range(whole, bits.size):
        lanes[ZERO, (np.uint64(bits[i]) >> shift) & mask] += 1


@compiled
def _fold_all(old: Bits, new: Bits, form: Form, steps: Values) -> None:
    for i in range(old.size):
        steps[i] = _folded(np.uint64(old[i]), np.uint64(new[i]), form)


@compiled
def _move_all(old: Bits, step: np.uint64, form: Form, new: Bits) -> None:
    for i in range(old.size):
        new[i] = _moved(np.uint64(old[i]), step, form)
