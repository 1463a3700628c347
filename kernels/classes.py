"""Splitting a block's changes by the exponent of the old weight, and finding them again: what both ends know for free.

A step of training moves every weight by about as much, and a small weight has close neighbours: the smaller a weight,
the more often it changes. So the elements of a block fall into classes, each an interval of exponents of the OLD
pattern, and each class has its own stream:

    rank     how many elements of the class come before this one in the block (in active segments)
    gap      rank - the rank of the class's previous changed element - 1; its first changed element: its rank
    step     how many values the element moved by, with the direction (`kernels.ulp_steps`)

The streams lie one after the other, class by class, each in ascending order. A block has segments of 256 elements; a
segment may be inactive, which takes its elements out of the count: it holds no change.

Plain arrays in, plain arrays out, integers only: other processors can do the same and must come to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.kernels.class_tiles import IN_WORD, SEGMENT, TILE, WORD_BITS, Tile, mark, new_tile
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import DeltaError, ElementType
from tidemill.kernels.fingerprint import Bits, Indices
from tidemill.kernels.ulp_steps import Form, Values, folded, form_of, moved
from tidemill.kernels.vectors import count_ones, nth_one

ClassTable = npt.NDArray[np.uint8]
"""u1[exponents]: the class of each exponent; ascending, from 0, without holes. Integers have one exponent."""

Active = npt.NDArray[np.uint8]
"""u1[segments]: 1 where a segment may hold changes, else 0."""

Counts = npt.NDArray[np.int64]
MAX_CLASSES = 32
ZERO, ONE = np.uint64(0), np.uint64(1)


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
    kind: ElementType, old: Bits, old_at: Bits, new_at: Bits, indices: Indices, table: ClassTable, active: Active
) -> ClassStreams:
    """Split the changes of a block into classes.

    Args:
        kind: the element type.
        old: uN[n], the block's old patterns, contiguous.
        old_at: uN[changed], those of the changed elements.
        new_at: uN[changed], the new patterns of the changed elements.
        indices: i8[changed], ascending, where they are in the block; each in an active segment.
        table: class of each exponent.
        active: which segments count.
    """
    counts = np.zeros(int(table[-1]) + 1, np.int64)
    gaps, steps = np.empty(indices.size, np.uint32), np.empty(indices.size, np.uint32)
    _split(old, old_at, new_at, indices, table, *_ranges(table), active, form_of(kind), new_tile(counts.size),
           counts, gaps, steps)  # fmt: skip
    return ClassStreams(counts, gaps, steps)


def select_classes(
    kind: ElementType, old: Bits, streams: ClassStreams, table: ClassTable, active: Active, start: int
) -> tuple[Indices, Bits, Bits]:
    """The changes that `split_classes` split: indices + `start` (i8[changed]), old and new patterns (uN[changed]).

    They come tile by tile, and within a tile class by class. Raises DeltaError when a class has fewer elements in `old`
    (uN[n], contiguous) than its stream asks for.
    """
    indices = np.empty(streams.gaps.size, np.int64)
    old_at, new_at = np.empty(indices.size, kind.bits), np.empty(indices.size, kind.bits)
    found = _select(
        old, streams.counts, streams.gaps, streams.steps, *_ranges(table), active, form_of(kind),
        new_tile(streams.counts.size), start, indices, old_at, new_at,
    )  # fmt: skip
    if found != indices.size:
        raise DeltaError(f"{indices.size - found} changed elements lie beyond the last element of their class")
    return indices, old_at, new_at


def _ranges(table: ClassTable) -> tuple[ClassTable, ClassTable]:
    """u1[classes] each: the first exponent of each class, and how many more there are up to its last."""
    firsts = np.flatnonzero(np.diff(table, prepend=np.uint8(255)))
    spans = np.diff(firsts, append=table.size) - 1
    return firsts.astype(np.uint8), spans.astype(np.uint8)


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
    place, expected = _starts(counts), np.zeros(counts.size, np.uint64)
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
    """How many of the changes were found."""
    place, wanted = _starts(counts), np.zeros(counts.size, np.uint64)
    end = place + counts.astype(np.uint64)
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
    """Where in its tile the element is that has a rank in a class; `masks` and `ranks` (u8[256]) are the class's."""
    word = ZERO
    # Sums, not branches: which way a search turns cannot be predicted.
    for bit in (7, 6, 5, 4, 3, 2, 1, 0):
        half = np.uint64(bit)
        word += np.uint64(ranks[word + (ONE << half)] <= rank) << half
    inside: np.uint64 = nth_one(masks[word], rank - ranks[word])
    return (word << WORD_BITS) + inside
