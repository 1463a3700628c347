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

from tests.kernels.encoding import encode_tensor, resolve
from tidemill.kernels import compiled as vectors
from tidemill.kernels.delta import decode_blocks
from tidemill.kernels.payload import Encoding


@njit
def differing(old, new, first):
    return vectors.differing(old, new, first)


def test_rows_with_holes_are_not_read():
    with pytest.raises(TypingError, match="contiguous rows"):
        differing(np.zeros(256, np.uint8)[::2], np.zeros(256, np.uint8)[::2], 0)


def digest_of_delta():
    """Return a digest of a delta, after a check that it is lossless."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 9000, np.uint16)
    new = np.where(generator.random(old.size) < np.linspace(0.01, 0.5, old.size), old + np.uint16(1), old)
    (data,) = encode_tensor("w", "bfloat16", old, new)
    (block,) = decode_blocks(data)
    assert block.header.encoding == Encoding.CLASSES, "only these have words of elements"
    change = resolve(block, old)
    held = old.copy()
    held[change.indices] = change.new_bits
    np.testing.assert_array_equal(held, new)
    return hashlib.sha256(data).hexdigest()


def test_a_processor_without_vectors_makes_the_same_bytes(tmp_path):
    """For one type: the loops are the same for all types, and only set bits are found in another way."""
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "import test_vectors; print(test_vectors.vectors.DEPOSITS, test_vectors.digest_of_delta())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **plain, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", digest_of_delta()]
