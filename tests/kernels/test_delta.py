"""Deltas are lossless for every bit pattern, do not depend on the split, and apply only to their base."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels.encoding import encode_delta, encode_tensor, resolve
from tidemill.kernels.block import BLOCK_ELEMENTS, CodecSettings
from tidemill.kernels.delta import apply_change, decode_blocks, decode_delta, resolve_all
from tidemill.kernels.elements import ELEMENT_TYPES, TensorChange
from tidemill.kernels.wire import DeltaError

BLOCK = 1 << 20
SPECIAL_BF16 = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x3F80]


SETTINGS = st.builds(
    CodecSettings,
    block_elements=st.integers(1, 1000),
    coder=st.sampled_from(["auto", "rans", "pcodec", "zstd"]),
    digest=st.sampled_from(["xxh3", "blake3"]),
)


@st.composite
def changes(draw, max_elements=200):
    """Draw a tensor of any element type and its successor; between none and all elements are changed."""
    kind = draw(st.sampled_from(ELEMENT_TYPES))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=max(1, round(max_elements ** (1 / 3)))))
    old = draw(hnp.arrays(kind.bits, shape))
    keep = draw(hnp.arrays(np.bool_, shape, fill=st.booleans()))
    new = np.where(keep, old, draw(hnp.arrays(kind.bits, shape)))
    name = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
    return TensorChange(name, kind.name, old, new)


def cut(pieces, limit):
    stream = b"".join(pieces)
    return [stream[at : at + limit] for at in range(0, len(stream), limit)]


def apply_all(blocks, tensors):
    """Apply every block in place to the tensor of its name; return for each block whether it was new."""
    applied = []
    for block in blocks:
        changes = resolve_all(block, tensors)
        applied.append(bool(changes))
        for change in changes:
            np.testing.assert_array_equal(tensors[change.name].reshape(-1)[change.indices], change.old_bits)
            apply_change(change, tensors[change.name])
    return applied


@given(st.lists(changes(), max_size=4, unique_by=lambda c: c.name), st.integers(1, 400))
def test_round_trip_through_chunks_of_any_size(tensors, limit):
    chunks = cut(encode_delta(8, 7, tensors), limit)
    held = {change.name: change.old_bits.copy() for change in tensors}
    apply_all(decode_delta(chunks, 8, 7), held)
    for change in tensors:
        np.testing.assert_array_equal(held[change.name], change.new_bits)


@given(changes(), SETTINGS)
def test_blocks_are_independent_and_skip_applied_changes(change, settings):
    blocks = list(encode_tensor(*change, settings=settings))
    held = {change.name: change.old_bits.copy()}
    assert all(apply_all((d for b in reversed(blocks) for d in decode_blocks(b)), held))
    np.testing.assert_array_equal(held[change.name], change.new_bits)
    assert not any(apply_all(decode_blocks(b"".join(blocks)), held))


@given(changes(), st.integers(1, 64), st.integers(0, 300), st.integers(0, 300), st.data())
def test_the_blocks_of_a_part_apply_to_every_part_that_contains_it(change, block_elements, before, after, data):
    """The blocks of a tensor's part apply to the part, to any larger part that contains it, and to the whole tensor."""
    old, new = change.old_bits.reshape(-1), change.new_bits.reshape(-1)
    total = before + old.size + after
    part = {"start": before, "total": total, "settings": CodecSettings(block_elements)}
    blocks = list(decode_blocks(b"".join(encode_tensor(change.name, change.dtype, old, new, **part))))
    whole = np.zeros(total, old.dtype)
    whole[before : before + old.size] = old
    margin = data.draw(st.integers(0, before))
    around = whole[margin : before + old.size].copy()
    local = old.copy()
    for block in blocks:
        (run,) = block.parts
        assert run.start // block_elements == (run.start + run.n - 1) // block_elements
        assert run.start % block_elements == 0 or run.start == before
        change = resolve(block, whole)
        apply_change(change, local, before)
        apply_change(change, around, margin)
        apply_change(change, whole)
    np.testing.assert_array_equal(local, new)
    np.testing.assert_array_equal(around[before - margin :], new)
    np.testing.assert_array_equal(whole[before : before + old.size], new)


def test_a_part_that_does_not_hold_the_block_is_refused():
    old = np.arange(100, dtype=np.uint16)
    (block,) = decode_blocks(b"".join(encode_tensor("w", "bfloat16", old, old + np.uint16(1), start=50, total=200)))
    change = resolve(block, np.concatenate([np.zeros(50, np.uint16), old, np.zeros(50, np.uint16)]))
    for offset in (0, 49, 51, 151):
        with pytest.raises(DeltaError, match="do not hold 100 at 50"):
            apply_change(change, old, offset)
    with pytest.raises(DeltaError, match="100 elements here, 200"):
        resolve(block, old)


@pytest.mark.parametrize("old", SPECIAL_BF16)
def test_special_patterns_survive(old):
    """Covers every pair of NaN payloads, both zeros, infinities and subnormals."""
    before = np.full(len(SPECIAL_BF16), old, np.uint16)
    after = np.array(SPECIAL_BF16, np.uint16)
    held = {"w": before.copy()}
    apply_all(decode_blocks(b"".join(encode_tensor("w", "bfloat16", before, after))), held)
    np.testing.assert_array_equal(held["w"], after)


@settings(max_examples=15)
@given(st.sampled_from([0.0001, 0.01, 0.3, 1.0]), st.integers(0, 2**32 - 1), st.sampled_from(ELEMENT_TYPES))
def test_blocks_of_full_size(density, seed, kind):
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 1 << 8 * kind.bits.itemsize, BLOCK + 1000, dtype=kind.bits)
    new = np.where(generator.random(old.size) < density, old + kind.bits.type(1), old)
    chunks = cut(encode_delta(1, 0, [TensorChange("w", kind.name, old, new)], CodecSettings(BLOCK)), 1 << 20)
    held = {"w": old.copy()}
    apply_all(decode_delta(iter(chunks), 1, 0), held)
    np.testing.assert_array_equal(held["w"], new)


def peak_bytes(blocks):
    """Return the peak memory of encoding and decoding a tensor of some full blocks, without the tensor itself."""
    old = np.zeros(blocks * BLOCK, np.uint16)
    new = np.arange(old.size, dtype=np.uint32).astype(np.uint16)
    settings = CodecSettings(BLOCK)
    tracemalloc.start()
    try:
        for block in decode_delta(encode_delta(1, 0, [TensorChange("w", "bfloat16", old, new)], settings), 1, 0):
            resolve(block, old)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_block():
    peak_bytes(1)
    assert peak_bytes(6) < 1.6 * peak_bytes(2)


def test_no_change_is_an_empty_delta():
    bits = np.arange(100, dtype=np.uint16)
    assert list(encode_tensor("w", "bfloat16", bits, bits)) == []
    assert list(decode_delta(encode_delta(2, 1, [TensorChange("w", "bfloat16", bits, bits)]), 2, 1)) == []


def one_block(old, new, name="w", dtype="bfloat16"):
    (block,) = decode_blocks(b"".join(encode_tensor(name, dtype, old, new)))
    return block


@pytest.mark.parametrize("changed", [slice(None), slice(3, 4)], ids=["among changes", "beside the change"])
def test_other_weights_are_refused(changed):
    old = np.arange(100, dtype=np.uint16)
    new, other = old.copy(), old.copy()
    new[changed] += 1
    other[50] ^= 0x8000
    with pytest.raises(DeltaError, match="re-sync from an anchor"):
        resolve(one_block(old, new), other)


def test_another_name_size_or_width_is_refused():
    old = np.arange(100, dtype=np.uint16)
    block = one_block(old, old + np.uint16(1))
    with pytest.raises(DeltaError, match="99 elements here, 100"):
        resolve(block, old[:99])
    with pytest.raises(DeltaError, match="uint16 bit patterns, got uint32"):
        resolve(block, old.astype(np.uint32))
    with pytest.raises(DeltaError, match="v: elements 0 to 100 hold"):
        resolve(one_block(old, old + np.uint16(1), name="v"), old + np.uint16(2))


def test_fragmented_memory_is_refused():
    old = np.arange(100, dtype=np.uint16)
    with pytest.raises(DeltaError, match="contiguous"):
        apply_change(resolve(one_block(old, old + np.uint16(1)), old), np.zeros(200, np.uint16)[::2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("w", "bfloat16", np.zeros(3, np.uint16), np.zeros(4, np.uint16)), "keeps shapes"),
        (("w", "complex64", np.zeros(3, np.uint16), np.zeros(3, np.uint16)), "does not support dtype"),
        (("w", "bfloat16", np.zeros(3, np.uint8), np.zeros(3, np.uint8)), "uint16 bit patterns"),
        (("", "bfloat16", np.zeros(3, np.uint16), np.zeros(3, np.uint16)), "name"),
        (("x" * 1025, "bfloat16", np.zeros(3, np.uint16), np.zeros(3, np.uint16)), "name"),
    ],
)
def test_tensors_that_cannot_be_encoded_are_refused(arguments, message):
    with pytest.raises(DeltaError, match=message):
        list(encode_tensor(*arguments))


@pytest.mark.parametrize(("start", "total"), [(-1, 10), (8, 10), (0, 2)])
def test_a_part_outside_its_tensor_is_refused(start, total):
    bits = np.zeros(3, np.uint16)
    with pytest.raises(DeltaError, match="exceed their tensor"):
        list(encode_tensor("w", "bfloat16", bits, bits, start=start, total=total))


@pytest.mark.parametrize("block_elements", [0, -1, BLOCK_ELEMENTS + 1])
def test_block_sizes_that_no_decoder_takes_are_refused(block_elements):
    with pytest.raises(DeltaError, match="blocks have"):
        CodecSettings(block_elements)
