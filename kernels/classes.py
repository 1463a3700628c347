"""Split of a block's changes by the exponent of the old weight, and its inverse: both ends know the old weights.

A training step moves every weight by about the same amount, and a small weight has close neighbours: the smaller a
weight, the more often it changes. So the elements of a block are divided into classes, each an interval of exponents of
the OLD pattern, and each class has its own stream:

    rank     number of elements of the class before this one in the block (in active segments)
    gap      rank - the rank of the class's previous changed element - 1; for its first changed element: the rank
    step     number of values by which the element moved, with the direction (`kernels.elements`)

The streams follow one after the other, class by class, each in ascending order. A block has segments of 256 elements. A
segment may be inactive: it contains no change, and its elements are not counted.

Input and output are plain arrays of integers: implementations for other processors must give the same result.

Splitting and selecting process a block tile by tile: a mask for each word of 64 elements, and the ranks before it. A
tile is marked once, by vector comparisons, for every class; after that the rank of an element, or the element of a
rank, is found by counting bits, without a loop over its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import (
    WORD,
    Bits,
    Counts,
    Indices,
    Values,
    compiled,
    count_ones,
    extract_field,
    nth_one,
    within,
)
from tidemill.kernels.elements import ElementType, Form, folded, form_of, moved
from tidemill.kernels.wire import DeltaError

SEGMENT = 256
"""Number of elements that are active or inactive together."""
TILE = 1 << 14
"""Elements marked at a time: many, so that a class has many changes in a tile; few enough for a processor's caches."""
WORDS = TILE // WORD
"""Words of a tile."""
WORD_BITS, SEGMENT_BITS = np.uint64(6), np.uint64(8)
IN_WORD = np.uint64(63)
ZERO, ONE = np.uint64(0), np.uint64(1)
ALL = ~ZERO

Bytes = npt.NDArray[np.uint8]
Masks = npt.NDArray[np.uint64]


class Tile(NamedTuple):
    """The numbers of a tile; `mark` writes them and overwrites them for the next tile."""

    exponents: Bytes
    """u1[16384], of each element."""
    active: Masks
    """u8[256], the active elements."""
    masks: Masks
    """u8[classes, 256], the active elements of each class."""
    ranks: Masks
    """u8[classes, 256], number of elements of the class before the word, counted from the block's beginning."""
    totals: Masks
    """u8[classes], number of elements of the class before the tile's end."""


def new_tile(classes: int) -> Tile:
    """Return an empty tile, for `mark` to fill."""
    return Tile(
        np.zeros(TILE, np.uint8),
        np.zeros(WORDS, np.uint64),
        np.zeros((classes, WORDS), np.uint64),
        np.zeros((classes, WORDS), np.uint64),
        np.zeros(classes, np.uint64),
    )


@compiled
def mark(old: Bits, first: np.uint64, firsts: Bytes, spans: Bytes, active: Bytes, form: Form, tile: Tile) -> None:
    """Mark the tile of `old` that begins at element `first`; the last one may be short.

    Class c has the exponents from `firsts[c]` (u1[classes]) to `firsts[c] + spans[c]`, inclusive.
    Tiles are marked in ascending order.
    """
    exponents, inside, masks, ranks, totals = tile
    words = _read(old, first, active, form, exponents, inside)
    for group in range(firsts.size):
        which = np.uint64(group)
        least, span, rank = firsts[which], spans[which], totals[which]
        own_masks, own_ranks = masks[which], ranks[which]
        for at in range(words):
            word = np.uint64(at)
            own = inside[word] & within(exponents, word << WORD_BITS, least, span)
            own_masks[word] = own
            own_ranks[word] = rank
            rank += count_ones(own)
        for at in range(words, WORDS):
            own_ranks[np.uint64(at)] = rank
        totals[which] = rank


@compiled
def _read(old: Bits, first: np.uint64, active: Bytes, form: Form, exponents: Bytes, inside: Masks) -> np.uint64:
    """Read the exponents, and mark the active elements; return the number of words."""
    shift, mask = form[0], form[1]
    size = min(np.uint64(TILE), np.uint64(old.size) - first)
    whole, rest = size >> WORD_BITS, size & IN_WORD
    for at in range(whole):
        begin = np.uint64(at) << WORD_BITS
        extract_field(old, first + begin, shift, mask, exponents, begin)
        inside[np.uint64(at)] = ALL if active[(first + begin) >> SEGMENT_BITS] else ZERO
    if not rest:
        return whole
    begin = whole << WORD_BITS
    for at in range(rest):
        exponents[begin + np.uint64(at)] = (np.uint64(old[first + begin + np.uint64(at)]) >> shift) & mask
    inside[whole] = (ONE << rest) - ONE if active[(first + begin) >> SEGMENT_BITS] else ZERO
    return whole + ONE


ClassTable = npt.NDArray[np.uint8]
"""u1[exponents]: the class of each exponent; ascending, from 0, without holes. Integers have one exponent."""

Active = npt.NDArray[np.uint8]
"""u1[segments]: 1 if a segment may contain changes, otherwise 0."""

MAX_CLASSES = 32


class ClassStreams(NamedTuple):
    """The changes of a block, class by class, ascending within a class."""

    counts: Counts
    """i8[classes], changed elements of each class."""
    gaps: Values
    """u4[changed]"""
    steps: Values
    """u4[changed], folded."""


def segments(n_elements: int) -> int:
    """Return the number of segments of a block of `n_elements`; the last one may be short."""
    return -(-n_elements // SEGMENT)


def all_active(n_elements: int) -> Active:
    """Return an `Active` in which every segment may contain changes."""
    return np.ones(segments(n_elements), np.uint8)


def split_classes(
    kind: ElementType, old: Bits, old_at: Bits, new_at: Bits, indices: Indices, table: ClassTable, active: Active
) -> ClassStreams:
    """Split the changes of a block into classes.

    Args:
        kind: the element type.
        old: uN[n], the block's old patterns, contiguous.
        old_at: uN[changed], the old patterns of the changed elements.
        new_at: uN[changed], the new patterns of the changed elements.
        indices: i8[changed], ascending, their indices in the block; each in an active segment.
        table: class of each exponent.
        active: the segments whose elements are counted.
    """
    counts = np.zeros(int(table[-1]) + 1, np.int64)
    gaps, steps = np.empty(indices.size, np.uint32), np.empty(indices.size, np.uint32)
    _split(old, old_at, new_at, indices, table, *_ranges(table), active, form_of(kind), new_tile(counts.size),
           counts, gaps, steps)  # fmt: skip
    return ClassStreams(counts, gaps, steps)


def select_classes(
    kind: ElementType, old: Bits, streams: ClassStreams, table: ClassTable, active: Active, start: int
) -> tuple[Indices, Bits, Bits]:
    """Invert `split_classes`: return indices + `start` (i8[changed]), old and new patterns (uN[changed]).

    Their order is tile by tile, and within a tile class by class. Raises DeltaError if a class has fewer elements in
    `old` (uN[n], contiguous) than its stream needs.
    """
    indices = np.empty(streams.gaps.size, np.int64)
    old_at, new_at = np.empty(indices.size, kind.bits), np.empty(indices.size, kind.bits)
    found = _select(
        old, streams.counts, streams.gaps, streams.steps, *_ranges(table), active, form_of(kind),
        new_tile(streams.counts.size), start, indices, old_at, new_at,
    )  # fmt: skip
    if found != indices.size:
        raise DeltaError(f"{indices.size - found} changed elements are beyond the last element of their class")
    return indices, old_at, new_at


def _ranges(table: ClassTable) -> tuple[ClassTable, ClassTable]:
    """Return the first exponent of each class and the number of exponents after it, u1[classes] each."""
    firsts = np.flatnonzero(np.diff(table, prepend=np.uint8(255)))
    spans = np.diff(firsts, append=table.size) - 1
    return firsts.astype(np.uint8), spans.astype(np.uint8)


@compiled
def _split(
    old: Bits,
    old_at: Bits,
    new_at: Bits,
    indices: Indices,
    table: ClassTable,
    firsts: ClassTable,
    spans: ClassTable,
    active: Active,
    form: Form,
    tile: Tile,
    counts: Counts,
    gaps: Values,
    steps: Values,
) -> None:
    shift, mask = form[0], form[1]
    for i in range(old_at.size):
        counts[table[(np.uint64(old_at[i]) >> shift) & mask]] += 1
    # The position at which each class's stream begins.
    place, expected = (np.cumsum(counts) - counts).astype(np.uint64), np.zeros(counts.size, np.uint64)
    at, changed = ZERO, np.uint64(indices.size)
    for begin in range(0, old.size, TILE):
        mark(old, np.uint64(begin), firsts, spans, active, form, tile)
        while at < changed and indices[at] < begin + TILE:
            inside = np.uint64(indices[at] - begin)
            which, word = np.uint64(table[tile.exponents[inside]]), inside >> WORD_BITS
            before = tile.masks[which, word] & ((ONE << (inside & IN_WORD)) - ONE)
            rank = tile.ranks[which, word] + count_ones(before)
            to = place[which]
            gaps[to] = rank - expected[which]
            steps[to] = folded(np.uint64(old_at[at]), np.uint64(new_at[at]), form)
            place[which] = to + ONE
            expected[which] = rank + ONE
            at += ONE


@compiled
def _select(
    old: Bits,
    counts: Counts,
    gaps: Values,
    steps: Values,
    firsts: ClassTable,
    spans: ClassTable,
    active: Active,
    form: Form,
    tile: Tile,
    start: int,
    indices: Indices,
    old_at: Bits,
    new_at: Bits,
) -> int:
    """Fill `indices`, `old_at` and `new_at`; return the number of changes found."""
    end, wanted = np.cumsum(counts).astype(np.uint64), np.zeros(counts.size, np.uint64)
    place = end - counts.astype(np.uint64)
    for group in range(counts.size):
        if counts[group]:
            wanted[group] = gaps[place[group]]
    found = ZERO
    for begin in range(0, old.size, TILE):
        mark(old, np.uint64(begin), firsts, spans, active, form, tile)
        for group in range(counts.size):
            which = np.uint64(group)
            at, last, rank, total = place[which], end[which], wanted[which], tile.totals[which]
            masks, ranks = tile.masks[which], tile.ranks[which]
            while at < last and rank < total:
                index = np.uint64(begin) + _element(masks, ranks, rank)
                before = np.uint64(old[index])
                indices[found] = start + np.int64(index)
                old_at[found] = before
                new_at[found] = moved(before, np.uint64(steps[at]), form)
                found += ONE
                at += ONE
                if at < last:
                    rank += np.uint64(gaps[at]) + ONE
            place[which], wanted[which] = at, rank
    return int(found)


@compiled
def _element(masks: npt.NDArray[np.uint64], ranks: npt.NDArray[np.uint64], rank: np.uint64) -> np.uint64:
    """Return the index in its tile of the element with this rank; `masks` and `ranks` (u8[256]) belong to its class."""
    word = ZERO
    # Sums, not branches: the direction of a binary search cannot be predicted.
    for bit in (7, 6, 5, 4, 3, 2, 1, 0):
        half = np.uint64(bit)
        word += np.uint64(ranks[word + (ONE << half)] <= rank) << half
    inside: np.uint64 = nth_one(masks[word], rank - ranks[word])
    return (word << WORD_BITS) + inside


LANES = 4
"""Number of counters for each exponent, used in turn, so that an addition does not wait for the previous one."""


def count_exponents(kind: ElementType, bits: Bits) -> Counts:
    """Count each exponent in `bits` (uN[n], contiguous): i8[exponents]."""
    lanes = np.zeros((LANES, kind.exponents), np.int64)
    _count_exponents(bits, form_of(kind), lanes)
    counts: Counts = lanes.sum(axis=0)
    return counts


def count_active_exponents(kind: ElementType, bits: Bits, active: Active, run: int, every: int) -> Counts:
    """Count exponents in the active segments of `bits`, and of these only in the first `run` of `run` * `every`."""
    lanes = np.zeros((LANES, kind.exponents), np.int64)
    _count_active_exponents(bits, active, form_of(kind), run, every, lanes)
    counts: Counts = lanes.sum(axis=0)
    return counts


@compiled
def _count_exponents(bits: Bits, form: Form, lanes: Counts) -> None:
    shift, mask = form[0], form[1]
    whole = bits.size // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[np.uint64(lane), (np.uint64(bits[first + lane]) >> shift) & mask] += 1
    for i in range(whole, bits.size):
        lanes[np.uint64(0), (np.uint64(bits[i]) >> shift) & mask] += 1


@compiled
def _count_active_exponents(bits: Bits, active: Active, form: Form, run: int, every: int, lanes: Counts) -> None:
    met = 0
    for segment in range(active.size):
        if active[segment]:
            if met // run % every == 0:
                _count_exponents(bits[segment * SEGMENT : (segment + 1) * SEGMENT], form, lanes)
            met += 1
