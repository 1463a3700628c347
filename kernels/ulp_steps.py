"""How far a pattern moved among its type's values: the signed step between two patterns, folded to an unsigned number.

`place` orders the patterns of a type by value. A step is place(new) - place(old) modulo 2**width, and is never 0;
folded, +1, -1, +2, -2 ... become 0, 1, 2, 3 ... A place differs from its pattern in some bits, which the sign alone
decides: so one formula, without a branch, serves every type.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import ElementType, Order
from tidemill.kernels.fingerprint import Bits

Values = npt.NDArray[np.uint32]
Form = tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]
"""Of an element type: where the exponent begins; its mask; where the sign lies; all bits; the bits in which the place
of a pattern with sign 0 differs from it; those in which the flips of both signs differ."""

ZERO, ONE = np.uint64(0), np.uint64(1)


def form_of(kind: ElementType) -> Form:
    """What the loops need to know of an element type."""
    top = kind.width - 1
    sign, ones = 1 << top, (2 << top) - 1
    flips = {Order.SIGN_MAGNITUDE: (sign, ones ^ sign), Order.TWOS_COMPLEMENT: (sign, 0), Order.UNSIGNED: (0, 0)}
    fields = (kind.mantissa_bits, kind.exponents - 1, top, ones, *flips[kind.order])
    shift, mask, sign_shift, all_bits, flip, difference = map(np.uint64, fields)
    return shift, mask, sign_shift, all_bits, flip, difference


def fold_steps(kind: ElementType, old: Bits, new: Bits) -> Values:
    """u4[n]: the folded steps from `old` to `new` (uN[n] each, contiguous), which differ everywhere."""
    steps = np.empty(old.size, np.uint32)
    _fold_all(old, new, form_of(kind), steps)
    return steps


def move(kind: ElementType, old: Bits, step: int) -> Bits:
    """uN[n]: where one folded step leads from each of `old` (uN[n], contiguous)."""
    new = np.empty_like(old)
    _move_all(old, np.uint64(step), form_of(kind), new)
    return new


@compiled
def _place(pattern: np.uint64, form: Form) -> np.uint64:
    """A pattern's place among all patterns by value."""
    top, flip, difference = form[2], form[4], form[5]
    return pattern ^ flip ^ (difference & (ZERO - (pattern >> top)))


@compiled
def folded(old: np.uint64, new: np.uint64, form: Form) -> np.uint64:
    """The folded step from one pattern to another, which differs."""
    top, ones = form[2], form[3]
    step = (_place(new, form) - _place(old, form)) & ones
    down = step >> top
    length = (step ^ (ZERO - down)) & ones
    return ((length - (ONE - down)) << ONE) | down


@compiled
def moved(old: np.uint64, step: np.uint64, form: Form) -> np.uint64:
    """The pattern that a folded step leads to."""
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
