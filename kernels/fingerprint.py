"""A linear fingerprint of tensors: the proof that two places hold the same weights, bit for bit.

    F(tensor) = sum over i of PRF(key(name), i) * (bits[i] + 1)   mod 2**64, in two lanes with independent keys

where `bits[i]` is element i's bit pattern in the checkpoint's dtype, i the flat index in checkpoint coordinates, and
PRF the splitmix64 generator (Steele, Lea, Flood 2014) at position i of a stream that starts at the tensor's key,
xxh3-128 of its name. Invariants:

- the order of the elements and how they are split over shards, ranks or fused runtime tensors do not matter;
- F(new) = F(old) + the fingerprint of the change, in time proportional to the number of changed elements;
- index and tensor name are part of the sum: if two elements, or two tensors, are exchanged, it changes;
- every bit counts (NaN payloads, the sign of zero), and a zero element counts as much as any other.

It detects damage, not attacks: a person who knows the keys can build collisions. Arithmetic wraps at 2**64 by design.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from tidemill.kernels.compiled import Bits, Indices, compiled

Lanes = tuple[np.uint64, np.uint64]

MASK = (1 << 64) - 1
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
ONE = np.uint64(1)
ELEMENT_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A 128-bit linear fingerprint: an element of the group (Z / 2**64) x (Z / 2**64)."""

    lo: int
    hi: int

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the union of two disjoint sets of elements, or of a tensor after its change."""
        return Fingerprint((self.lo + other.lo) & MASK, (self.hi + other.hi) & MASK)

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the change from `other` to `self`."""
        return Fingerprint((self.lo - other.lo) & MASK, (self.hi - other.hi) & MASK)

    def hex(self) -> str:
        """Return 32 hexadecimal digits, high lane first."""
        return f"{self.hi:016x}{self.lo:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Fingerprint:
        """Invert `hex`. Raises ValueError for any text that is not 32 hexadecimal digits."""
        if len(text) != 32:
            raise ValueError(f"a fingerprint has 32 hexadecimal digits, got {len(text)} characters: {text[:40]!r}")
        return cls.from_bytes(bytes.fromhex(text)[::-1])

    def to_bytes(self) -> bytes:
        """Return 16 bytes, little-endian, low lane first."""
        return self.lo.to_bytes(8, "little") + self.hi.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> Fingerprint:
        """Invert `to_bytes`. Raises ValueError unless there are exactly 16 bytes."""
        if len(data) != 16:
            raise ValueError(f"a fingerprint has 16 bytes, got {len(data)}")
        return cls(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))


ZERO = Fingerprint(0, 0)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """The start positions of the two pseudo-random streams of one tensor."""

    lo: int
    hi: int

    @classmethod
    def of(cls, name: str) -> TensorKey:
        """Return the key of a tensor, from xxh3-128 of its checkpoint name."""
        digest = xxhash.xxh3_128_intdigest(name.encode())
        return cls(digest & MASK, digest >> 64)


def fingerprint(bits: Bits, key: TensorKey, start: int = 0) -> Fingerprint:
    """Compute the fingerprint of elements [start, start + bits.size) of a tensor, read in C order.

    `bits` has any shape; a view that is not contiguous is copied. Raises TypeError for a dtype other than u1, u2, u4
    and ValueError for a negative start.
    """
    row = _row(bits)
    if start < 0:
        raise ValueError(f"start must not be negative, got {start}")
    return Fingerprint(*map(int, _sum_range(row, np.uint64(start), np.uint64(key.lo), np.uint64(key.hi))))


def fingerprint_at(bits: Bits, key: TensorKey, indices: Indices) -> Fingerprint:
    """Compute the fingerprint of the elements at `indices` (i8[n], flat, in any order) with patterns `bits` (uN[n]).

    For runtime tensors that store elements in another order than the checkpoint. Raises like `fingerprint`.
    """
    row = _row(bits)
    return Fingerprint(*map(int, _sum_at(None, row, _places(indices, row), np.uint64(key.lo), np.uint64(key.hi))))


def fingerprint_change(key: TensorKey, indices: Indices, old_bits: Bits, new_bits: Bits) -> Fingerprint:
    """Compute F(new) - F(old) for elements at `indices` (i8[n]): `old_bits` becomes `new_bits` (uN[n] each).

    Raises TypeError for differing or unknown dtypes and ValueError for differing sizes.
    """
    old, new = _row(old_bits), _row(new_bits)
    if old.dtype != new.dtype:
        raise TypeError(f"old bits are {old.dtype}, new bits {new.dtype}: a change keeps the dtype")
    places = _places(indices, old, new)
    return Fingerprint(*map(int, _sum_at(old, new, places, np.uint64(key.lo), np.uint64(key.hi))))


def _row(bits: Bits) -> Bits:
    if bits.dtype not in ELEMENT_TYPES:
        raise TypeError(f"bit patterns must be uint8, uint16 or uint32, got {bits.dtype}: take a view as one of them")
    return np.ascontiguousarray(bits).reshape(-1)


def _places(indices: Indices, *rows: Bits) -> Indices:
    for row in rows:
        if indices.size != row.size:
            raise ValueError(f"{indices.size} indices for {row.size} elements")
    return np.ascontiguousarray(indices, dtype=np.int64).reshape(-1)


@compiled
def _prf(position: np.uint64) -> np.uint64:
    mixed = (position ^ (position >> SHIFT_1)) * MIX_1
    mixed = (mixed ^ (mixed >> SHIFT_2)) * MIX_2
    return mixed ^ (mixed >> SHIFT_3)


@compiled
def _sum_range(bits: Bits, start: np.uint64, key_lo: np.uint64, key_hi: np.uint64) -> Lanes:
    lo = np.uint64(0)
    hi = np.uint64(0)
    at_lo = key_lo + start * GAMMA
    at_hi = key_hi + start * GAMMA
    for i in range(bits.size):
        at_lo += GAMMA
        at_hi += GAMMA
        weight = np.uint64(bits[i]) + ONE
        lo += _prf(at_lo) * weight
        hi += _prf(at_hi) * weight
    return lo, hi


@compiled
def _sum_at(old: Bits | None, new: Bits, indices: Indices, key_lo: np.uint64, key_hi: np.uint64) -> Lanes:
    """Sum over elements or, with their `old` patterns, over their change; compiled once for each."""
    lo = np.uint64(0)
    hi = np.uint64(0)
    for i in range(indices.size):
        step = (np.uint64(indices[i]) + ONE) * GAMMA
        weight = np.uint64(new[i]) + ONE if old is None else np.uint64(new[i]) - np.uint64(old[i])
        lo += _prf(key_lo + step) * weight
        hi += _prf(key_hi + step) * weight
    return lo, hi
