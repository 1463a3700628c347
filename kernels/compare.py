"""Which elements changed: two arrays of bit patterns are compared, and the indices of what differs compacted.

One linear pass. Most stretches of a weight delta hold no change and cost one comparison of vectors; in a stretch that
holds one every index is written and only those of changed elements are kept, which spares a branch for each element.
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.compiled import compiled
from tidemill.kernels.fingerprint import Bits, Indices

STRETCH = 32
TILE = 1 << 16
"""Elements compared between two extensions of the result: bounds what is held beside it."""

ONE = np.uint64(1)


def changed_indices(old: Bits, new: Bits) -> Indices:
    """Ascending indices (i8[changed]) of the elements that differ between `old` and `new` (uN[n] each, contiguous).

    Raises ValueError for differing sizes or widths.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype}{old.shape} cannot be compared with {new.dtype}{new.shape}")
    scratch = np.empty(min(TILE, old.size) + 1, np.int64)
    parts = [np.empty(0, np.int64)]
    for first in range(0, old.size, TILE):
        tile = slice(first, first + TILE)
        parts.append(scratch[: _compact(old[tile], new[tile], first, scratch)].copy())
    return np.concatenate(parts)


@compiled
def _compact(old: Bits, new: Bits, start: int, indices: Indices) -> int:
    """Write start + the index of each difference into `indices`, of one element more than `old`; how many there are."""
    found = np.uint64(0)
    whole = old.size // STRETCH * STRETCH
    for first in range(0, whole, STRETCH):
        difference = 0
        for i in range(STRETCH):
            difference |= old[first + i] ^ new[first + i]
        if difference:
            for i in range(STRETCH):
                indices[found] = start + first + i
                found += np.uint64(old[first + i] != new[first + i])
    for i in range(whole, old.size):
        if old[i] != new[i]:
            indices[found] = start + i
            found += ONE
    return int(found)
