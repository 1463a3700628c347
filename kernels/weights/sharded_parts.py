"""The part of each weight that one rank of a sharded model holds, and publishes, itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tidemill.kernels.fingerprint import Bits, Fingerprint, TensorKey, fingerprint
from tidemill.kernels.weights.bits import Weight


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """Elements [start, start + n) of a weight, n possibly 0."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`)."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    start: int
    """Flat element of the whole weight, in C order."""
    bits: Bits
    """uN[n], bit patterns, flat."""

    @property
    def total(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape)

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the part; those of all ranks add up to the weight's."""
        return fingerprint(self.bits, TensorKey.of(self.name), self.start)

    def outline(self) -> Weight:
        """The whole weight's type and shape, in an array of zeros that takes no memory."""
        return Weight(self.dtype, np.broadcast_to(np.zeros((), self.bits.dtype), self.shape))


Parts = Mapping[str, TensorPart]
"""A rank's part of every weight, by name, in the same order on every rank."""
