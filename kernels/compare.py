"""Which elements changed: two arrays of bit patterns are compared, and what differs is compacted.

One linear pass, a word of 64 elements at a time: the comparison of a word is a mask, whose set bits are visited.
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.compiled import compiled
from tidemill.kernels.fingerprint import Bits, Indices
from tidemill.kernels.vectors import WORD, differing, lowest_one

TILE = 1 << 16
"""Elements compared between two extensions of the result: bounds what is held beside it."""

ONE = np.uint64(1)


def changed_elements(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    """The elements that differ between `old` and `new` (uN[n] each, contiguous).

    Returns their indices (i8[changed], ascending), and their patterns in `old` and in `new` (uN[changed] each). Raises
    ValueError for differing sizes or widths.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype}{old.shape} cannot be compared with {new.dtype}{new.shape}")
    size = min(TILE, old.size)
    scratch = np.empty(size, np.int64), np.empty(size, old.dtype), np.empty(size, old.dtype)
    parts = [tuple(row[:0].copy() for row in scratch)]
    for first in range(0, old.size, TILE):
        tile = slice(first, first + TILE)
        found = _compact(old[tile], new[tile], first, *scratch)
        parts.append(tuple(row[:found].copy() for row in scratch))
    indices, old_at, new_at = (np.concatenate(row) for row in zip(*parts, strict=True))
    return indices, old_at, new_at


@compiled
def _compact(old: Bits, new: Bits, start: int, indices: Indices, old_at: Bits, new_at: Bits) -> int:
    """Write start + the index of each difference, and both patterns, into rows as long as `old`; how many there are."""
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
