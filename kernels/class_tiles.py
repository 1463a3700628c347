"""Which elements of a stretch of weights belong to which class: a mask of each word of 64, and the ranks before it.

Splitting and selecting go over a block tile by tile. A tile is marked once, by vector comparisons, for every class;
after that the rank of an element, or the element of a rank, is a count of bits, without a loop over its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled
from tidemill.kernels.fingerprint import Bits
from tidemill.kernels.ulp_steps import Form
from tidemill.kernels.vectors import WORD, count_ones, extract_field, within

SEGMENT = 256
"""Elements that are active, or not, together."""
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
    """What is known of a tile, written by `mark` and read until the next one."""

    exponents: Bytes
    """u1[16384], of each element."""
    active: Masks
    """u8[256], the active elements."""
    masks: Masks
    """u8[classes, 256], the active elements of each class."""
    ranks: Masks
    """u8[classes, 256], how many of the class lie before the word, counted from the block's beginning."""
    totals: Masks
    """u8[classes], how many of the class lie before the tile's end."""


def new_tile(classes: int) -> Tile:
    """A tile before the first."""
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

    A class has the exponents from its one of `firsts` (u1[classes]) on, and so many more as its one of `spans` says.
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
    """Read the exponents, and mark the active elements; how many words there are."""
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
