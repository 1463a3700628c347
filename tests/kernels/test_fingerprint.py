"""The fingerprint equals its numpy twin, is linear, and depends on the name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels.reference import fingerprint_reference
from tidemill.kernels.fingerprint import (
    ZERO,
    Fingerprint,
    TensorKey,
    fingerprint,
    fingerprint_at,
    fingerprint_change,
)

KEY = TensorKey.of("model.layers.0.mlp.down_proj.weight")
LANES = st.integers(0, 2**64 - 1)
PATTERNS = st.sampled_from([np.uint8, np.uint16, np.uint32])


def tensors(min_size=0, max_size=300):
    return PATTERNS.flatmap(lambda kind: hnp.arrays(kind, st.integers(min_size, max_size)))


@given(tensors(), st.integers(0, 2**40))
def test_equals_its_numpy_twin(bits, start):
    indices = np.arange(start, start + bits.size)
    assert fingerprint(bits, KEY, start) == fingerprint_reference(bits, KEY, indices)


@given(tensors(min_size=1), st.data())
def test_change_leads_from_old_to_new(old, data):
    new = data.draw(hnp.arrays(old.dtype, old.size))
    changed = np.flatnonzero(old != new)
    change = fingerprint_change(KEY, changed, old[changed], new[changed])
    assert fingerprint(old, KEY) + change == fingerprint(new, KEY)
    assert fingerprint(new, KEY) - fingerprint(old, KEY) == change


@given(tensors(), st.randoms(use_true_random=False))
def test_order_does_not_matter(bits, random):
    order = list(range(bits.size))
    random.shuffle(order)
    indices = np.array(order, dtype=np.int64)
    assert fingerprint_at(bits[indices], KEY, indices) == fingerprint(bits, KEY)


def test_the_fingerprint_depends_on_the_name():
    bits = np.arange(8, dtype=np.uint16)
    assert fingerprint(bits, KEY) != fingerprint(bits, TensorKey.of("model.layers.1.mlp.down_proj.weight"))


def test_a_view_is_read_in_c_order():
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert fingerprint(bits.T, KEY) == fingerprint(np.ascontiguousarray(bits.T), KEY)


def test_a_known_value_does_not_change():
    """Fingerprints stay in the log permanently, so their definition must never change."""
    value = fingerprint(np.arange(1000, dtype=np.uint16), TensorKey.of("model.norm.weight"))
    assert value.hex() == "404ed3abb8961512bf3f420ceae2905b"


@given(LANES, LANES, LANES, LANES)
def test_fingerprints_are_a_group(a, b, c, d):
    first, second = Fingerprint(a, b), Fingerprint(c, d)
    assert first + second == second + first
    assert first + second - second == first
    assert first + ZERO == first


@given(LANES, LANES)
def test_text_and_bytes_round_trip(lo, hi):
    value = Fingerprint(lo, hi)
    assert Fingerprint.from_hex(value.hex()) == value
    assert Fingerprint.from_bytes(value.to_bytes()) == value


@pytest.mark.parametrize("text", ["", "0", "g" * 32, "0" * 31, "0" * 33])
def test_invalid_text_is_refused(text):
    with pytest.raises(ValueError):
        Fingerprint.from_hex(text)


def test_invalid_bytes_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        Fingerprint.from_bytes(b"\0" * 15)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32"):
        fingerprint(np.zeros(3, np.float32), KEY)
    with pytest.raises(TypeError, match="keeps the dtype"):
        fingerprint_change(KEY, np.zeros(1, np.int64), np.zeros(1, np.uint8), np.zeros(1, np.uint16))


def test_arguments_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="negative"):
        fingerprint(np.zeros(3, np.uint16), KEY, -1)
    with pytest.raises(ValueError, match="2 indices for 3 elements"):
        fingerprint_at(np.zeros(3, np.uint16), KEY, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="2 indices for 3 elements"):
        fingerprint_change(KEY, np.zeros(2, np.int64), np.zeros(2, np.uint16), np.zeros(3, np.uint16))
