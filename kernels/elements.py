"""The element types that a weight delta can carry, as bit patterns.

A tensor is a flat array of unsigned integers: the patterns of its elements. The codec and the fingerprints see nothing
else, so that every pattern survives: NaN payloads, the sign of zero, infinities, subnormals. An int4 tensor is packed,
two values to a byte, the first in the low four bits; its elements, for the codec and the fingerprints, are the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from tidemill.kernels.fingerprint import Bits


class DeltaError(ValueError):
    """Bytes that are not a delta, or not one for these weights; the message says why. Nothing was written."""


class Order(IntEnum):
    """How the values of a type are ordered by their patterns."""

    SIGN_MAGNITUDE = 0
    TWOS_COMPLEMENT = 1
    UNSIGNED = 2


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type: its name (PyTorch's, without the `torch.`), its code on the wire, and what its patterns are."""

    name: str
    code: int
    bits: np.dtype[np.unsignedinteger[Any]]
    order: Order
    exponent_bits: int
    """Width of the exponent; 0 for integers."""
    mantissa_bits: int
    """Where the exponent begins."""

    @property
    def width(self) -> int:
        """Bits of a pattern."""
        return 8 * self.bits.itemsize

    @property
    def exponents(self) -> int:
        """How many exponents there are; 1 for integers."""
        return 1 << self.exponent_bits


def _float(name: str, code: int, bits: type[np.unsignedinteger[Any]], exponent: int, mantissa: int) -> ElementType:
    return ElementType(name, code, np.dtype(bits), Order.SIGN_MAGNITUDE, exponent, mantissa)


def _integer(name: str, code: int, order: Order) -> ElementType:
    return ElementType(name, code, np.dtype(np.uint8), order, 0, 0)


ELEMENT_TYPES = (
    _float("bfloat16", 1, np.uint16, 8, 7),
    _float("float16", 2, np.uint16, 5, 10),
    _float("float32", 3, np.uint32, 8, 23),
    _float("float8_e4m3fn", 4, np.uint8, 4, 3),
    _float("float8_e5m2", 5, np.uint8, 5, 2),
    _integer("int8", 6, Order.TWOS_COMPLEMENT),
    _integer("uint8", 7, Order.UNSIGNED),
    _integer("int4", 8, Order.UNSIGNED),
)
BY_NAME = {kind.name: kind for kind in ELEMENT_TYPES}
BY_CODE = {kind.code: kind for kind in ELEMENT_TYPES}


def element_type(dtype: str) -> ElementType:
    """The element type of a name. Raises DeltaError for one that a delta cannot carry."""
    if dtype not in BY_NAME:
        raise DeltaError(f"dtype {dtype!r} cannot be carried by a delta; known are {', '.join(BY_NAME)}")
    return BY_NAME[dtype]


def flat_bits(bits: Bits, kind: ElementType) -> Bits:
    """The patterns as one contiguous row, in C order. Raises DeltaError when they are not of the type's width."""
    if bits.dtype != kind.bits:
        raise DeltaError(f"a {kind.name} tensor is given as {kind.bits} bit patterns, got {bits.dtype}")
    return np.ascontiguousarray(bits).reshape(-1)
