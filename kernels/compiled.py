"""Compilation of loops, the types of their arrays, and functions over vectors for compiled loops.

Loops are machine code without the interpreter lock, cached next to the module that defines them: they run in parallel
in plain threads, and a second process on the same machine starts without compiling. They use integer arithmetic, or
single operations that IEEE 754 defines: the results do not depend on the processor or on the order of vector lanes.

Loops process elements in words: a word is 64 consecutive elements. A mask is a u8 whose bit i belongs to element i: it
names some elements of a word. The functions over words use LLVM's vector types, which LLVM lowers to the processor's
instructions (AVX-512, AVX2, NEON or none), with the same result. They are called only from compiled loops, on
contiguous rows, and check no bounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import intrinsic

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Bit patterns of elements: u1 (fp8, int8, packed int4), u2 (bf16, fp16) or u4 (fp32)."""
Indices = npt.NDArray[np.int64]
"""Flat indices of elements in checkpoint coordinates."""
Values = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """Compile a loop to machine code: `nogil`, cached on disk, with numpy's wrap-around integer semantics."""
    return cast(Loop, numba.njit(cache=True, nogil=True)(loop))


WORD = 64
"""Number of elements of a word."""

BYTE, MASK, WIDE = ir.IntType(8), ir.IntType(64), ir.IntType(128)
ONE = ir.Constant(MASK, 1)
ZERO_IS_DEFINED = ir.Constant(ir.IntType(1), 0)
AT_ANY_ADDRESS = 1
FEATURES: str = cpu_target.target_context.codegen().magic_tuple()[2]
"""Features of the processor that loops are compiled for."""


class VectorRow:
    """A contiguous row of numbers, for generated code."""

    def __init__(self, context: Any, builder: ir.IRBuilder, row_type: Any, value: ir.Value) -> None:  # noqa: ANN401 - numba has no types for these
        self._builder = builder
        self._data = context.make_array(row_type)(context, builder, value).data
        self.element = context.get_data_type(row_type.dtype)

    def load(self, first: ir.Value) -> ir.Value:
        """Generate a load of the word that begins at element `first`, as a vector."""
        return self._builder.load(self._pointer(first), align=AT_ANY_ADDRESS)

    def store(self, first: ir.Value, word: ir.Value) -> None:
        self._builder.store(word, self._pointer(first), align=AT_ANY_ADDRESS)

    def _pointer(self, first: ir.Value) -> ir.Value:
        vector = ir.VectorType(self.element, WORD)
        return self._builder.bitcast(self._builder.gep(self._data, [first]), vector.as_pointer())


def generated(
    *arguments: types.Type | type[VectorRow], returns: types.Type = types.uint64
) -> Callable[[Callable[..., ir.Value]], Callable[..., np.uint64]]:
    """Make a code generator callable from compiled loops; it receives a builder and values of the types `arguments`.

    `VectorRow` means a row of any unsigned type.
    """

    def decorate(generate: Callable[..., ir.Value]) -> Callable[..., np.uint64]:
        def typed(_: object, *given: types.Type) -> tuple[Any, Callable[..., ir.Value]]:
            return returns(*map(_argument, arguments, given)), emit

        def emit(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:  # noqa: ANN401 - as above
            made = (
                VectorRow(context, builder, given, value) if wanted is VectorRow else value
                for wanted, given, value in zip(arguments, signature.args, values, strict=True)
            )
            result = generate(builder, *made)
            return context.get_dummy_value() if returns is types.void else result

        # Numba names the arguments of a call by the signature: the generator's, whose `builder` replaces the context.
        typed.__signature__ = inspect.signature(generate)  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = generate.__name__, generate.__doc__
        return cast(Callable[..., np.uint64], intrinsic(typed))

    return decorate


def _argument(wanted: types.Type | type[VectorRow], given: types.Type) -> types.Type:
    if wanted is not VectorRow:
        return cast(types.Type, wanted)
    if not isinstance(given, types.Array) or given.ndim != 1 or given.layout != "C":
        raise TypingError(f"words are read from contiguous rows, not from {given}")
    return given


def _spread(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Generate a vector of 64 copies of `value`."""
    vector, places = ir.VectorType(value.type, WORD), ir.VectorType(ir.IntType(32), WORD)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(places, [0] * WORD))


@generated(VectorRow, VectorRow, types.uint64)
def differing(builder: ir.IRBuilder, old: VectorRow, new: VectorRow, first: ir.Value) -> ir.Value:
    """Return the mask of elements that differ between the words of `old` and `new` (uN each) that begin at `first`."""
    return builder.bitcast(builder.icmp_unsigned("!=", old.load(first), new.load(first)), MASK)


@generated(VectorRow, types.uint64, types.uint64, types.uint64, VectorRow, types.uint64, returns=types.void)
def extract_field(
    builder: ir.IRBuilder,
    bits: VectorRow,
    first: ir.Value,
    shift: ir.Value,
    mask: ir.Value,
    out: VectorRow,
    at: ir.Value,
) -> None:
    """Write (bits >> shift) & mask of the word of `bits` (uN) at `first` to the word of `out` (u1) at `at`."""
    field = builder.lshr(bits.load(first), _spread(builder, builder.trunc(shift, bits.element)))
    if bits.element != BYTE:
        field = builder.trunc(field, ir.VectorType(BYTE, WORD))
    out.store(at, builder.and_(field, _spread(builder, builder.trunc(mask, BYTE))))


@generated(VectorRow, types.uint64, types.uint8, types.uint8)
def within(builder: ir.IRBuilder, values: VectorRow, first: ir.Value, least: ir.Value, span: ir.Value) -> ir.Value:
    """Return the mask of elements in [`least`, `least` + `span`] (u1) of the word of `values` (u1) at `first`."""
    above = builder.sub(values.load(first), _spread(builder, least))
    return builder.bitcast(builder.icmp_unsigned("<=", above, _spread(builder, span)), MASK)


@generated(types.uint64)
def count_ones(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """Return the number of set bits of a u8."""
    return builder.ctpop(mask)


@generated(types.uint64)
def lowest_one(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """Return the position of the lowest set bit of a u8; 64 if none is set."""
    return builder.cttz(mask, ZERO_IS_DEFINED)


@generated(types.uint64)
def bit_length(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the number of bits of a u8 without its leading zeros."""
    return builder.sub(ir.Constant(MASK, MASK.width), builder.ctlz(value, ZERO_IS_DEFINED))


@generated(types.uint64, types.uint64)
def multiply_high(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the upper 64 bits of the product of two u8."""
    product = builder.mul(builder.zext(a, WIDE), builder.zext(b, WIDE))
    return builder.trunc(builder.lshr(product, ir.Constant(WIDE, MASK.width)), MASK)


@generated(types.uint64, types.uint64)
def nth_one_by_halves(builder: ir.IRBuilder, mask: ir.Value, n: ir.Value) -> ir.Value:
    """Return the position of set bit `n` (from 0) of a u8 with more than `n` set bits, by binary search in 6 steps."""
    place = ir.Constant(MASK, 0)
    for exponent in reversed(range(6)):
        half = ir.Constant(MASK, 1 << exponent)
        lower = builder.ctpop(builder.and_(mask, ir.Constant(MASK, (1 << (1 << exponent)) - 1)))
        beyond = builder.icmp_unsigned(">=", n, lower)
        n = builder.select(beyond, builder.sub(n, lower), n)
        mask = builder.select(beyond, builder.lshr(mask, half), mask)
        place = builder.select(beyond, builder.or_(place, half), place)
    return place


@generated(types.uint64, types.uint64)
def nth_one_by_deposit(builder: ir.IRBuilder, mask: ir.Value, n: ir.Value) -> ir.Value:
    """Do the same on processors that can deposit bits: x86-64 with BMI2."""
    deposit = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), ir.FunctionType(MASK, [MASK, MASK]))
    return builder.cttz(builder.call(deposit, [builder.shl(ONE, n), mask]), ZERO_IS_DEFINED)


DEPOSITS = "+bmi2" in FEATURES
"""Whether the processor can deposit bits."""
nth_one = nth_one_by_deposit if DEPOSITS else nth_one_by_halves
