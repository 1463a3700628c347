"""Rounding of rows to the values of codes and scales, in the CPU's memory: `quantise.round_rows` in one compiled loop.

By torch's operations a few rows take 30 to 80 times as long, more than the product that they are rounded for. The
results have the same bits: `quantise` defines the formats. A number is rounded to a type of few bits by the addition of
a number whose unit in the last place is the distance of that type's neighbouring values.
"""

from __future__ import annotations

from math import frexp
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled

Floats = npt.NDArray[np.float32]
_SIZE, _EXPONENT = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_LARGEST = np.int32(0x7F000000)
"""Bits of 2**127, `quantise.LARGEST`."""
_LEAST, _FRACTION = np.int32(127 - 116), np.int32(23)
_E4M3_GREATEST, _E4M3_NORMAL, _E4M3_SHIFTER = np.float32(448), np.float32(2**-6), np.float32(1.5 * 2**20)
_E4M3_LEAST, _E2M1_GREATEST = np.float32(2**-9), np.float32(6)


@compiled
def _power_of_two(greatest: Any, carry: Any, exponent: Any) -> Any:  # noqa: ANN401 - numba's scalars
    biased = max(((greatest + carry) >> _FRACTION) - exponent, _LEAST)
    return np.int32(biased << _FRACTION).view(np.float32)


@compiled
def _nearest(size: Any, greatest: Any, normal: Any, shifter: Any) -> Any:  # noqa: ANN401 - numba's scalars
    """Round a number without a sign to nearest, ties to even, saturating."""
    kept = min(size, greatest)
    power = max(np.int32(np.float32(kept).view(np.int32) & _EXPONENT).view(np.float32), normal)
    added = power * shifter
    return (kept + added) - added


@compiled
def _round(
    rows: Floats, made: Floats, columns: int, has_outer: bool, greatest: Any, normal: Any, shifter: Any,  # noqa: ANN401
    carry: Any, exponent: Any,  # noqa: ANN401 - numba's scalars
) -> None:  # fmt: skip
    for row in range(rows.shape[0]):
        largest = np.int32(0)
        for column in range(rows.shape[1]):
            largest = max(largest, np.int32(np.float32(rows[row, column]).view(np.int32) & _SIZE))
        if largest > _LARGEST:
            made[row] = rows[row]
            continue
        outer = _power_of_two(largest, carry, exponent)
        for begin in range(0, rows.shape[1], columns):
            end = min(begin + columns, rows.shape[1])
            most = np.int32(0)
            for column in range(begin, end):
                most = max(most, np.int32(np.float32(rows[row, column]).view(np.int32) & _SIZE))
            if has_outer:
                wanted = np.int32(most).view(np.float32) / (outer * _E2M1_GREATEST)
                scale = max(_nearest(wanted, _E4M3_GREATEST, _E4M3_NORMAL, _E4M3_SHIFTER), _E4M3_LEAST)
                factor = scale * outer
            else:
                factor = _power_of_two(most, carry, exponent)
            for column in range(begin, end):
                value = rows[row, column]
                size = _nearest(abs(value) / factor, greatest, normal, shifter)
                made[row, column] = np.copysign(size * factor, value)


def round_on_host(rows: Floats, columns: int, has_outer: bool, *, greatest: float, bias: int, mantissa: int) -> Floats:
    """Return rows f4[R, C] rounded to a format whose blocks are `columns` of one row; those without codes unchanged.

    Args:
        has_outer: as in `quantise.BlockFormat`.
        greatest, bias, mantissa: those of its codes, as in `quantise.MiniFloat`.
    """
    made = np.empty_like(rows)
    fraction, exponent = frexp(6 * 448 if has_outer else 448)
    _round(
        rows,
        made,
        columns,
        has_outer,
        np.float32(greatest),
        np.float32(2.0 ** (1 - bias)),
        np.float32(1.5 * 2.0 ** (23 - mantissa)),
        np.int32(0x7FFFFF - int((2 * fraction - 1) * 2**23)),
        np.int32(exponent - 1),
    )
    return made
