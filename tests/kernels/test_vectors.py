"""Operations on words of 64 elements equal their definitions, on this processor and on one without vectors."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError

from tests.kernels.encoding import encode_tensor
from tidemill.kernels import compiled as vectors
from tidemill.kernels.compiled import WORD
from tidemill.kernels.delta import CodecSettings, decode_blocks, resolve
from tidemill.kernels.elements import BY_NAME

UNHURRIED = settings(deadline=None)
WORDS = st.integers(0, 2**64 - 1)


@njit
def differing(old, new, first):
    return vectors.differing(old, new, first)


@njit
def extract_field(bits, first, shift, mask, out, at):
    vectors.extract_field(bits, first, shift, mask, out, at)


@njit
def within(values, first, least, span):
    return vectors.within(values, first, least, span)


@njit
def of_one(value):
    return vectors.count_ones(value), vectors.lowest_one(value), vectors.bit_length(value)


@njit
def multiply_high(a, b):
    return vectors.multiply_high(a, b)


@njit
def by_halves(mask, n):
    return vectors.nth_one_by_halves(mask, n)


@njit
def nth_one(mask, n):
    return vectors.nth_one(mask, n)


def mask_of(row):
    return sum(1 << i for i in np.flatnonzero(row).tolist())


@UNHURRIED
@given(st.sampled_from([np.uint8, np.uint16, np.uint32]), st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_words_of_elements(kind, first, seed):
    generator = np.random.default_rng(seed)
    width = 8 * np.dtype(kind).itemsize
    old = generator.integers(0, 1 << width, first + WORD + 3, kind)
    new = np.where(generator.random(old.size) < 0.5, old, generator.integers(0, 1 << width, old.size, kind))
    word = slice(first, first + WORD)
    assert differing(old, new, first) == mask_of(old[word] != new[word])
    shift, mask = int(generator.integers(0, width)), int(generator.integers(0, 256))
    out = np.full(WORD + first, 7, np.uint8)
    extract_field(old, first, shift, mask, out, first)
    np.testing.assert_array_equal(out[first:], (old[word].astype(np.int64) >> shift) & mask)
    assert (out[:first] == 7).all()
    least = int(generator.integers(0, 256))
    span = int(generator.integers(0, 256 - least))
    assert within(out, first, least, span) == mask_of((out[first:] >= least) & (out[first:] <= least + span))


@UNHURRIED
@given(WORDS, WORDS)
def test_single_words(a, b):
    lowest = (a & -a).bit_length() - 1 if a else 64
    assert of_one(np.uint64(a)) == (a.bit_count(), lowest, a.bit_length())
    assert multiply_high(np.uint64(a), np.uint64(b)) == a * b >> 64


@UNHURRIED
@given(WORDS)
def test_set_bits_are_found_by_number(mask):
    for n, place in enumerate(i for i in range(64) if mask >> i & 1):
        assert by_halves(np.uint64(mask), np.uint64(n)) == place
        assert nth_one(np.uint64(mask), np.uint64(n)) == place


def test_rows_with_holes_are_not_read():
    with pytest.raises(TypingError, match="contiguous rows"):
        differing(np.zeros(256, np.uint8)[::2], np.zeros(256, np.uint8)[::2], 0)


def digest_of_deltas():
    """Return a digest of the deltas of a one-byte and a two-byte type, after a check that they are lossless."""
    digest = hashlib.sha256()
    for kind in (BY_NAME["bfloat16"], BY_NAME["float8_e4m3fn"]):
        generator = np.random.default_rng(kind.code)
        old = generator.integers(0, 1 << kind.width, 9000, kind.bits)
        new = np.where(generator.random(old.size) < 0.03, old + kind.bits.type(1), old)
        (data,) = encode_tensor("w", kind.name, old, new, settings=CodecSettings())
        (block,) = decode_blocks(data)
        change = resolve(block, old)
        held = old.copy()
        held[change.indices] = change.new_bits
        np.testing.assert_array_equal(held, new)
        digest.update(data)
    return digest.hexdigest()


def test_a_processor_without_vectors_makes_the_same_bytes(tmp_path):
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "import test_vectors; print(test_vectors.vectors.DEPOSITS, test_vectors.digest_of_deltas())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **plain, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", digest_of_deltas()]
