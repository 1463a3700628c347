"""Seconds and microseconds are the same times in two units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.schemas.clock import to_s, to_us

CENTURY_US = 100 * 366 * 86_400 * 1_000_000


@given(st.integers(-CENTURY_US, CENTURY_US))
def test_seconds_and_back_changes_nothing(microseconds: int):
    assert to_us(to_s(microseconds)) == microseconds


def test_the_nearest_microsecond_is_taken():
    # As a float the product is a little less: cut off, it would be one microsecond short.
    assert (to_us(1.001), int(1.001 * 1_000_000)) == (1_001_000, 1_000_999)
    assert (to_us(0.5e-6), to_us(1.5e-6), to_us(-0.6e-6)) == (0, 2, -1)
