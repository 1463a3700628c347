"""The formats that others ship weight deltas in, as yardsticks for ours: four encoders with their decoders.

Each turns a tensor's old and new patterns into bytes, and the bytes and the old patterns into the new ones, bit for
bit. They are measured, never sent: what they decode is what they encoded a moment before, and they do not check it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from tidemill.kernels.fingerprint import Bits, Indices

ZSTD_LEVEL = 1
INDEX = np.dtype("<i4")
COUNT = np.dtype("<u4")
ESCAPE = 0xFFFF
"""A two-byte gap that says: so many unchanged elements, and no changed one after them."""


class Format(ABC):
    """A way to write what changed between two tensors of at most 2**31 elements."""

    name: ClassVar[str]

    @abstractmethod
    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        """The change from `old_bits` to `new_bits` (uN[n] each) as bytes."""

    @abstractmethod
    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        """The new patterns (uN[n]) from what `encode` made and the old ones, which are left alone."""


class DenseXor(Format):
    """Old XOR new of every element, changed or not, compressed."""

    name = "xor+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        return _compress((old_bits ^ new_bits).tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        return old_bits ^ np.frombuffer(_decompress(data), old_bits.dtype)


class RawIndices(Format):
    """Four bytes of index and the new pattern for each changed element, as they are."""

    name = "int32+value"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        return indices.astype(INDEX).tobytes() + new_bits[indices].tobytes()

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        count = len(data) // (INDEX.itemsize + old_bits.itemsize)
        indices, values = np.frombuffer(data, INDEX, count), data[count * INDEX.itemsize :]
        new_bits = old_bits.copy()
        new_bits[indices] = np.frombuffer(values, old_bits.dtype)
        return new_bits


class GapValue(Format):
    """The number of unchanged elements before each changed one in two bytes with an escape, and the new pattern."""

    name = "u16-gap+value+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        gaps = _escaped(_gaps(indices))
        return _compress(_counted(gaps) + gaps.tobytes() + new_bits[indices].tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        gaps, values = _split(_decompress(data), np.dtype("<u2"))
        ends = gaps != ESCAPE
        indices = np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
        new_bits = old_bits.copy()
        new_bits[indices] = np.frombuffer(values, old_bits.dtype)
        return new_bits


class GapXor(Format):
    """The number of unchanged elements before each changed one in two or four bytes, and old XOR new."""

    name = "gap+xor+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        gaps = _gaps(indices)
        wide = bool(gaps.size and gaps.max() > ESCAPE)
        packed = gaps.astype("<u4" if wide else "<u2")
        changes = old_bits[indices] ^ new_bits[indices]
        return bytes([wide]) + _compress(_counted(packed) + packed.tobytes() + changes.tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        gaps, changes = _split(_decompress(data[1:]), np.dtype("<u4" if data[0] else "<u2"))
        new_bits = old_bits.copy()
        new_bits[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= np.frombuffer(changes, old_bits.dtype)
        return new_bits


FORMATS: tuple[Format, ...] = (DenseXor(), RawIndices(), GapValue(), GapXor())


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _escaped(gaps: Indices) -> npt.NDArray[np.uint16]:
    """Two-byte gaps; one that does not fit follows escapes that hold the rest."""
    escapes = gaps // ESCAPE
    packed = np.full(gaps.size + int(escapes.sum()), ESCAPE, "<u2")
    packed[np.cumsum(escapes + 1) - 1] = gaps % ESCAPE
    return packed


def _counted(values: npt.NDArray[Any]) -> bytes:
    return np.array(values.size, COUNT).tobytes()


def _split(data: bytes, layout: np.dtype[Any]) -> tuple[npt.NDArray[Any], bytes]:
    """The integers that a count announces, and the bytes after them."""
    count = int(np.frombuffer(data, COUNT, 1)[0])
    end = COUNT.itemsize + count * layout.itemsize
    return np.frombuffer(data[COUNT.itemsize : end], layout), data[end:]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
