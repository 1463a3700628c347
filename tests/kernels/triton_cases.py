"""Triton's kernels, in Triton's interpreter or on a GPU, give the same bytes as their twins on the CPU.

TIDEMILL_TEST_DEVICE is the device of the tensors: the CPU, for the interpreter, or `cuda` (`make test-gpu`). Not
collected with the other tests: triton must be imported with TRITON_INTERPRET=1, so `tests/gpu/run.py` runs this file
in its own process. Inputs are inside larger arrays with other values, so that a kernel that reads past an edge
gives another result, and a kernel that writes past an edge is detected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from tests.kernels.encoding import encode_delta, encode_tensor
from tests.kernels.reference import assert_same_results, fingerprint_reference
from tidemill.kernels import classes, fingerprint, payload, triton_rows, triton_split
from tidemill.kernels.backend import choose, triton_backend, triton_obstacle
from tidemill.kernels.classes import count_exponents
from tidemill.kernels.elements import BY_NAME, ELEMENT_TYPES, TensorChange, changed_elements
from tidemill.kernels.fingerprint import TensorKey
from tidemill.kernels.wire import DeltaError

BF16 = BY_NAME["bfloat16"]
DEVICE = os.environ.get("TIDEMILL_TEST_DEVICE", "cpu")
# The compiler adds these overflow checks of each addition only in debug mode.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

KEY = TensorKey.of("model.layers.0.mlp.down_proj.weight")
PAD = 4096
TILE = 64
"""Number of elements in a tile of two-byte patterns in `compact`."""
TILING = triton_split.SplitTiling(row=16, rows=16, ranked=64, placed=64)
TYPES = [kind for kind in ELEMENT_TYPES if kind.name in {"bfloat16", "float32", "float8_e4m3fn", "int8", "uint8"}]
FEW = settings(
    max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
SPECIAL_BF16 = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x3F80]


def inside(array, fill):
    """Return the array as a tensor in the middle of a larger one that is filled with `fill`."""
    whole = np.full(array.size + 2 * PAD, fill, array.dtype)
    whole[PAD : PAD + array.size] = array
    return on_device(whole)[PAD : PAD + array.size]


def on_device(array):
    return torch.from_numpy(np.asarray(array)).to(DEVICE)


def step_of(kind, n, density, seed):
    """Return old and new patterns of which a share of about `density` differ, and the indices of the differences."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 1 << kind.width, n, dtype=kind.bits)
    other = generator.integers(0, 1 << kind.width, n, dtype=kind.bits)
    new = np.where(generator.random(n) < density, other, old)
    if density == 1:
        new = old ^ kind.bits.type(1)
    return old, new, np.flatnonzero(old != new)


def compare(old, new, module=triton_rows, tile=TILE):
    return module.compare_and_compact(inside(old, 1), inside(new, 2), tile * old.itemsize).cpu().numpy()


EDGES = [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 7]
DENSITIES = [0, 0.02, 0.5, 1]


@pytest.mark.parametrize("n", EDGES)
@pytest.mark.parametrize("name", ["bfloat16", "float32", "uint8"])
def test_compact_at_the_edges_of_a_tile(name, n):
    for density in DENSITIES if n > TILE + 1 else (0.5, 1):
        old, new, indices = step_of(BY_NAME[name], n, density, n)
        np.testing.assert_array_equal(compare(old, new), indices)
        np.testing.assert_array_equal(changed_elements(old, new)[0], indices)


def test_compact_of_several_programs_that_write():
    old, new, indices = step_of(BF16, 3 * 32 * triton_rows.WORDS_WRITTEN + 5, 0.01, 1)
    found = triton_rows.compare_and_compact(inside(old, 1), inside(new, 2)).cpu().numpy()
    np.testing.assert_array_equal(found, indices)


def test_compact_sees_patterns_and_not_values():
    """NaN payloads and the sign of zero differ; a NaN equals itself."""
    old = np.repeat(np.array(SPECIAL_BF16, np.uint16), len(SPECIAL_BF16))
    new = np.tile(np.array(SPECIAL_BF16, np.uint16), len(SPECIAL_BF16))
    as_bf16 = [on_device(bits).view(torch.bfloat16) for bits in (old, new)]
    np.testing.assert_array_equal(triton_rows.compare_and_compact(*as_bf16).cpu().numpy(), np.flatnonzero(old != new))


@FEW
@given(st.sampled_from(TYPES), st.integers(0, 400), st.sampled_from(DENSITIES), st.integers(0, 99))
def test_take(kind, n, density, seed):
    old, _, indices = step_of(kind, n, density, seed)
    np.testing.assert_array_equal(triton_rows.take(inside(old, 3), inside(indices, 0)).cpu().numpy(), old[indices])


def test_an_index_outside_the_tensor_is_never_read():
    held = inside(np.full(10, 5, np.uint16), 3)
    assert triton_rows.take(held, on_device([-1, 2, 10, 1 << 40])).tolist() == [0, 5, 0, 0]


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "uint8"])
def test_fingerprint_of_a_range(name, n):
    bits, _, _ = step_of(BY_NAME[name], n, 0, n)
    for start in (0, (1 << 40) + 3) if n > 1024 else (7,):
        expected = fingerprint.fingerprint(bits, KEY, start)
        assert expected == fingerprint_reference(bits, KEY, np.arange(start, start + n))
        for programs in (1, 3):
            assert triton_rows.fingerprint(inside(bits, 5), KEY, start, programs) == expected


@pytest.mark.parametrize("lanes", [(0, 0), (1, 2**64 - 1), (2**63, 2**31), (2**32, 2**63 - 1)])
def test_fingerprint_with_keys_of_every_width(lanes):
    bits, _, _ = step_of(BF16, 1030, 0, 8)
    key = TensorKey(*lanes)
    assert triton_rows.fingerprint(on_device(bits), key) == fingerprint.fingerprint(bits, key)


@FEW
@given(st.sampled_from(TYPES), st.integers(0, 1500), st.sampled_from(DENSITIES), st.integers(0, 2**45))
def test_fingerprint_of_a_change_and_of_chosen_elements(kind, n, density, start):
    old, new, indices = step_of(kind, n, density, n)
    places, old_at, new_at = indices + start, old[indices], new[indices]
    rows = inside(places, 1), inside(old_at, 2), inside(new_at, 3)
    change = triton_rows.fingerprint_change(KEY, *rows)
    assert change == fingerprint.fingerprint_change(KEY, places, old_at, new_at)
    assert triton_rows.fingerprint_at(rows[2], KEY, rows[0]) == fingerprint.fingerprint_at(new_at, KEY, places)


def random_table(kind, generator, limit=6):
    """Return classes of the form that the codec chooses: ascending from 0, without gaps."""
    drawn = np.sort(generator.integers(0, limit, kind.exponents))
    return np.unique(drawn, return_inverse=True)[1].astype(np.uint8)


def assert_split(kind, old, new, indices, table, active, module=triton_split):
    expected = classes.split_classes(kind, old, old[indices], new[indices], indices, table, active)
    rows = inside(old, 5), inside(old[indices], 7), inside(new[indices], 6), inside(indices, 0)
    found = module.split_classes(kind, *rows, table, active, TILING)
    for name, made, one in zip(("counts", "gaps", "steps"), found, expected, strict=True):
        np.testing.assert_array_equal(made.cpu().numpy(), one, err_msg=name)


@FEW
@given(
    st.sampled_from(TYPES),
    st.sampled_from([1, 15, 255, 256, 257, 600]),
    st.sampled_from([0, 0.02, 0.3, 1]),
    st.booleans(),
    st.integers(0, 99),
)
def test_split(kind, n, density, all_active, seed):
    old, new, indices = step_of(kind, n, density, seed)
    generator = np.random.default_rng(seed)
    active = classes.all_active(n) if all_active else (generator.random(classes.segments(n)) < 0.5).astype(np.uint8)
    active[indices // classes.SEGMENT] = 1
    assert_split(kind, old, new, indices, random_table(kind, generator), active)


def test_split_with_the_tiling_of_a_gpu():
    old, new, indices = step_of(BF16, 4096 + 100, 0.02, 5)
    table, active = random_table(BF16, np.random.default_rng(5), classes.MAX_CLASSES), classes.all_active(old.size)
    expected = classes.split_classes(BF16, old, old[indices], new[indices], indices, table, active)
    rows = (on_device(array) for array in (old, old[indices], new[indices], indices))
    found = triton_split.split_classes(BF16, *rows, table, active)
    for made, one in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(made.cpu().numpy(), one)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_split_between_special_patterns(kind):
    """Covers every pair of the zeros, the ends of the range, and the patterns next to the sign bit."""
    sign = 1 << (kind.width - 1)
    ends = np.array([0, 1, sign - 1, sign, sign + 1, 2 * sign - 1, 3 * sign // 2], kind.bits)
    old, new = np.repeat(ends, ends.size), np.tile(ends, ends.size)
    table = random_table(kind, np.random.default_rng(1))
    assert_split(kind, old, new, np.flatnonzero(old != new), table, classes.all_active(old.size))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [0, 2047, 2049])
def test_count_exponents(kind, n):
    bits, _, _ = step_of(kind, n, 0, n)
    found = triton_split.count_exponents(kind, inside(bits, 1)).cpu().numpy()
    np.testing.assert_array_equal(found, count_exponents(kind, bits))


def test_rows_that_do_not_fit_are_refused():
    short, long = on_device(np.zeros(3, np.uint16)), on_device(np.zeros(4, np.uint16))
    places = on_device(np.arange(4))
    for call in (
        lambda: triton_rows.compare_and_compact(short, long),
        lambda: triton_rows.compare_and_compact(short, on_device(np.zeros(3, np.uint8))),
        lambda: triton_rows.compare_and_compact(*(on_device(np.zeros((4, 4)))[:, 1] for _ in range(2))),
        lambda: triton_rows.take(long, places.int()),
        lambda: triton_rows.fingerprint(short, KEY, -1),
        lambda: triton_rows.fingerprint_at(short, KEY, places),
        lambda: triton_rows.fingerprint_change(KEY, places, short, long),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()


def compact_is_right(module):
    steps = [step_of(BF16, n, 0.3, 1) for n in (5 * TILE - 1, 5 * TILE + 7)]
    return all(np.array_equal(compare(old, new, module), indices) for old, new, indices in steps)


def fingerprints_are_right(module):
    old, new, indices = step_of(BF16, 327, 0.3, 1)
    rows = inside(indices, 1), inside(old[indices], 2), inside(new[indices], 3)
    change = fingerprint.fingerprint_change(KEY, indices, old[indices], new[indices])
    whole = module.fingerprint(inside(old, 5), KEY) == fingerprint.fingerprint(old, KEY)
    return whole and module.fingerprint_change(KEY, *rows) == change


def take_is_right(module):
    old, _, indices = step_of(BF16, 327, 0.3, 1)
    return np.array_equal(module.take(inside(old, 3), inside(indices, 0)).cpu().numpy(), old[indices])


def split_is_right(module):
    old, new, indices = step_of(BF16, 327, 0.3, 1)
    table, second = random_table(BF16, np.random.default_rng(2)), np.array([0, 1], np.uint8)
    try:
        assert_split(BF16, old, new, indices, table, classes.all_active(old.size), module)
        assert_split(BF16, old, new, indices[indices >= classes.SEGMENT], table, second, module)
    except AssertionError:
        return False
    return True


# A wrong kernel must not pass: each of these edits of a kernel's source makes the kernel wrong at an edge.
MUTATIONS = {
    "whole tile one element too early": (compact_is_right, "left >= TILE:", "left >= TILE - 1:"),
    "edge of the compared tile": (compact_is_right, "inside = lanes < left", "inside = lanes <= left"),
    "order of the bits": (compact_is_right, "(lanes % 32)", "(31 - lanes % 32)"),
    "edge of the written words": (compact_is_right, "mask=at < n_words", "mask=at < n_words - 1"),
    "last tile of the fingerprint": (fingerprints_are_right, "inside = lanes < n -", "inside = lanes <= n -"),
    "edge of the chosen elements": (fingerprints_are_right, "inside = at < n\n", "inside = at <= n\n"),
    "last tile of chosen elements": (fingerprints_are_right, "(n + TILE - 1) // TILE", "n // TILE"),
    "edge of the tensor": (take_is_right, "(index >= 0) & (index < n_bits)", "(index >= 0) & (index < n_bits - 99)"),
    "element counted before itself": (split_is_right, "lane[None, :] < (index", "lane[None, :] <= (index"),
    "inactive segments counted": (split_is_right, "counts = tl.where(active, counts, 0)", "counts = counts + 0"),
    "edge of the counted rows": (split_is_right, "inside = lanes < left", "inside = lanes < left - 20"),
    "gap of the first of a class": (split_is_right, "tl.where(first, rank,", "tl.where(at == 0, rank,"),
    "fold of a step down": (split_is_right, "- step) << 1) | 1", "- step) << 1) | 0"),
    "sign and magnitude": (split_is_right, "negative, (1 << BITS) - 1,", "negative, 1 << (BITS - 1),"),
}


def edited(module, old, new, folder):
    source = Path(module.__file__).read_text("utf-8")
    assert old in source, f"the kernel no longer says {old!r}"
    path = folder / f"edited_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


CHECKED = {
    compact_is_right: triton_rows,
    fingerprints_are_right: triton_rows,
    take_is_right: triton_rows,
    split_is_right: triton_split,
}


@pytest.mark.parametrize("check", CHECKED, ids=lambda check: check.__name__)
def test_the_unedited_kernels_pass(check):
    assert check(CHECKED[check])


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_found(name, tmp_path):
    check, old, new = MUTATIONS[name]
    assert not check(edited(CHECKED[check], old, new, tmp_path))


@pytest.mark.parametrize(
    "place", [np.asarray, torch.from_numpy, on_device], ids=["arrays", "tensors of the CPU", "here"]
)
def test_arrays_in_any_place_have_the_same_results(place):
    assert_same_results(triton_backend(), place)


def test_the_interpreter_runs_unless_a_device_is_set():
    assert triton_rows.INTERPRETED is (DEVICE == "cpu")
    assert triton_obstacle() is None
    assert choose("triton", False, triton_obstacle) == "triton"


KERNELS = {"compare_and_compact": triton_rows, "split_classes": triton_split, "fingerprint": triton_rows}


@pytest.fixture
def calls(monkeypatch):
    """The names of the Triton kernels that were called."""
    made = []
    for name, module in KERNELS.items():
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, o=original, n=name, **k: made.append(n) or o(*a, **k))
    return made


def stream(kind, old, new, mode, monkeypatch):
    monkeypatch.setenv("TIDEMILL_KERNELS", mode)
    return b"".join(encode_delta(2, 1, [TensorChange("w", kind.name, old, new)]))


@pytest.mark.parametrize(
    ("name", "density"), [("bfloat16", 0.5), ("float32", 0.02), ("float8_e4m3fn", 0.02), ("int8", 0.02)]
)
def test_deltas_of_arrays_and_of_tensors_have_the_same_bytes(name, density, monkeypatch, calls):
    kind = BY_NAME[name]
    old, new, _ = step_of(kind, 1500, density, 3)
    expected = stream(kind, old, new, "cpu", monkeypatch)
    assert not calls
    assert stream(kind, old, new, "triton", monkeypatch) == expected
    assert set(calls) == set(KERNELS)
    calls.clear()
    tensors = on_device(old), on_device(new)
    assert stream(kind, *tensors, "triton", monkeypatch) == expected
    assert set(calls) == set(KERNELS)
    assert stream(kind, *tensors, "auto", monkeypatch) == expected


@pytest.mark.parametrize("where", [slice(1030, 1230), slice(0, None, 90)], ids=["one segment", "everywhere"])
def test_a_delta_of_typed_tensors_has_the_same_bytes(where, monkeypatch):
    """Exponents are counted in samples or in the one active segment. The tensors have the type bfloat16."""
    monkeypatch.setattr(payload, "SAMPLE_RUN", 128)
    old = np.random.default_rng(0).integers(0, 1 << 16, 8500, dtype=np.uint16)
    new = old.copy()
    new[where] ^= 3
    held, target = (on_device(bits.copy()).view(torch.bfloat16) for bits in (old, new))
    expected = stream(BF16, old, new, "cpu", monkeypatch)
    assert stream(BF16, held, target, "triton", monkeypatch) == expected


def test_tensors_that_are_not_contiguous_or_have_another_width_are_refused(monkeypatch):
    monkeypatch.setenv("TIDEMILL_KERNELS", "triton")
    whole = on_device(np.zeros((8, 8), np.uint16)).view(torch.bfloat16)
    for wrong in (whole.T[1:], whole.float()):
        with pytest.raises(DeltaError):
            list(encode_tensor("w", "bfloat16", wrong, wrong))
