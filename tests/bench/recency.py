"""How much smaller a delta would be if both ends remembered which elements changed recently, and in which direction.

The memory is an age and a sign for each element: half a byte. A context is the old pattern's exponent, as in the
exponent-class bound, with that age and sign; its bound is fitted in the same way (`kernels.bounds`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.kernels.bounds import NOTHING, DeltaBounds, DeltaCounts
from tidemill.kernels.delta import TensorChange
from tidemill.kernels.fingerprint import Bits

AGES = np.array([1, 2, 3, 5, 9, 17, 33], np.uint8)
"""First age of each bucket but the first, in versions since the last change; the last bucket includes "never"."""
OLDEST = 255
BYTES_PER_ELEMENT = 0.5


class RecencyContexts:
    """Follows the tensors of one type through consecutive versions, and computes bounds for one version."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._tensors: dict[str, _Memory] = {}
        self._plain = DeltaCounts(dtype)
        self._known: dict[int, DeltaCounts] = {}

    def measure(self, change: TensorChange) -> None:
        """Count a tensor's change with and without its memory. All measured tensors share one fit."""
        old, new = change.old_bits.reshape(-1), change.new_bits.reshape(-1)
        self._plain.count(old, new)
        contexts = self._memory(change).contexts()
        for context in np.unique(contexts):
            inside = contexts == context
            self._known.setdefault(int(context), DeltaCounts(self._dtype)).count(old[inside], new[inside])

    def observe(self, change: TensorChange) -> None:
        """Store a tensor's change in its memory."""
        self._memory(change).observe(change.old_bits.reshape(-1), change.new_bits.reshape(-1))

    def bounds(self) -> tuple[DeltaBounds, DeltaBounds]:
        """Return for all measured changes: the exponent-class bound, and the bound with age and sign added."""
        return self._plain.bounds(), sum((counts.bounds() for counts in self._known.values()), NOTHING)

    def _memory(self, change: TensorChange) -> _Memory:
        return self._tensors.setdefault(change.name, _Memory(change.old_bits.size))


class _Memory:
    """Age and direction of the last change of one tensor's elements."""

    def __init__(self, elements: int) -> None:
        self._age = np.full(elements, OLDEST, np.uint8)
        self._rose = np.zeros(elements, np.bool_)

    def contexts(self) -> npt.NDArray[np.int64]:
        """Return i8[elements]: the bucket of an element's age, and its direction."""
        buckets: npt.NDArray[np.int64] = np.searchsorted(AGES, self._age, side="right")
        return 2 * buckets + self._rose

    def observe(self, old: Bits, new: Bits) -> None:
        """Store which elements changed, and whether they increased."""
        moved = old != new
        self._age[self._age < OLDEST] += 1
        self._age[moved] = 0
        # Patterns of floats increase with the magnitude, so they decrease with the value if the sign bit is set.
        negative = old >= 1 << (8 * old.itemsize - 1)
        self._rose[moved] = ((new > old) ^ negative)[moved]
