"""One way to compile a loop, and a processor's vectors for what is compiled.

Loops are machine code without the interpreter lock, cached beside the module that holds them: they run in plain threads
side by side, and a second process of the same machine starts without compiling. Integer arithmetic only: the results do
not depend on the processor or on the order of vector lanes.

Loops go over elements in words: a word is 64 consecutive elements; what holds for some of them is a mask, the u8 whose
bit i speaks of element i. The functions over words are written in LLVM's types, which it lowers to what the processor
has (AVX-512, AVX2, NEON or none), with the same result. They are called from compiled loops only, on contiguous rows,
and check no bounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import intrinsic

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """The loop as machine code: `nogil`, cached on disk, with numpy's wrap-around integer semantics."""
    return cast(Loop, numba.njit(cache=True, nogil=True)(loop))


WORD = 64
"""Elements of a word."""

BYTE, MASK, WIDE = ir.IntType(8), ir.IntType(64), ir.IntType(128)
ONE = ir.Constant(MASK, 1)
ZERO_IS_DEFINED = ir.Constant(ir.IntType(1), 0)
AT_ANY_ADDRESS = 1
FEATURES: str = cpu_target.target_context.codegen().magic_tuple()[2]
"""Of the processor that loops are compiled for."""


class VectorRow:
    """A contiguous row of numbers, as code that is being generated sees it."""

    def __init__(self, context: Any, builder: ir.IRBuilder, row_type: Any, value: ir.Value) -> None:  # noqa: ANN401 - numba has no types for these
        self._builder = builder
        self._data = context.make_array(row_type)(context, builder, value).data
        self.element = context.get_data_type(row_type.dtype)

    def load(self, first: ir.Value) -> ir.Value:
        """The word that begins at an element, as a vector."""
        return self._builder.load(self._pointer(first), align=AT_ANY_ADDRESS)

    def store(self, first: ir.Value, word: ir.Value) -> None:
        self._builder.store(word, self._pointer(first), align=AT_ANY_ADDRESS)

    def _pointer(self, first: ir.Value) -> ir.Value:
        vector = ir.VectorType(self.element, WORD)
        return self._builder.bitcast(self._builder.gep(self._data, [first]), vector.as_pointer())


def generated(
    *arguments: types.Type | type[VectorRow], returns: types.Type = types.uint64
) -> Callable[[Callable[..., ir.Value]], Callable[..., np.uint64]]:
    """Make a function of compiled loops of one that generates its code, given a builder and what `arguments` say.

    `VectorRow` stands for a row of any unsigned type.
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

        # Numba names the arguments of a call by its definition's signature: here the builder's place is the context's.
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
    """A vector of 64 times `value`."""
    vector, places = ir.VectorType(value.type, WORD), ir.VectorType(ir.IntType(32), WORD)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(places, [0] * WORD))


@generated(VectorRow, VectorRow, types.uint64)
def differing(builder: ir.IRBuilder, old: VectorRow, new: VectorRow, first: ir.Value) -> ir.Value:
    """The mask of elements that differ between the words of `old` and `new` (uN each) that begin at `first`."""
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
    """The mask of elements of the word of `values` (u1) at `first` from `least` to `least` + `span` (u1, inclusive)."""
    above = builder.sub(values.load(first), _spread(builder, least))
    return builder.bitcast(builder.icmp_unsigned("<=", above, _spread(builder, span)), MASK)


@generated(types.uint64)
def count_ones(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """How many bits of a u8 are set."""
    return builder.ctpop(mask)


@generated(types.uint64)
def lowest_one(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """The place of the lowest set bit of a u8; 64 where none is."""
    return builder.cttz(mask, ZERO_IS_DEFINED)


@generated(types.uint64)
def bit_length(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """How many bits a u8 has without its leading zeros."""
    return builder.sub(ir.Constant(MASK, MASK.width), builder.ctlz(value, ZERO_IS_DEFINED))


@generated(types.uint64, types.uint64)
def multiply_high(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The upper 64 bits of the product of two u8."""
    product = builder.mul(builder.zext(a, WIDE), builder.zext(b, WIDE))
    return builder.trunc(builder.lshr(product, ir.Constant(WIDE, MASK.width)), MASK)


@generated(types.uint64, types.uint64)
def nth_one_by_halves(builder: ir.IRBuilder, mask: ir.Value, n: ir.Value) -> ir.Value:
    """The place of set bit number `n` (from 0) of a u8 that has more: six times a half is passed over, or not."""
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
    """The same, where a processor deposits bits: x86-64 with BMI2."""
    deposit = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), ir.FunctionType(MASK, [MASK, MASK]))
    return builder.cttz(builder.call(deposit, [builder.shl(ONE, n), mask]), ZERO_IS_DEFINED)


DEPOSITS = "+bmi2" in FEATURES
"""Whether the processor deposits bits."""
nth_one = nth_one_by_deposit if DEPOSITS else nth_one_by_halves
