"""Loops over two arrays of bit patterns: find the elements that differ, and write the new patterns.

Changes are compacted in one linear pass, a word of 64 elements at a time: the comparison of a word gives a mask, and
the loop visits its set bits.
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.compiled import WORD, Bits, Indices, compiled, differing, lowest_one

TILE = 1 << 16
"""Elements compared between two checks of the free space for differences."""
EXPECTED_SHARE = 16
"""Space is allocated first for differences in 1 / 16 of the elements. Pages that are not written use no memory."""

ONE = np.uint64(1)


def changed_elements(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    """Find the elements that differ between `old` and `new` (uN[n] each, contiguous).

    Returns their indices (i8[changed], ascending), and their patterns in `old` and in `new` (uN[changed] each). Raises
    ValueError for differing sizes or widths.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype}{old.shape} cannot be compared with {new.dtype}{new.shape}")
    room = min(old.size, TILE + old.size // EXPECTED_SHARE)
    indices, old_at, new_at = _rows(room, old)
    found = 0
    for first in range(0, old.size, TILE):
        if indices.size < min(old.size, found + TILE):
            more = _rows(old.size, old)
            for row, before in zip(more, (indices, old_at, new_at), strict=True):
                row[:found] = before[:found]
            indices, old_at, new_at = more
        tile = slice(first, first + TILE)
        found += _compact(old[tile], new[tile], first, indices[found:], old_at[found:], new_at[found:])
    return indices[:found], old_at[:found], new_at[:found]


def scatter(bits: Bits, indices: Indices, new_at: Bits) -> None:
    """Write `new_at` (uN[k]) into `bits` at `indices` (i8[k]). Raises ValueError for differing sizes or widths."""
    if indices.shape != new_at.shape or bits.dtype != new_at.dtype:
        raise ValueError(f"{new_at.size} patterns ({new_at.dtype}) for {indices.size} elements ({bits.dtype})")
    bits[indices] = new_at


def _rows(room: int, like: Bits) -> tuple[Indices, Bits, Bits]:
    return np.empty(room, np.int64), np.empty(room, like.dtype), np.empty(room, like.dtype)


@compiled
def _compact(old: Bits, new: Bits, start: int, indices: Indices, old_at: Bits, new_at: Bits) -> int:
    """Write start + index and both patterns of each difference into rows that are long enough; return their number."""
    found = np.uint64(0)
    words = old.size // WORD
    for word in range(words):
        first = np.uint64(word * WORD)
        mask = differing(old, new, first)
        while mask:
            i = first + lowest_one(mask)
            mask &= mask - ONE
            indices[found] = start + np.int64(i)
            old_at[found] = old[i]
            new_at[found] = new[i]
            found += ONE
    for rest in range(words * WORD, old.size):
        if old[rest] != new[rest]:
            indices[found] = start + rest
            old_at[found] = old[rest]
            new_at[found] = new[rest]
            found += ONE
    return int(found)
