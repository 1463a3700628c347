"""The formats to compare with are lossless too, so that their sizes stand for whole deltas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tidemill.kernels.comparison import ESCAPE, FORMATS, DenseXor, GapValue, GapXor, RawIndices

WIDTHS = [np.uint8, np.uint16, np.uint32]


@st.composite
def pairs(draw):
    """Patterns of any width before and after, with anything from nothing to everything changed."""
    width, size = draw(st.sampled_from(WIDTHS)), draw(st.integers(0, 300))
    old, new = draw(hnp.arrays(width, size)), draw(hnp.arrays(width, size))
    return old, np.where(draw(hnp.arrays(np.bool_, size)), old, new)


def survives(shape, old, new):
    before = old.copy()
    np.testing.assert_array_equal(shape.decode(shape.encode(old, new), old), new)
    np.testing.assert_array_equal(old, before)


@given(pairs())
def test_every_format_gives_the_patterns_back(pair):
    for shape in FORMATS:
        survives(shape, *pair)


@pytest.mark.parametrize("gap", [0, 1, ESCAPE - 1, ESCAPE, ESCAPE + 1, 2 * ESCAPE - 1, 2 * ESCAPE, 3 * ESCAPE + 7])
@pytest.mark.parametrize("shape", FORMATS, ids=lambda shape: shape.name)
def test_gaps_beyond_two_bytes(shape, gap):
    old = np.zeros(2 * gap + 3, np.uint8)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = 1, 255
    survives(shape, old, new)


def test_sizes_are_those_of_the_formats():
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = np.where(generator.random(old.size) < 0.01, old ^ np.uint16(1), old)
    changed = int((old != new).sum())
    assert len(RawIndices().encode(old, new)) == 6 * changed
    gap_xor, gap_value, dense = (len(shape().encode(old, new)) / changed for shape in (GapXor, GapValue, DenseXor))
    assert 1.0 < gap_xor < gap_value < 4 and 2 < dense < 4


def test_names_tell_them_apart():
    assert len({shape.name for shape in FORMATS}) == len(FORMATS)
