"""The exchange between server and ranks: boxes and proofs of the ranks, and changes in shared memory or a refusal."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.consumers.replica.ranks import (
    RankCoverage,
    handed_over,
    taken_over,
)
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.fingerprint import TensorKey, fingerprint, fingerprint_at
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.mirror import ElementChange

ROWS, COLUMNS, EXPERTS = 6, 12, 3
SPECS = [
    TensorSpec("rows", (ROWS, COLUMNS), "bfloat16"),
    TensorSpec("columns", (ROWS, COLUMNS), "bfloat16"),
    TensorSpec("norm", (COLUMNS,), "bfloat16"),
    TensorSpec("down", (EXPERTS, ROWS, COLUMNS), "bfloat16"),
    TensorSpec("expert", (ROWS, COLUMNS), "bfloat16"),
]


def held(ranks):
    """Return each rank's boxes as tensor parallelism cuts them; only one rank holds the last tensor, like an expert."""
    row, column = ROWS // ranks, COLUMNS // ranks
    tables = []
    for rank in range(ranks):
        table = [(0, rank * row * COLUMNS, 1, row * COLUMNS, row * COLUMNS), (2, 0, 1, COLUMNS, COLUMNS)]
        cut = (1, ROWS * COLUMNS, ROWS * COLUMNS) if ranks == 1 else (ROWS, column, COLUMNS)
        table.append((1, rank * column, *cut))
        table += [(3, e * ROWS * COLUMNS + rank * column, *cut) for e in range(EXPERTS)]
        if rank == ranks - 1:
            table.append((4, 0, 1, ROWS * COLUMNS, ROWS * COLUMNS))
        tables.append(np.array(table, dtype=np.int64))
    return tables


def prints(table, values):
    """Return the fingerprint of each box of a rank."""
    found = []
    for number, source, rows, row, pitch in table.tolist():
        where = (source + np.arange(rows)[:, None] * pitch + np.arange(row)).reshape(-1)
        name = SPECS[number].name
        one = fingerprint_at(values[name][where], TensorKey.of(name), where)
        found.append((one.lo, one.hi))
    return np.array(found, dtype=np.uint64)


def some_values(seed=0):
    random = np.random.default_rng(seed)
    return {spec.name: random.integers(0, 1 << 16, spec.n_elements).astype(np.uint16) for spec in SPECS}


@given(st.sampled_from([1, 2, 3]), st.integers(0, 100))
def test_the_sum_over_distinct_boxes_is_each_tensors_fingerprint(ranks, seed):
    tables, values = held(ranks), some_values(seed)
    found = RankCoverage(SPECS, tables).add_up([prints(table, values) for table in tables])
    assert found == {name: fingerprint(bits, TensorKey.of(name)) for name, bits in values.items()}


def test_a_copy_that_differs_is_found_with_its_ranks():
    tables, values = held(3), some_values()
    found = [prints(table, values) for table in tables]
    odd = {**values, "norm": values["norm"] ^ np.uint16(1)}
    found[2] = prints(tables[2], odd)
    with pytest.raises(ValueError, match="ranks 0 and 2 hold different copies of elements of norm"):
        RankCoverage(SPECS, tables).add_up(found)


@pytest.mark.parametrize(
    ("tensor", "change", "position"),
    [
        (0, lambda table: table[table[:, 0] != 0], 36),
        (1, lambda table: table[table[:, 0] != 1], 0),
        (0, lambda table: table + (table[:, :1] == 0) * np.array([0, 1, 0, 0, 0]), 36),
        (1, lambda table: table + (table[:, :1] == 1) * np.array([0, 0, -1, 0, 0]), 0),
        (1, lambda table: table + (table[:, :1] == 1) * np.array([0, -1, 0, 0, 0]), 0),
        (4, lambda table: table + (table[:, :1] == 4) * np.array([0, 0, 0, -1, -1]), 71),
    ],
)
def test_elements_that_no_rank_holds_or_that_overlap_are_refused(tensor, change, position):
    tables = held(2)
    tables[1] = change(tables[1])
    message = f"elements of {SPECS[tensor].name} from {position} of {SPECS[tensor].n_elements} lie in no rank"
    with pytest.raises(UnsupportedModelError, match=message):
        RankCoverage(SPECS, tables)


def test_a_tensor_with_gaps_on_one_rank_is_refused():
    with pytest.raises(UnsupportedModelError, match="elements of rows from 0 of 72 lie in no rank"):
        RankCoverage(SPECS[:1], [np.array([[0, 0, ROWS, COLUMNS // 2, COLUMNS]])])


def changes_of(seed, sizes):
    random = np.random.default_rng(seed)
    widths = [np.uint8, np.uint16, np.uint32]
    return [
        ElementChange(
            f"model.layers.{k}.weight", random.permutation(n), random.integers(0, 255, n).astype(widths[k % 3])
        )
        for k, n in enumerate(sizes)
    ]


@given(st.integers(0, 1000), st.lists(st.integers(0, 9), max_size=7))
def test_every_change_arrives_aligned_to_its_elements(seed, sizes):
    changes = changes_of(seed, sizes)
    with handed_over(changes) as handed:
        taken = taken_over(*handed)
    # The memory stays mapped while an array uses it, also after the server has released it.
    assert len(taken) == len(changes)
    for one, other in zip(taken, changes, strict=True):
        assert one.name == other.name and one.bits.dtype == other.bits.dtype
        assert np.array_equal(one.indices, other.indices) and np.array_equal(one.bits, other.bits)
        assert one.indices.flags.aligned and one.bits.flags.aligned and not one.bits.flags.writeable


@pytest.mark.parametrize("at", [0, 9, 200, -1])
def test_one_flipped_bit_is_refused(at):
    with handed_over(changes_of(1, [40, 3])) as (path, digest):
        file = os.open(path, os.O_RDWR)
        place = at % os.fstat(file).st_size
        os.pwrite(file, bytes([os.pread(file, 1, place)[0] ^ 1]), place)
        os.close(file)
        with pytest.raises(ValueError, match="digest differs"):
            taken_over(path, digest)


def test_the_shared_memory_is_removed():
    with handed_over(changes_of(1, [40])) as (path, digest):
        pass
    with pytest.raises(OSError):
        taken_over(path, digest)
