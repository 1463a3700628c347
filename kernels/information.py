"""What things cost in bits, in fixed point: encoders on every machine reckon, and so choose, alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled

FRACTION = 24
"""Fractional bits of a cost: 2**24 logarithms add up to an error of at most one bit."""
BIT = 1 << FRACTION
"""One bit, as a cost."""


@compiled
def log2(value: int) -> int:
    """The binary logarithm of an integer from 1 to 2**31, in units of 2**-24, rounded down; 0 for 0."""
    if value <= 0:
        return 0
    whole = 0
    while value >> (whole + 1):
        whole += 1
    mantissa = np.uint64(value) << np.uint64(31 - whole)
    result = whole
    for _ in range(FRACTION):
        mantissa = (mantissa * mantissa) >> np.uint64(31)
        result <<= 1
        if mantissa >> np.uint64(32):
            result |= 1
            mantissa >>= np.uint64(1)
    return result


@compiled
def choice_cost(total: int, chosen: int) -> int:
    """Which `chosen` of `total` things, when every one is as likely."""
    other = total - chosen
    return total * log2(total) - chosen * log2(chosen) - other * log2(other)


@compiled
def kind_cost(counts: npt.NDArray[np.int64]) -> int:
    """Which kind each of some things is, when `counts` (i8[kinds]) of each kind occur."""
    total, cost = 0, 0
    for count in counts:
        total += count
        cost -= count * log2(count)
    return cost + total * log2(total)
