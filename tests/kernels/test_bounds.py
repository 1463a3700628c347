"""The bounds equal the entropies of their formulas, and do not depend on how a change is split."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels.reference import delta_bounds
from tidemill.kernels.bounds import DeltaCounts
from tidemill.kernels.elements import ELEMENT_TYPES, element_type
from tidemill.kernels.wire import DeltaError

FEWER = settings(max_examples=40)
FIELDS = {
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float32": (8, 23),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
"""Bits of exponent and mantissa."""
NARROW = [kind for kind in ELEMENT_TYPES if kind.bits.itemsize < 4]


@st.composite
def pairs(draw, kinds=ELEMENT_TYPES):
    """Draw a type's name and its old and new patterns; between none and all elements are changed."""
    kind, size = draw(st.sampled_from(kinds)), draw(st.integers(0, 200))
    old, new = draw(hnp.arrays(kind.bits, size)), draw(hnp.arrays(kind.bits, size))
    return kind.name, old, np.where(draw(hnp.arrays(np.bool_, size)), old, new)


def entropy_bits(counts):
    total = sum(counts)
    return sum(count * math.log2(total / count) for count in counts if count)


def place(dtype, pattern):
    """Return the position of a pattern in value order: two's complement for integers, sign and magnitude for floats."""
    width = 8 * element_type(dtype).bits.itemsize
    if dtype in ("uint8", "int4"):
        return pattern
    if dtype == "int8":
        return pattern - 256 if pattern >= 128 else pattern
    magnitude = pattern & ((1 << width - 1) - 1)
    return -1 - magnitude if pattern >> width - 1 else magnitude


def plain_bounds(dtype, old, new):
    """Return both bounds in bytes by their formulas, one element at a time."""
    modulus, (exponent_bits, mantissa_bits) = 1 << 8 * old.itemsize, FIELDS.get(dtype, (0, 0))
    elements, steps = Counter(), defaultdict(Counter)
    for before, after in zip(old.tolist(), new.tolist(), strict=True):
        exponent = before >> mantissa_bits & (1 << exponent_bits) - 1
        elements[exponent] += 1
        if before != after:
            steps[exponent][(place(dtype, after) - place(dtype, before)) % modulus] += 1
    pooled = sum(steps.values(), Counter())

    def cost(count, by_step):
        changed = by_step.total()
        return entropy_bits([changed, count - changed]) + entropy_bits(by_step.values())

    return cost(old.size, pooled) / 8, sum(cost(elements[e], steps[e]) for e in elements) / 8


@FEWER
@given(pairs(NARROW))
def test_bounds_equal_their_formulas(pair):
    dtype, old, new = pair
    bounds = delta_bounds(dtype, old, new)
    assert (bounds.elements, bounds.changed) == (old.size, int((old != new).sum()))
    assert (bounds.iid, bounds.exponent_class) == pytest.approx(plain_bounds(dtype, old, new))


@FEWER
@given(st.lists(st.integers(-4096, 4096), min_size=1, max_size=50))
def test_small_steps_of_wide_patterns_count_one_by_one(steps):
    old = np.full(len(steps), 0x3FC00000, np.uint32)
    new = (old.astype(np.int64) + steps).astype(np.uint32)
    bounds = delta_bounds("float32", old, new)
    assert (bounds.iid, bounds.exponent_class) == pytest.approx(plain_bounds("float32", old, new))


def test_large_steps_of_wide_patterns_are_taken_as_incompressible_below():
    generator = np.random.default_rng(0)
    old = np.full(1 << 16, 0x3F800000, np.uint32)
    new = old + generator.integers(1 << 20, 1 << 21, old.size, dtype=np.uint32)
    bits = 8 * delta_bounds("float32", old, new).iid / old.size
    assert 19.9 < bits < 20.1


@FEWER
@given(pairs(), st.integers(0, 200))
def test_bounds_do_not_depend_on_the_split(pair, cut):
    dtype, old, new = pair
    whole = delta_bounds(dtype, old, new)
    parts, total = DeltaCounts(dtype), DeltaCounts(dtype)
    parts.count(old[:cut], new[:cut])
    parts.count(old[cut:], new[cut:])
    assert parts.bounds() == whole
    total.add(parts)
    assert total.bounds() == whole


@FEWER
@given(pairs())
def test_the_exponent_class_bound_is_never_greater(pair):
    bounds = delta_bounds(*pair)
    assert bounds.exponent_class <= bounds.iid * (1 + 1e-9)
    if pair[0] in ("int8", "uint8", "int4"):
        assert bounds.exponent_class == pytest.approx(bounds.iid)


def test_a_change_that_depends_on_the_exponent_has_a_smaller_exponent_class_bound():
    generator = np.random.default_rng(0)
    small = generator.random(1 << 16) < 0.05
    old = np.where(small, 0x3000, 0x3F00).astype(np.uint16)
    new = old + small.astype(np.uint16)
    bounds = delta_bounds("bfloat16", old, new)
    assert bounds.exponent_class == 0.0
    assert bounds.iid > 1000


def test_arrays_and_types_that_do_not_match_are_refused():
    bits = np.zeros(3, np.uint16)
    with pytest.raises(DeltaError, match="does not support dtype"):
        DeltaCounts("complex64")
    with pytest.raises(DeltaError, match="uint16 bit patterns"):
        delta_bounds("bfloat16", bits.astype(np.uint32), bits.astype(np.uint32))
    with pytest.raises(DeltaError, match="keeps shapes"):
        delta_bounds("bfloat16", bits, bits[:2])
    with pytest.raises(DeltaError, match="cannot be added"):
        DeltaCounts("bfloat16").add(DeltaCounts("float16"))
