"""Splitting by exponent class equals its numpy twin, is inverted by selecting, and works for every pattern."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels.reference import split_classes_reference
from tidemill.kernels.classes import (
    MAX_CLASSES,
    SEGMENT,
    TILE,
    ClassStreams,
    all_active,
    count_active_exponents,
    count_exponents,
    segments,
    select_classes,
    split_classes,
)
from tidemill.kernels.elements import BY_NAME, ELEMENT_TYPES, changed_elements, fold_steps, move
from tidemill.kernels.models import BIT, log2
from tidemill.kernels.payload import choose_table, find_active, read_active, read_table, write_active, write_table
from tidemill.kernels.wire import BitReader, BitWriter, DeltaError, WireReader, varint


@st.composite
def tables(draw, exponents):
    """Draw any class table of a type with this number of exponents."""
    firsts = draw(st.sets(st.integers(1, max(1, exponents - 1)), max_size=min(MAX_CLASSES, exponents) - 1))
    return np.searchsorted(sorted(firsts), np.arange(exponents), side="right").astype(np.uint8)


@st.composite
def steps(draw):
    """Draw a type, old and new patterns, the changed indices, a class table and active segments with all changes."""
    kind = draw(st.sampled_from(ELEMENT_TYPES))
    n = draw(st.one_of(st.integers(1, 3 * SEGMENT), st.integers(TILE - 70, 2 * TILE + 70)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = generator.integers(0, 1 << kind.width, n, kind.bits)
    ends = generator.choice(np.array([0, 1, (1 << kind.width) // 2, (1 << kind.width) - 1], kind.bits), n)
    other = np.where(generator.random(n) < 0.3, ends, generator.integers(0, 1 << kind.width, n, kind.bits))
    densities = [0.01, 0.3, 1.0] if n < TILE // 4 else [0.003]
    new = np.where(generator.random(n) < draw(st.sampled_from(densities)), other, old)
    indices = changed_elements(old, new)[0]
    active = draw(hnp.arrays(np.uint8, segments(n), elements=st.integers(0, 1)))
    active[indices // SEGMENT] = 1
    return kind, old, new, indices, draw(tables(kind.exponents)), active


@given(steps())
def test_split_equals_its_numpy_twin_and_select_inverts_it(step):
    kind, old, new, indices, table, active = step
    streams = split_classes(kind, old, old[indices], new[indices], indices, table, active)
    expected = split_classes_reference(kind, old, new[indices], indices, table, active)
    np.testing.assert_array_equal(streams.counts, expected.counts)
    np.testing.assert_array_equal(streams.gaps, expected.gaps)
    np.testing.assert_array_equal(streams.steps, expected.steps)
    found, old_at, new_at = select_classes(kind, old, streams, table, active, 1000)
    order = np.argsort(found)
    np.testing.assert_array_equal(found[order], indices + 1000)
    np.testing.assert_array_equal(old_at[order], old[indices])
    np.testing.assert_array_equal(new_at[order], new[indices])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_every_pattern_moves_to_every_other(dtype):
    kind = BY_NAME[dtype]
    old, new = (grid.reshape(-1) for grid in np.meshgrid(*2 * [np.arange(256, dtype=np.uint8)]))
    differ = old != new
    folded = fold_steps(kind, old[differ], new[differ])
    assert folded.max() < 256
    for step in np.unique(folded):
        same = folded == step
        np.testing.assert_array_equal(move(kind, old[differ][same], int(step)), new[differ][same])


def test_a_step_is_counted_in_values():
    """The smallest positive value is two steps above -0; neighbouring values are one step apart."""
    bits = np.array([0x8000, 0x3F80, 0xBF80], np.uint16)
    new = np.array([0x0001, 0x3F7F, 0xBF7F], np.uint16)
    assert fold_steps(BY_NAME["bfloat16"], bits, new).tolist() == [2, 1, 0]


@given(steps(), st.integers(0, 2**32 - 1))
def test_gaps_beyond_a_class_are_refused(step, gap):
    kind, old, new, indices, table, active = step
    streams = split_classes(kind, old, old[indices], new[indices], indices, table, active)
    if indices.size:
        gaps = streams.gaps.copy()
        gaps[-1] = max(gap, old.size)
        with pytest.raises(DeltaError, match="beyond the last element"):
            select_classes(kind, old, ClassStreams(streams.counts, gaps, streams.steps), table, active, 0)


@given(st.data(), st.sampled_from(ELEMENT_TYPES))
def test_tables_survive_writing(data, kind):
    table = data.draw(tables(kind.exponents))
    np.testing.assert_array_equal(read_table(WireReader(memoryview(write_table(table))), kind.exponents), table)


@given(hnp.arrays(np.int64, st.sampled_from([1, 16, 32, 256]), elements=st.integers(0, 2**20)), st.data())
def test_chosen_tables_are_tables(elements, data):
    changed = data.draw(hnp.arrays(np.int64, elements.size, elements=st.integers(0, 2**20)))
    table = choose_table(elements, changed)
    assert table[0] == 0 and table.size == elements.size and table[-1] < MAX_CLASSES
    assert set(np.diff(table)) <= {0, 1}


def test_classes_that_differ_are_kept_and_others_are_merged():
    elements = np.full(16, 100_000)
    changed = np.where(np.arange(16) < 8, 100, 10_000)
    np.testing.assert_array_equal(choose_table(elements, changed), np.arange(16) >= 8)


@given(hnp.arrays(np.bool_, st.integers(1, 40 * SEGMENT), fill=st.booleans()))
def test_active_segments_survive_writing_and_hold_every_change(changed):
    changed[0] = True
    active = find_active(np.flatnonzero(changed), changed.size)
    assert active[np.flatnonzero(changed) // SEGMENT].all()
    np.testing.assert_array_equal(read_active(WireReader(memoryview(write_active(active))), changed.size), active)


def test_active_segments_are_listed_if_few_have_many_changes():
    n = 1000 * SEGMENT
    assert find_active(np.arange(2000, 4000, 2), n).sum() < 10
    assert find_active(np.arange(0, n, 100), n).sum() == all_active(n).sum()


@given(st.sampled_from(ELEMENT_TYPES), st.integers(0, 3000))
def test_exponents_are_counted(kind, n):
    bits = np.random.default_rng(n).integers(0, 1 << kind.width, n, kind.bits)
    exponents = (bits.astype(np.int64) >> kind.mantissa_bits) % kind.exponents
    np.testing.assert_array_equal(count_exponents(kind, bits), np.bincount(exponents, minlength=kind.exponents))


@given(hnp.arrays(np.uint8, st.integers(1, 60), elements=st.integers(0, 1)), st.integers(1, 5), st.integers(1, 4))
def test_exponents_of_active_segments_are_counted(active, run, every):
    kind = BY_NAME["bfloat16"]
    bits = np.random.default_rng(run).integers(0, 1 << 16, active.size * SEGMENT - 7, np.uint16)
    counted = [segment for met, segment in enumerate(np.flatnonzero(active)) if met // run % every == 0]
    expected = count_exponents(kind, np.concatenate([bits[:0], *(bits[s * SEGMENT :][:SEGMENT] for s in counted)]))
    np.testing.assert_array_equal(count_active_exponents(kind, bits, active, run, every), expected)


@given(st.sampled_from([np.uint8, np.uint16, np.uint32]), st.integers(0, 200_000), st.sampled_from([0, 1e-3, 0.1, 1]))
def test_compacting_equals_numpy(kind, n, density):
    generator = np.random.default_rng(n)
    old = generator.integers(0, 200, n, kind)
    new = (old + (generator.random(n) < density)).astype(kind)
    expected = np.flatnonzero(old != new)
    for found, row in zip(changed_elements(old, new), (expected, old[expected], new[expected]), strict=True):
        np.testing.assert_array_equal(found, row)


def test_arrays_that_do_not_fit_are_not_compared():
    with pytest.raises(ValueError, match="cannot be compared"):
        changed_elements(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


@given(st.integers(1, 2**31))
def test_logarithms(value):
    assert abs(log2(value) / BIT - np.log2(value)) < 1e-6


@given(st.lists(st.integers(0, 2**49 - 1)))
def test_integers_survive_writing(values):
    source = WireReader(memoryview(b"".join(map(varint, values))))
    assert [source.varint() for _ in values] == values
    assert not len(source.rest())


@given(st.lists(st.integers(1, 40).flatmap(lambda width: st.tuples(st.integers(0, 2**width - 1), st.just(width)))))
def test_bits_survive_writing(fields):
    out = BitWriter()
    for value, width in fields:
        out.put(value, width)
    source = BitReader(WireReader(memoryview(out.getvalue())))
    assert [source.get(width) for _, width in fields] == [value for value, _ in fields]
    source.close()
