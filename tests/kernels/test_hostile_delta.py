"""Damaged and hostile bytes: every one ends in a DeltaError, in bounded memory, with nothing handed out."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kernels.block import FIELDS, HEADER_SIZE, BlockHeader, read_header, write_block
from tidemill.kernels.container import EDGE_SIZE
from tidemill.kernels.delta import (
    DeltaError,
    FingerprintMismatch,
    TensorChange,
    decode_blocks,
    decode_delta,
    encode_delta,
    encode_tensor,
    resolve,
)
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.fingerprint import Fingerprint, TensorKey, fingerprint
from tidemill.kernels.payload import Encoding
from tidemill.kernels.settings import BLOCK_ELEMENTS

UNHURRIED = settings(deadline=None)
ONE = Fingerprint(1, 1)
OLD = np.arange(2000, dtype=np.uint16)
SPARSE = np.where(OLD % 50 == 0, OLD + 1, OLD).astype(np.uint16)
TENSORS = [TensorChange("a", "bfloat16", OLD, SPARSE), TensorChange("b", "bfloat16", OLD, OLD + np.uint16(9))]
STREAM = b"".join(encode_delta(6, 5, TENSORS))
BLOCK = b"".join(encode_tensor(*TENSORS[0]))


def read(data, version=6, parent=5):
    """Every block of a stream, resolved."""
    return [resolve(block, OLD) for block in decode_delta([data], version, parent)]


def read_block(data):
    """The change that one block makes to `OLD`, taken as the block's element type."""
    (block,) = decode_blocks(data)
    return resolve(block, OLD.astype(BY_NAME[block.dtype].bits))


def forged(payload, *, encoding=Encoding.GAPS, elements=2000, start=0, total=2000, changed=40, dtype="bfloat16"):
    """A block with a right digest over whatever it says: what a hostile writer would send."""
    held = OLD.astype(BY_NAME[dtype].bits)[start : start + elements]
    base = fingerprint(held, TensorKey.of("w"), start)
    header = BlockHeader(encoding, BY_NAME[dtype], 1, total, start, elements, changed, 0, base, base + ONE, b"")
    return write_block(header, b"w", payload)


def frame(data):
    return zstandard.ZstdCompressor().compress(data)


def test_the_undamaged_stream_is_read():
    assert [block.name for block in read(STREAM)] == ["a", "b"]


def test_every_truncation_is_refused():
    for length in range(len(STREAM)):
        with pytest.raises(DeltaError):
            read(STREAM[:length])


@UNHURRIED
@given(st.integers(0, len(STREAM) * 8 - 1))
def test_every_flipped_bit_is_refused(bit):
    damaged = bytearray(STREAM)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DeltaError):
        read(bytes(damaged))


@UNHURRIED
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(DeltaError):
        read(data)
    if data:
        with pytest.raises(DeltaError):
            list(decode_blocks(data))


@UNHURRIED
@given(st.binary(max_size=200), st.integers(0, 2**16 - 1), st.data())
def test_forged_fields_with_a_right_digest_are_refused(payload, encoding, data):
    count = st.integers(0, 2**32 - 1) | st.integers(0, 3000)
    block = forged(
        payload,
        encoding=encoding % 256,
        elements=data.draw(count),
        start=data.draw(count),
        total=data.draw(count),
        changed=data.draw(count),
        dtype=data.draw(st.sampled_from(sorted(BY_NAME))),
    )
    with pytest.raises(DeltaError):
        read_block(block)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elements": BLOCK_ELEMENTS + 1, "total": 2**40}, "a block of"),
        ({"elements": 0}, "a block of"),
        ({"total": 2**60}, "a block of"),
        ({"start": 1}, "leaves its tensor"),
        ({"changed": 2001}, "2001 changed elements"),
        ({"changed": 0}, "0 changed elements"),
        ({"encoding": 3}, "unknown block encoding"),
        ({"dtype": "float32"}, "declares 240 bytes"),
        ({"changed": 41}, "declares 240 bytes"),
        ({"encoding": Encoding.DENSE}, "declares 240 bytes"),
    ],
)
def test_false_counts_are_refused(fields, message):
    payload = frame(bytes(40 * 6))
    with pytest.raises(FingerprintMismatch, match="would become"):
        read_block(forged(payload))
    with pytest.raises(DeltaError, match=message):
        read_block(forged(payload, **fields))


def test_positions_outside_the_block_are_refused():
    planes = np.full(40, 2**32 - 1, "<u4").tobytes() + bytes(80)
    with pytest.raises(DeltaError, match="outside its block"):
        read_block(forged(frame(planes)))


def patched(offset, layout, value):
    """`BLOCK` with one header field overwritten and the digest made right again."""
    fields = bytearray(BLOCK[: FIELDS.size])
    struct.pack_into(layout, fields, offset, value)
    digest = xxhash.xxh3_128_digest(bytes(fields) + BLOCK[HEADER_SIZE:])
    return bytes(fields) + digest + BLOCK[HEADER_SIZE:]


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "4s", b"TMb\x02", "not a block"),
        (4, "<H", 2, "not a block of format"),
        (7, "<B", 99, "unknown element type"),
        (8, "<H", 0, "tensor name"),
        (8, "<H", 65535, "tensor name"),
        (10, "<H", 1, "not a block"),
        (36, "<I", 2**32 - 1, "a payload of"),
    ],
)
def test_false_header_fields_are_refused(offset, layout, value, message):
    with pytest.raises(DeltaError, match=message):
        list(decode_blocks(patched(offset, layout, value)))


def test_a_name_that_is_not_text_is_refused():
    header = read_header(memoryview(BLOCK))
    with pytest.raises(DeltaError, match="not UTF-8"):
        list(decode_blocks(write_block(header, b"\xff", BLOCK[HEADER_SIZE + 1 :])))


def bombs():
    """Payloads that would unpack to far more than their block may hold."""
    honest = frame(bytes(64 << 20))
    streaming = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(2000)))
    return {
        "declared": honest,
        "undeclared": streaming,
        "two frames": frame(bytes(240)) + honest,
        "vast": b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", 2**62) + bytes(lying[10:]),
        "says 240, holds 64 MiB": b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 240 - 256 & 0xFFFF) + honest[9:],
    }


@pytest.mark.parametrize("name", bombs())
def test_bombs_are_bounded_by_the_block(name):
    block = forged(bombs()[name])
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError):
            read_block(block)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_another_version_or_parent_is_refused():
    with pytest.raises(DeltaError, match="leads from 5 to 6, not from 5 to 7"):
        read(STREAM, version=7)
    with pytest.raises(DeltaError, match="not from 4 to 6"):
        read(STREAM, parent=4)


def test_missing_repeated_and_moved_blocks_are_refused():
    head, tail = STREAM[:EDGE_SIZE], STREAM[-EDGE_SIZE:]
    first, second = (b"".join(encode_tensor(*tensor)) for tensor in TENSORS)
    assert head + first + second + tail == STREAM
    for blocks in ([], [first], [second, first], [first, first, second], [first, second, second]):
        with pytest.raises(DeltaError, match="missing, repeated or moved"):
            read(b"".join([head, *blocks, tail]))


def test_bytes_after_the_end_are_refused():
    with pytest.raises(DeltaError, match="follow"):
        read(STREAM + b"\0")


def test_shuffled_chunks_are_refused():
    pieces = [STREAM[at : at + 100] for at in range(0, len(STREAM), 100)]
    shuffled = pieces[:]
    random.Random(0).shuffle(shuffled)
    with pytest.raises(DeltaError):
        list(decode_delta(shuffled, 6, 5))
