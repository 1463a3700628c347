"""Changes in shared memory: what is read is what was written, or a refusal."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.consumers.replica.ranks import DamagedChangesError, handed_over, taken_over
from tidemill.kernels.weights.mirror import ElementChange


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
def test_every_change_comes_over_on_its_elements_boundary(seed, sizes):
    changes = changes_of(seed, sizes)
    with handed_over(changes) as handed:
        taken = taken_over(*handed)
    # The memory stays while an array uses it, also when the server has let go of it.
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
        with pytest.raises(DamagedChangesError, match="digest differs"):
            taken_over(path, digest)


def test_nothing_is_left_behind():
    with handed_over(changes_of(1, [40])) as (path, digest):
        pass
    with pytest.raises(OSError):
        taken_over(path, digest)
