"""The element types that a weight delta can carry, as bit patterns.

A tensor is a flat array of unsigned integers: the patterns of its elements. The codec and the fingerprints see nothing
else, so that every pattern survives: NaN payloads, the sign of zero, infinities, subnormals. An int4 tensor is packed,
two values to a byte, the first in the low four bits; its elements, for the codec and the fingerprints, are the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.kernels.fingerprint import Bits


class DeltaError(ValueError):
    """Bytes that are not a delta, or not one for these weights; the message says why. Nothing was written."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type: its name (PyTorch's, without the `torch.`), its code on the wire, and its pattern's type."""

    name: str
    code: int
    bits: np.dtype[np.unsignedinteger[Any]]


def _types(bits: type[np.unsignedinteger[Any]], codes: dict[str, int]) -> list[ElementType]:
    return [ElementType(name, code, np.dtype(bits)) for name, code in codes.items()]


ELEMENT_TYPES = (
    *_types(np.uint16, {"bfloat16": 1, "float16": 2}),
    *_types(np.uint32, {"float32": 3}),
    *_types(np.uint8, {"float8_e4m3fn": 4, "float8_e5m2": 5, "int8": 6, "uint8": 7, "int4": 8}),
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
