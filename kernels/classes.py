"""Splitting a block's changes by the exponent of the old weight, and finding them again: what both ends know for free.

A step of training moves every weight by about as much, and a small weight has close neighbours: the smaller a weight,
the more often it changes. So the elements of a block fall into classes, each an interval of exponents of the OLD
pattern, and each class has its own stream:

    rank     how many elements of the class come before this one in the block (in active segments)
    gap      rank - the rank of the class's previous changed element - 1; its first changed element: its rank
    step     place(new) - place(old) modulo 2**width, where `place` orders the patterns by value; folded to unsigned:
             +1, -1, +2, -2 ... become 0, 1, 2, 3 ...

The streams lie one after the other, class by class, each in ascending order. A block is worked on in segments of 256
elements; a segment may be inactive, which takes its elements out of the count: it holds no change. Within a segment
classes are counted in eight parts at once, so that no counter waits for itself, and only around changed elements is
more than counted.

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
PARTS = 8
PART = SEGMENT // PARTS
ZERO, ONE = np.uint64(0), np.uint64(1)
NEVER = np.int64(1) << np.int64(62)


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

    They come segment by segment, and within a segment class by class. Raises DeltaError when a class has fewer elements
    in `old` (uN[n], contiguous) than its stream asks for.
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
def _class_of(pattern: np.uint64, table: ClassTable, form: Form) -> np.uint64:
    return np.uint64(table[(pattern >> form[0]) & form[1]])


@compiled
def _count_segment(
    old: Bits, first: int, last: int, table: ClassTable, form: Form, parts: npt.NDArray[np.uint8]
) -> None:
    """Count the classes of elements [first, last), a part after the other in `parts` (u1[8 * 32])."""
    shift, mask = form[0], form[1]
    for i in range(parts.size):
        parts[i] = 0
    if last - first == SEGMENT:
        for i in range(PART):
            for part in range(PARTS):
                which = table[(np.uint64(old[first + part * PART + i]) >> shift) & mask]
                parts[np.uint64(part * MAX_CLASSES) + np.uint64(which)] += 1
    else:
        for i in range(first, last):
            which = table[(np.uint64(old[i]) >> shift) & mask]
            parts[np.uint64((i - first) // PART * MAX_CLASSES) + np.uint64(which)] += 1


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
    for at in range(indices.size):
        counts[_class_of(np.uint64(old[indices[at]]), table, form)] += 1
    classes = counts.size
    place = np.zeros(MAX_CLASSES, np.int64)
    for which in range(1, classes):
        place[which] = place[which - 1] + counts[which - 1]
    passed = np.zeros(MAX_CLASSES, np.int64)
    due = np.zeros(MAX_CLASSES, np.int64)
    parts = np.zeros(PARTS * MAX_CLASSES, np.uint8)
    at = 0
    for segment in range(active.size):
        if not active[segment]:
            continue
        first = segment * SEGMENT
        last = min(first + SEGMENT, old.size)
        _count_segment(old, first, last, table, form, parts)
        while at < indices.size and indices[at] < last:
            index = indices[at]
            before = np.uint64(old[index])
            which = _class_of(before, table, form)
            part = (index - first) // PART
            rank = passed[which]
            for earlier in range(part):
                rank += parts[np.uint64(earlier * MAX_CLASSES) + which]
            for i in range(first + part * PART, index):
                rank += _class_of(np.uint64(old[i]), table, form) == which
            gaps[place[which]] = rank - due[which]
            steps[place[which]] = _folded(before, np.uint64(new_at[at]), form)
            due[which] = rank + 1
            place[which] += 1
            at += 1
        for part in range(PARTS):
            for which in range(classes):
                passed[which] += parts[part * MAX_CLASSES + which]


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
    classes = counts.size
    place, end = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    wanted, passed = np.full(MAX_CLASSES, NEVER, np.int64), np.zeros(MAX_CLASSES, np.int64)
    for which in range(classes):
        place[which] = end[which - 1] if which else 0
        end[which] = place[which] + counts[which]
        if counts[which]:
            wanted[which] = gaps[place[which]]
    parts = np.zeros(PARTS * MAX_CLASSES, np.uint8)
    found = 0
    for segment in range(active.size):
        if not active[segment]:
            continue
        first = segment * SEGMENT
        last = min(first + SEGMENT, old.size)
        _count_segment(old, first, last, table, form, parts)
        for which in range(classes):
            here = 0
            for part in range(PARTS):
                here += parts[part * MAX_CLASSES + which]
            while wanted[which] < passed[which] + here:
                left = wanted[which] - passed[which]
                part = 0
                while left >= parts[part * MAX_CLASSES + which]:
                    left -= parts[part * MAX_CLASSES + which]
                    part += 1
                index = first + part * PART
                while True:
                    before = np.uint64(old[index])
                    if _class_of(before, table, form) == np.uint64(which):
                        if left == 0:
                            break
                        left -= 1
                    index += 1
                indices[found] = start + index
                old_at[found] = before
                new_at[found] = _moved(before, np.uint64(steps[place[which]]), form)
                found += 1
                place[which] += 1
                if place[which] < end[which]:
                    wanted[which] += np.int64(gaps[place[which]]) + 1
                else:
                    wanted[which] = NEVER
            passed[which] += here
    return found


@compiled
def _count_exponents(bits: Bits, form: Form, lanes: Counts) -> None:
    shift, mask = form[0], form[1]
    whole = bits.size // 4 * 4
    for first in range(0, whole, 4):
        for lane in range(4):
            lanes[np.uint64(lane), (np.uint64(bits[first + lane]) >> shift) & mask] += 1
    for i in range(whole, bits.size):
        lanes[ZERO, (np.uint64(bits[i]) >> shift) & mask] += 1
