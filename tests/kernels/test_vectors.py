"""Operations on words of 64 elements; `test_classes` and `test_coders` compare the loops that use them with twins."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from tidemill.kernels import compiled as vectors
from tidemill.kernels.classes import all_active, select_classes, split_classes
from tidemill.kernels.elements import BY_NAME, changed_elements


@njit
def differing(old, new, first):
    return vectors.differing(old, new, first)


def test_rows_with_holes_are_not_read():
    with pytest.raises(TypingError, match="contiguous rows"):
        differing(np.zeros(256, np.uint8)[::2], np.zeros(256, np.uint8)[::2], 0)


def digest_of_loops():
    """Return a digest of the results of all loops over words, after a check that they are inverse."""
    generator, kind = np.random.default_rng(0), BY_NAME["bfloat16"]
    old = generator.integers(0, 1 << 16, 9000, np.uint16)
    new = np.where(generator.random(old.size) < np.linspace(0.01, 0.5, old.size), old + np.uint16(1), old)
    changes = indices, old_at, new_at = changed_elements(old, new)
    table, active = np.repeat(np.arange(8, dtype=np.uint8), 32), all_active(old.size)
    streams = split_classes(kind, old, old_at, new_at, indices, table, active)
    found, _, new_found = select_classes(kind, old, streams, table, active, 0)
    held = old.copy()
    held[found] = new_found
    np.testing.assert_array_equal(held, new)
    return hashlib.sha256(b"".join(row.tobytes() for row in (*changes, *streams, found, new_found))).hexdigest()


def test_a_processor_without_vectors_makes_the_same_bytes(tmp_path):
    """For one type: the loops are the same for all types, and only set bits are found in another way. The codec's other
    loops use no vectors."""
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "import test_vectors; print(test_vectors.vectors.DEPOSITS, test_vectors.digest_of_loops())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **plain, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", digest_of_loops()]
