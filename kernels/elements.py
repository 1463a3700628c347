"""The element types that a weight delta can carry, as bit patterns.

A tensor is a flat array of unsigned integers: the patterns of its elements. The codec and the fingerprints use only
these, so that every pattern is kept: NaN payloads, the sign of zero, infinities, subnormals. An int4 tensor is packed,
two values to a byte, the first in the low four bits; its elements, for the codec and the fingerprints, are the bytes.

A step is the signed distance between two patterns, counted in values of the type, folded to an unsigned number.
`_place` orders the patterns of a type by value. A step is place(new) - place(old) modulo 2**width, and is never 0;
folded, +1, -1, +2, -2 ... become 0, 1, 2, 3 ... A place differs from its pattern in some bits that depend only on the
sign: so one formula, without a branch, is valid for every type.

The elements that differ between two tensors are compacted in one linear pass, a word of 64 elements at a time: the
comparison of a word gives a mask, and the loop visits its set bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from tidemill.kernels.compiled import WORD, Bits, Indices, Values, compiled, differing, lowest_one
from tidemill.kernels.wire import DeltaError

AnyArray = Any
"""A numpy array or a PyTorch tensor; a backend's result is of the same kind, on the same device."""


class Order(IntEnum):
    """The order of a type's values in relation to their patterns."""

    SIGN_MAGNITUDE = 0
    TWOS_COMPLEMENT = 1
    UNSIGNED = 2


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type: its name (PyTorch's, without `torch.`), its code in a block, and the form of its patterns."""

    name: str
    code: int
    bits: np.dtype[np.unsignedinteger[Any]]
    order: Order
    exponent_bits: int
    """Width of the exponent; 0 for integers."""
    mantissa_bits: int
    """Number of mantissa bits: the bit at which the exponent begins."""

    @property
    def width(self) -> int:
        """Number of bits of a pattern."""
        return 8 * self.bits.itemsize

    @property
    def exponents(self) -> int:
        """Number of different exponents; 1 for integers."""
        return 1 << self.exponent_bits


U1, U2, U4 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
ELEMENT_TYPES = (
    ElementType("bfloat16", 1, U2, Order.SIGN_MAGNITUDE, 8, 7),
    ElementType("float16", 2, U2, Order.SIGN_MAGNITUDE, 5, 10),
    ElementType("float32", 3, U4, Order.SIGN_MAGNITUDE, 8, 23),
    ElementType("float8_e4m3fn", 4, U1, Order.SIGN_MAGNITUDE, 4, 3),
    ElementType("float8_e5m2", 5, U1, Order.SIGN_MAGNITUDE, 5, 2),
    ElementType("int8", 6, U1, Order.TWOS_COMPLEMENT, 0, 0),
    ElementType("uint8", 7, U1, Order.UNSIGNED, 0, 0),
    ElementType("int4", 8, U1, Order.UNSIGNED, 0, 0),
)
BY_NAME = {kind.name: kind for kind in ELEMENT_TYPES}
BY_CODE = {kind.code: kind for kind in ELEMENT_TYPES}


class TensorChange(NamedTuple):
    """One tensor, or a run of its elements, before and after a step, as bit patterns in checkpoint coordinates."""

    name: str
    dtype: str
    """Name of the element type (`BY_NAME`), for instance "bfloat16"."""
    old_bits: AnyArray
    new_bits: AnyArray
    """uN, of `old_bits`' shape."""
    start: int = 0
    """Flat index in the tensor of the run's first element."""
    total: int | None = None
    """Number of elements of the tensor; None if the tensor ends with the run."""


def element_type(dtype: str) -> ElementType:
    """Return the element type with a name. Raises DeltaError for a type that a delta cannot carry."""
    if dtype not in BY_NAME:
        raise DeltaError(f"a delta does not support dtype {dtype!r}; it supports {', '.join(BY_NAME)}")
    return BY_NAME[dtype]


def flat_bits(bits: AnyArray, kind: ElementType) -> AnyArray:
    """Return patterns of an element type as one row, in C order, as the same kind of array.

    Raises DeltaError for patterns that do not have the type's width, and for a tensor that is not contiguous.
    """
    if isinstance(bits, np.ndarray):
        if bits.dtype != kind.bits:
            raise DeltaError(f"a {kind.name} tensor is given as {kind.bits} bit patterns, got {bits.dtype}")
        return np.ascontiguousarray(bits).reshape(-1)
    if bits.element_size() != kind.bits.itemsize:
        raise DeltaError(f"a {kind.name} tensor has {kind.bits} bit patterns, got {bits.dtype}")
    if not bits.is_contiguous():
        raise DeltaError(f"a {kind.name} tensor of shape {tuple(bits.shape)} is not contiguous")
    return bits.detach().view(-1)


def flat_row(tensor: AnyArray) -> AnyArray:
    """Return a view of a PyTorch tensor's elements as one row of u1, u2, u4 (patterns) or i8 (indices).

    Raises ValueError if the tensor is not contiguous, TypeError for elements of another size.
    """
    import torch

    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    row_types = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}
    if tensor.element_size() not in row_types:
        raise TypeError(f"elements have 1, 2, 4 or 8 bytes, those of {tensor.dtype} {tensor.element_size()}")
    return tensor.detach().view(-1).view(row_types[tensor.element_size()])


Form = tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]
"""Parameters of an element type: shift of the exponent; its mask; shift of the sign; mask of all bits; the bits that
`_place` flips in a pattern with sign 0; the bits in which the flips for the two signs differ."""

ZERO, ONE = np.uint64(0), np.uint64(1)


def form_of(kind: ElementType) -> Form:
    """Return the parameters of an element type for the loops."""
    top = kind.width - 1
    sign, ones = 1 << top, (2 << top) - 1
    flips = {Order.SIGN_MAGNITUDE: (sign, ones ^ sign), Order.TWOS_COMPLEMENT: (sign, 0), Order.UNSIGNED: (0, 0)}
    fields = (kind.mantissa_bits, kind.exponents - 1, top, ones, *flips[kind.order])
    shift, mask, sign_shift, all_bits, flip, difference = map(np.uint64, fields)
    return shift, mask, sign_shift, all_bits, flip, difference


def fold_steps(kind: ElementType, old: Bits, new: Bits) -> Values:
    """Return the folded steps (u4[n]) from `old` to `new` (uN[n] each, contiguous), which differ everywhere."""
    steps = np.empty(old.size, np.uint32)
    _fold_all(old, new, form_of(kind), steps)
    return steps


def move(kind: ElementType, old: Bits, step: int) -> Bits:
    """Return the patterns (uN[n]) that one folded step gives from each of `old` (uN[n], contiguous)."""
    new = np.empty_like(old)
    _move_all(old, np.uint64(step), form_of(kind), new)
    return new


@compiled
def _place(pattern: np.uint64, form: Form) -> np.uint64:
    """Return a pattern's place among all patterns, ordered by value."""
    top, flip, difference = form[2], form[4], form[5]
    return pattern ^ flip ^ (difference & (ZERO - (pattern >> top)))


@compiled
def folded(old: np.uint64, new: np.uint64, form: Form) -> np.uint64:
    """Return the folded step from one pattern to a different one."""
    top, ones = form[2], form[3]
    step = (_place(new, form) - _place(old, form)) & ones
    down = step >> top
    length = (step ^ (ZERO - down)) & ones
    return ((length - (ONE - down)) << ONE) | down


@compiled
def moved(old: np.uint64, step: np.uint64, form: Form) -> np.uint64:
    """Return the pattern that a folded step from `old` gives."""
    top, ones, flip, difference = form[2], form[3], form[4], form[5]
    down = step & ONE
    length = (step >> ONE) + ONE
    place = (_place(old, form) + (length ^ (ZERO - down)) + down) & ones
    return place ^ flip ^ (difference & ((place >> top) - ONE))


@compiled
def _fold_all(old: Bits, new: Bits, form: Form, steps: Values) -> None:
    for i in range(old.size):
        steps[i] = folded(np.uint64(old[i]), np.uint64(new[i]), form)


@compiled
def _move_all(old: Bits, step: np.uint64, form: Form, new: Bits) -> None:
    for i in range(old.size):
        new[i] = moved(np.uint64(old[i]), step, form)


TILE = 1 << 16
"""Elements compared between two checks of the free space for differences."""
EXPECTED_SHARE = 16
"""Space is allocated first for differences in 1 / 16 of the elements. Pages that are not written use no memory."""


def changed_elements(old: Bits, new: Bits) -> tuple[Indices, Bits, Bits]:
    """Find the elements that differ between `old` and `new` (uN[n] each, contiguous).

    Returns their indices (i8[changed], ascending), and their patterns in `old` and in `new` (uN[changed] each). Raises
    ValueError for differing sizes or widths.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype}{old.shape} cannot be compared with {new.dtype}{new.shape}")
    room = min(old.size, TILE + old.size // EXPECTED_SHARE)
    indices, old_at, new_at = _rows(room, old)
    found = 0
    for first in range(0, old.size, TILE):
        if indices.size < min(old.size, found + TILE):
            more = _rows(old.size, old)
            for row, before in zip(more, (indices, old_at, new_at), strict=True):
                row[:found] = before[:found]
            indices, old_at, new_at = more
        tile = slice(first, first + TILE)
        found += _compact(old[tile], new[tile], first, indices[found:], old_at[found:], new_at[found:])
    return indices[:found], old_at[:found], new_at[:found]


def _rows(room: int, like: Bits) -> tuple[Indices, Bits, Bits]:
    return np.empty(room, np.int64), np.empty(room, like.dtype), np.empty(room, like.dtype)


@compiled
def _compact(old: Bits, new: Bits, start: int, indices: Indices, old_at: Bits, new_at: Bits) -> int:
    """Write start + index and both patterns of each difference into rows that are long enough; return their number."""
    found = np.uint64(0)
    words = old.size // WORD
    for word in range(words):
        first = np.uint64(word * WORD)
        mask = differing(old, new, first)
        while mask:
            i = first + lowest_one(mask)
            mask &= mask - ONE
            indices[found] = start + np.int64(i)
            old_at[found] = old[i]
            new_at[found] = new[i]
            found += ONE
    for rest in range(words * WORD, old.size):
        if old[rest] != new[rest]:
            indices[found] = start + rest
            old_at[found] = old[rest]
            new_at[found] = new[rest]
            found += ONE
    return int(found)
