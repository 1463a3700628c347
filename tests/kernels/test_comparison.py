"""A comparison is the sum over tensors and types, detects a lossy codec, and holds only a few blocks in memory."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels.encoding import encode_delta
from tests.kernels.reference import delta_bounds
from tidemill.kernels import comparison
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.comparison import ESCAPE, FORMATS, compare
from tidemill.kernels.elements import ELEMENT_TYPES, TensorChange
from tidemill.kernels.wire import DeltaError

FEWER = settings(max_examples=30)


@st.composite
def changes(draw):
    """Draw a named tensor of any type and its successor."""
    kind, size = draw(st.sampled_from(ELEMENT_TYPES)), draw(st.integers(0, 60))
    old, new = draw(hnp.arrays(kind.bits, size)), draw(hnp.arrays(kind.bits, size))
    name = draw(st.text("abc.", min_size=1, max_size=8))
    return TensorChange(name, kind.name, old, np.where(draw(hnp.arrays(np.bool_, size)), old, new))


def step(name="w", size=1 << 12, density=0.02, seed=0):
    """Return a bf16 tensor of which a share of the elements changed by one ULP."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0x3C00, 0x3F00, size, dtype=np.uint16)
    return TensorChange(name, "bfloat16", old, old + (generator.random(size) < density).astype(np.uint16))


@FEWER
@given(changes())
def test_every_format_is_lossless_and_does_not_change_the_old_patterns(change):
    old, new = change.old_bits, change.new_bits
    before = old.copy()
    for encode, decode in FORMATS.values():
        np.testing.assert_array_equal(decode(encode(old, new), old), new)
        np.testing.assert_array_equal(old, before)


@pytest.mark.parametrize("gap", [0, 1, ESCAPE - 1, ESCAPE, ESCAPE + 1, 2 * ESCAPE - 1, 2 * ESCAPE, 3 * ESCAPE + 7])
@pytest.mark.parametrize("name", FORMATS)
def test_gaps_beyond_two_bytes(name, gap):
    encode, decode = FORMATS[name]
    old = np.zeros(2 * gap + 3, np.uint8)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = 1, 255
    np.testing.assert_array_equal(decode(encode(old, new), old), new)


def test_sizes_are_those_of_the_formats():
    change = step(size=1 << 20, density=0.01)
    report = compare([change], against=True)
    dense, raw, gap_value, gap_xor = (other.bytes_per_changed for other in report.against)
    assert raw == 6 and 1.0 < gap_xor < gap_value < 4 and 2 < dense < 4


@FEWER
@given(st.lists(changes(), max_size=4, unique_by=lambda change: change.name), st.integers(1, 100))
def test_a_report_adds_up(tensors, block_elements):
    chosen = CodecSettings(block_elements=block_elements)
    report = compare(tensors, chosen, against=True)
    total = report.total
    assert report.tensors == len(tensors)
    assert total.elements == sum(t.old_bits.size for t in tensors)
    assert total.changed == sum(int((t.old_bits != t.new_bits).sum()) for t in tensors)
    assert total.wire_bytes == sum(map(len, encode_delta(1, 0, tensors, chosen)))
    assert report.round_trip_equal
    assert all(other.round_trip_equal for other in report.against)
    assert report.by_dtype.keys() == {t.dtype for t in tensors}
    for part in ("elements", "changed", "iid_bound_bytes", "exponent_class_bound_bytes"):
        assert sum(getattr(size, part) for size in report.by_dtype.values()) == pytest.approx(getattr(total, part))
    for dtype, size in report.by_dtype.items():
        mine = [(t.old_bits, t.new_bits) for t in tensors if t.dtype == dtype]
        fitted = delta_bounds(dtype, *(np.concatenate(side) for side in zip(*mine, strict=True)))
        apart = sum(delta_bounds(dtype, *pair).exponent_class for pair in mine)
        assert size.exponent_class_bound_bytes == fitted.exponent_class
        assert size.exponent_class_bound_by_tensor_bytes == apart <= fitted.exponent_class * (1 + 1e-9) + 1e-9
    json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))


def test_ratios_and_formats():
    report = compare([step()], against=True)
    total = report.total
    assert total.bytes_per_changed == total.wire_bytes / total.changed
    assert total.ratio_to_exponent_class_bound == total.wire_bytes / total.exponent_class_bound_bytes
    assert 1.0 <= total.ratio_to_iid_bound <= total.ratio_to_exponent_class_bound
    assert [other.name for other in report.against] == list(FORMATS)
    assert report.encode_gb_per_second > 0 and report.apply_gb_per_second > 0
    assert compare([step()]).against == ()


def test_a_comparison_without_changes_has_no_ratios():
    unchanged = step()._replace(new_bits=step().old_bits)
    for tensors in ([], [unchanged]):
        report = compare(tensors, against=True)
        assert report.round_trip_equal
        assert (report.total.changed, report.total.bytes_per_changed) == (0, None)
        assert report.total.ratio_to_exponent_class_bound is None


def test_blocks_without_change_are_compared_too():
    change = step(size=1000, density=0.0)
    new = change.old_bits.copy()
    new[450] += 1
    report = compare([change._replace(new_bits=new)], CodecSettings(block_elements=100))
    assert report.round_trip_equal and report.total.changed == 1


def test_a_codec_that_loses_a_bit_is_found(monkeypatch):
    honest = comparison.apply_change

    def forgetful(change, bits, offset=0):
        honest(change, bits, offset)
        bits.reshape(-1)[-1] ^= 1

    monkeypatch.setattr(comparison, "apply_change", forgetful)
    assert not compare([step()]).round_trip_equal


def test_a_codec_that_leaves_a_block_out_is_found(monkeypatch):
    class Forgetful(comparison.DeltaEncoder):
        def add(self, *change, **where):
            return iter(list(super().add(*change, **where))[1:])

        def finish(self):
            return iter(list(super().finish())[1:])

    monkeypatch.setattr(comparison, "DeltaEncoder", Forgetful)
    assert not compare([step()], CodecSettings(block_elements=100)).round_trip_equal
    assert not compare([step("a"), step("b", seed=1)]).round_trip_equal, "and one that several share"


def test_a_format_that_loses_a_bit_is_found(monkeypatch):
    (name, (encode, decode)), *_ = FORMATS.items()
    forgetful = encode, lambda data, old: decode(data, old) ^ np.uint16(1)
    monkeypatch.setattr(comparison, "FORMATS", {name: forgetful})
    report = compare([step()], against=True)
    assert report.round_trip_equal and not report.against[0].round_trip_equal


def peak_bytes(blocks, block_elements=1 << 16):
    """Return the peak memory of the comparison of a tensor of some blocks, without the tensor itself."""
    change = step(size=blocks * block_elements)
    tracemalloc.start()
    try:
        compare([change], CodecSettings(block_elements=block_elements), against=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_block():
    peak_bytes(1)
    assert peak_bytes(12) < 1.3 * peak_bytes(2)


def test_tensors_that_cannot_be_encoded_are_refused_by_a_comparison():
    change = step()
    with pytest.raises(DeltaError, match="keeps shapes"):
        compare([change._replace(new_bits=change.new_bits[:-1])])
    with pytest.raises(DeltaError, match="does not support dtype"):
        compare([change._replace(dtype="complex64")])
