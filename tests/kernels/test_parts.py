"""Small tensors share a block: the same changes in fewer bytes, and the block applies only to the right weights."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.encoding import encode_tensor
from tidemill.kernels.block import (
    DIRECTORY_LIMIT,
    BlockPart,
    CodecSettings,
    read_directory,
    read_header,
    write_block,
    write_directory,
)
from tidemill.kernels.comparison import compare
from tidemill.kernels.delta import apply_change, decode_blocks, resolve_all
from tidemill.kernels.elements import ELEMENT_TYPES, TensorChange
from tidemill.kernels.encoder import DeltaEncoder
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.wire import DeltaError, varint

FEWER = settings(max_examples=50)
NAMES = st.text(min_size=1, max_size=60)


def step(name, size=1000, density=0.05, seed=0, dtype="bfloat16"):
    generator = np.random.default_rng(seed)
    bits = np.uint8 if dtype.startswith("float8") else np.uint16
    old = generator.integers(0, 100, size, dtype=bits)
    return TensorChange(name, dtype, old, old + (generator.random(size) < density).astype(bits))


def encoded(changes, chosen=None):
    encoder = DeltaEncoder(chosen or CodecSettings())
    return [*(block for change in changes for block in encoder.add(*change)), *encoder.finish()]


def decoded(blocks):
    return [block for one in blocks for block in decode_blocks(one.data)]


@st.composite
def tensors(draw):
    """Draw tensors of several types and sizes; none, some or all of their elements change."""
    changes = []
    for name in draw(st.lists(NAMES, max_size=12, unique=True)):
        kind = draw(st.sampled_from(ELEMENT_TYPES))
        generator = np.random.default_rng(draw(st.integers(0, 2**32)))
        old = generator.integers(0, 1 << kind.width, draw(st.integers(0, 300)), kind.bits)
        moved = generator.random(old.size) < draw(st.sampled_from([0, 0.02, 0.5, 1]))
        changes.append(TensorChange(name, kind.name, old, np.where(moved, old ^ kind.bits.type(1), old)))
    return changes


@FEWER
@given(tensors(), st.sampled_from([1, 40, 1000, 1 << 24]))
def test_every_tensor_gets_its_new_value(changes, block_elements):
    blocks = encoded(changes, CodecSettings(block_elements))
    held = {change.name: change.old_bits.copy() for change in changes}
    added = dict.fromkeys(held, ZERO)
    for block in decoded(blocks):
        found = resolve_all(block, held)
        assert sum((c.target - c.base for c in found), start=block.header.base) == block.header.target
        for change in found:
            added[change.name] += change.target - change.base
            apply_change(change, held[change.name])
        assert resolve_all(block, held) == (), "it is in already"
    for change in changes:
        np.testing.assert_array_equal(held[change.name], change.new_bits)
        key = TensorKey.of(change.name)
        assert fingerprint(change.old_bits, key) + added[change.name] == fingerprint(change.new_bits, key)


def test_only_small_tensors_of_one_type_share_a_block():
    chosen = CodecSettings(block_elements=8000)
    large, part = step("large", 1001), step("part", 100)
    changes = [step("a"), large, step("b", dtype="float8_e4m3fn"), step("c"), step("still", density=0), step("d")]
    encoder = DeltaEncoder(chosen)
    blocks = [b for change in changes for b in encoder.add(*change)]
    blocks += [*encoder.add(*part._replace(start=7, total=200)), *encoder.finish()]
    assert [block.names for block in decoded(blocks)] == [("large",), ("a", "c"), ("part",), ("d",), ("b",)]


def test_waiting_tensors_are_copies_and_are_listed():
    encoder, change = DeltaEncoder(), step("a")
    before, after = change.old_bits.copy(), change.new_bits.copy()
    assert not list(encoder.add(*change)) and encoder.waiting == {"a"}
    change.old_bits[:], change.new_bits[:] = 1, 2
    assert not list(encoder.add(*step("b", seed=1)))
    (block,) = decoded(encoder.finish())
    assert not encoder.waiting
    change = resolve_all(block, {"a": before, "b": step("b", seed=1).old_bits})[0]
    apply_change(change, before)
    np.testing.assert_array_equal(before, after)


def test_shared_blocks_are_smaller():
    changes = [step(f"model.layers.{i}.norm.weight", 2000, 0.01, i) for i in range(100)]
    alone = sum(len(data) for change in changes for data in encode_tensor(*change))
    report = compare(changes)
    assert report.round_trip_equal
    assert report.total.wire_bytes < alone / 4
    assert report.total.ratio_to_exponent_class_bound < 1.25


def test_a_repeated_tensor_is_refused():
    with pytest.raises(DeltaError, match="a is twice"):
        encoded([step("a"), step("a")])


def test_weights_that_drifted_are_refused():
    a, b = step("a"), step("b", seed=1)
    (block,) = decoded(encoded([a, b]))
    drifted = b.old_bits.copy()
    drifted[3] ^= 4
    with pytest.raises(DeltaError, match="a: elements 0 to 1000, and 1 tensors more, hold"):
        resolve_all(block, {"a": a.old_bits, "b": drifted})
    with pytest.raises(DeltaError, match="hold"):
        resolve_all(block, {"a": a.new_bits, "b": b.old_bits})
    with pytest.raises(DeltaError, match="b, which these weights do not have"):
        resolve_all(block, {"a": a.old_bits})
    with pytest.raises(DeltaError, match="999 elements here, 1000"):
        resolve_all(block, {"a": a.old_bits, "b": b.old_bits[:999]})


def parts(sizes):
    return [BlockPart(name, n, 0, n) for name, n in sizes.items()]


@given(st.dictionaries(NAMES, st.integers(1, 2**20), min_size=2, max_size=40))
def test_directories_survive_writing(sizes):
    data = write_directory(parts(sizes))
    assert list(read_directory(memoryview(data), sum(sizes.values()))) == parts(sizes)


def entry(name, n):
    return varint(len(name)) + name + varint(n)


TWO = entry(b"a", 10) + entry(b"b", 20)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a field of 1 bytes"),
        (varint(len(TWO)) + b"\2" + TWO, "form 2"),
        (varint(DIRECTORY_LIMIT + 1) + b"\0" + TWO, "directory of 1048577 bytes"),
        (varint(5) + b"\0" + TWO, "where it says 5"),
        (varint(len(TWO)) + b"\1" + TWO, "not a zstandard frame"),
        (varint(len(TWO)) + b"\1" + zstandard.compress(TWO * 2), "declares 12 bytes"),
        (varint(6) + b"\0" + entry(b"a", 10) + entry(b"a", 20), "twice"),
        (varint(6) + b"\0" + entry(b"a", 0) + entry(b"b", 30), "without elements"),
        (varint(6) + b"\0" + entry(b"a", 10) + entry(b"b", 21), "does not fit"),
        (varint(3) + b"\0" + entry(b"a", 30), "1 tensors does not fit"),
        (varint(6) + b"\0" + entry(b"a", 10) + entry(b"b", 19), "a field of 1 bytes"),
        (varint(7) + b"\0" + TWO + b"x", "does not fit"),
        (varint(6) + b"\0" + entry(b"\xff", 10) + entry(b"b", 20), "not UTF-8"),
        (varint(5) + b"\0" + entry(b"", 10) + entry(b"b", 20), "name of 0 bytes"),
    ],
)
def test_false_directories_are_refused(data, message):
    assert len(read_directory(memoryview(varint(6) + b"\0" + TWO), 30)) == 2
    with pytest.raises(DeltaError, match=message):
        read_directory(memoryview(data), 30)


@pytest.mark.parametrize(("field", "value"), [("start", 5), ("tensor_elements", 2001), ("elements", 1999)])
def test_a_shared_block_covers_whole_tensors(field, value):
    (block,) = encoded([step("a"), step("b", seed=1)])
    header = read_header(memoryview(block.data))
    name = block.data[-header.body_length : -header.payload_length]
    whole = {key: getattr(header, key) for key in header.__slots__}
    false = write_block(type(header)(**{**whole, field: value}), name, block.data[-header.payload_length :])
    with pytest.raises(DeltaError, match=r"of several tensors has|exceeds its tensor"):
        list(decode_blocks(false))
