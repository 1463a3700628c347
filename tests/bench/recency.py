"""How much cheaper a delta would be if both ends remembered which elements moved lately, and in which direction.

The memory is an age and a sign for each element: half a byte. A context is the old pattern's exponent, as in the
exponent-class bound, with that age and sign; its bound is fitted in the same way (`kernels.bounds`).
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.bounds import NOTHING, Bounds, DeltaCounts
from tidemill.kernels.delta import TensorChange

AGES = np.array([1, 2, 3, 5, 9, 17, 33], np.uint8)
"""First age of each bucket but the first, in versions since the last change; the last bucket is that and never."""
OLDEST = 255
BYTES_PER_ELEMENT = 0.5


class RecencyContext:
    """Follows one tensor through consecutive versions."""

    def __init__(self, dtype: str, elements: int) -> None:
        self._dtype = dtype
        self._age = np.full(elements, OLDEST, np.uint8)
        self._rose = np.zeros(elements, np.bool_)

    def bounds(self, change: TensorChange) -> Bounds:
        """The bounds of a change in its contexts; `exponent_class` is that of exponent, age and sign together."""
        context = 2 * np.searchsorted(AGES, self._age, side="right") + self._rose
        total = NOTHING
        for each in np.unique(context):
            counts = DeltaCounts(self._dtype)
            inside = context == each
            counts.count(change.old_bits.reshape(-1)[inside], change.new_bits.reshape(-1)[inside])
            total = total + counts.bounds()
        return total

    def observe(self, change: TensorChange) -> None:
        """Remember a change."""
        old, new = change.old_bits.reshape(-1), change.new_bits.reshape(-1)
        moved = old != new
        self._age[self._age < OLDEST] += 1
        self._age[moved] = 0
        # Patterns of floats grow with the magnitude, downwards where the sign bit is set.
        negative = old >= 1 << (8 * old.itemsize - 1)
        self._rose[moved] = ((new > old) ^ negative)[moved]
