"""What is inside a block: the changed elements as bytes, in the cheaper of two encodings.

A decoder knows the exact size of what it unpacks before it unpacks it, so hostile bytes cannot ask for memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import zstandard

from tidemill.kernels.elements import DeltaError, ElementType
from tidemill.kernels.fingerprint import Bits, Indices

ZSTD_LEVEL = 3
GAP = np.dtype("<u4")


class Encoding(IntEnum):
    """How a block's payload is to be read."""

    GAPS = 1
    """Distances between changed elements, then their new patterns, both as byte planes, in one zstandard frame."""
    DENSE = 2
    """The new patterns of all elements of the block as byte planes, in one zstandard frame."""


def pack(indices: Indices, new_bits: Bits, kind: ElementType) -> tuple[Encoding, bytes]:
    """Encode a block of which `indices` (i8[n], ascending, relative to the block) changed to `new_bits[indices]`.

    `new_bits` (uN[block]) are the new patterns of the whole block. Picks the encoding that is smaller before entropy
    coding: a block in which most elements changed is cheaper without positions.
    """
    if indices.size * (GAP.itemsize + kind.bits.itemsize) >= new_bits.nbytes:
        return Encoding.DENSE, _compress(_planes(new_bits, kind.bits))
    gaps = np.diff(indices, prepend=-1) - 1
    return Encoding.GAPS, _compress(_planes(gaps, GAP) + _planes(new_bits[indices], kind.bits))


def unpack(encoding: int, payload: memoryview, n_block: int, n_changed: int, kind: ElementType) -> tuple[Indices, Bits]:
    """Indices (i8[n_changed], ascending, in [0, n_block)) and new patterns (uN[n_changed]) of a payload.

    Raises DeltaError when the payload does not hold exactly that.
    """
    if encoding == Encoding.DENSE:
        return np.arange(n_block, dtype=np.int64), _elements(
            _decompress(payload, n_block * kind.bits.itemsize), kind.bits
        )
    if encoding != Encoding.GAPS:
        raise DeltaError(f"unknown block encoding {encoding}: written by a newer version?")
    split = n_changed * GAP.itemsize
    unpacked = _decompress(payload, split + n_changed * kind.bits.itemsize)
    indices = _positions(_elements(unpacked[:split], GAP), n_block)
    return indices, _elements(unpacked[split:], kind.bits)


def payload_limit(n_block: int, kind: ElementType) -> int:
    """Upper bound, in bytes, of the payload of a block of `n_block` elements in any encoding."""
    unpacked = n_block * (GAP.itemsize + kind.bits.itemsize)
    return unpacked + unpacked // 128 + 512


def _positions(gaps: Bits, n_block: int) -> Indices:
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if indices.size and indices[-1] >= n_block:
        raise DeltaError(f"a changed element at {indices[-1]} lies outside its block of {n_block} elements")
    return indices


def _planes(values: Bits | Indices, layout: np.dtype[np.unsignedinteger[Any]]) -> bytes:
    """Byte planes of little-endian integers: all lowest bytes, then all next ones. Bytes alike lie together."""
    return values.astype(layout.newbyteorder("<")).view(np.uint8).reshape(-1, layout.itemsize).T.tobytes()


def _elements(planes: memoryview, layout: np.dtype[np.unsignedinteger[Any]]) -> Bits:
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(layout.itemsize, -1)
    return np.ascontiguousarray(rows.T).view(layout.newbyteorder("<")).reshape(-1).astype(layout, copy=False)


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def _decompress(payload: memoryview, expected: int) -> memoryview:
    """The frame's content, which must say that it has `expected` bytes before it is unpacked, and then have them."""
    try:
        declared = zstandard.frame_content_size(payload)
        if declared != expected:
            raise DeltaError(f"the payload declares {declared} bytes where the block's header says {expected}")
        unpacked = zstandard.ZstdDecompressor().decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the payload is not a zstandard frame: {error}") from error
    if len(unpacked) != expected:
        raise DeltaError(f"the payload holds {len(unpacked)} bytes where the block's header says {expected}")
    return memoryview(unpacked)
