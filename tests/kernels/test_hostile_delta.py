"""Damaged and hostile bytes: each input ends in a DeltaError, in bounded memory, without a result."""

import random
import struct
import tracemalloc
from functools import cache

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.encoding import encode_delta, encode_tensor, resolve
from tidemill.kernels.block import (
    BLOCK_ELEMENTS,
    MAGIC,
    PREFIX_SIZE,
    BlockHeader,
    CodecSettings,
    header_size,
    read_header,
    write_block,
)
from tidemill.kernels.coder import ZSTD
from tidemill.kernels.delta import EDGE_SIZE, decode_blocks, decode_delta, resolve_all
from tidemill.kernels.elements import BY_NAME, TensorChange
from tidemill.kernels.fingerprint import Fingerprint, TensorKey, fingerprint
from tidemill.kernels.payload import Encoding
from tidemill.kernels.wire import DeltaError, varint

ONE = Fingerprint(1, 1)
OLD = np.arange(2000, dtype=np.uint16)
SPARSE = np.where(OLD % 50 == 0, OLD + 1, OLD).astype(np.uint16)
TENSORS = [TensorChange("a", "bfloat16", OLD, SPARSE), TensorChange("b", "bfloat16", OLD, OLD + np.uint16(9))]


# Not created at import: the codec's loops are compiled at their first use, and every process of a parallel run imports
# this module.
@cache
def shared():
    """Return a stream whose tensors share a block."""
    return b"".join(encode_delta(6, 5, TENSORS))


@cache
def apart():
    """Return a stream in which each tensor has its own block."""
    return b"".join(encode_delta(6, 5, TENSORS, CodecSettings(OLD.size)))


@cache
def one_block():
    """Return the block of the first tensor."""
    return b"".join(encode_tensor(*TENSORS[0]))


def read(data, version=6, parent=5):
    """Return every change of a stream, resolved."""
    held = {"a": OLD, "b": OLD}
    return [change for block in decode_delta([data], version, parent) for change in resolve_all(block, held)]


def read_block(data):
    """Return the change of one block to `OLD`, converted to the block's element type."""
    (block,) = decode_blocks(data)
    return resolve(block, OLD.astype(block.header.kind.bits))


def forged(payload, *, encoding=Encoding.CLASSES, elements=2000, start=0, total=2000, changed=40, dtype="bfloat16"):
    """Return a block with any content and a correct digest, as a hostile writer could send it."""
    held = OLD.astype(BY_NAME[dtype].bits)[start : start + elements]
    base = fingerprint(held, TensorKey.of("w"), start)
    header = BlockHeader(
        False, encoding, BY_NAME[dtype], 1, total, start, elements, changed, 0, base, base + ONE, "xxh3", b""
    )  # fmt: skip
    return write_block(header, b"w", payload)


def frame(data):
    return zstandard.ZstdCompressor().compress(data)


def portable(small, *, coder=ZSTD.code, changed=40):
    """Return a payload of one class whose gaps and steps are `small`, in portable coding."""
    return bytes([coder, 0, 0]) + varint(changed) + varint(len(small)) + small


@pytest.mark.parametrize(("made", "blocks"), [(shared, [("a", "b")]), (apart, [("a",), ("b",)])])
def test_the_undamaged_stream_is_read(made, blocks):
    assert [block.names for block in decode_delta([made()], 6, 5)] == blocks
    assert [change.name for change in read(made())] == ["a", "b"]


@pytest.mark.parametrize("made", [shared, apart])
def test_every_truncation_is_refused(made):
    stream = made()
    for length in range(len(stream)):
        with pytest.raises(DeltaError):
            read(stream[:length])


@given(st.sampled_from([shared, apart]), st.data())
def test_every_flipped_bit_is_refused(made, data):
    damaged = bytearray(made())
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DeltaError):
        read(bytes(damaged))


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(DeltaError):
        read(data)
    if data:
        with pytest.raises(DeltaError):
            list(decode_blocks(data))


@given(st.binary(max_size=200), st.integers(0, 2**16 - 1), st.data())
def test_forged_fields_with_a_correct_digest_are_refused(payload, encoding, data):
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
        ({"total": 2**48 + 1}, "a block of"),
        ({"start": 1}, "exceeds its tensor"),
        ({"changed": 2001}, "2001 changed elements"),
        ({"changed": 0}, "0 changed elements"),
        ({"encoding": 99}, "unknown block encoding"),
        ({"changed": 41}, "classes of 40 changed elements"),
        ({"encoding": Encoding.RAW}, "raw patterns of form 3"),
        ({"encoding": Encoding.CONSTANT}, "a constant of form 3"),
    ],
)
def test_false_counts_are_refused(fields, message):
    payload = portable(frame(bytes(80)))
    with pytest.raises(DeltaError, match="would become"):
        read_block(forged(payload))
    with pytest.raises(DeltaError, match=message):
        read_block(forged(payload, **fields))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "a field of 1 bytes"),
        (portable(frame(bytes(80)), coder=9), "unknown coder 9"),
        (portable(frame(bytes(81))), "declares 81 bytes"),
        (portable(b"nothing"), "not a zstandard frame"),
        (portable(frame(b"\xfe" * 40 + bytes(40))), "beyond the last element of their class"),
        (portable(frame(b"\xff" + bytes(79))) + frame(struct.pack("<I", 2000)), "exceeds its block"),
        (portable(frame(b"\xff" + bytes(79))) + frame(struct.pack("<I", 2**32 - 1)), "32-bit values"),
        (portable(frame(bytes(79) + b"\xff")) + frame(struct.pack("<I", 2**16)), "a step of 65791"),
        (portable(frame(bytes(80))) + b"x", "bytes follow"),
        (b"\3\3", "unknown form 3 of active segments"),
        (b"\3\1\0" + portable(frame(bytes(80)))[2:], "beyond the last element of their class"),
        (b"\3\0\x20", "33 classes"),
        (b"\3\0\2\5\5", "do not divide 256 exponents"),
        (b"\3\0\2\5\4", "do not divide 256 exponents"),
        (b"\3\0\1\0", "do not divide 256 exponents"),
        (b"\3\0\0\xa8\0", "not in its shortest form"),
        (b"\3\0\0" + b"\xff" * 9, "an integer of more than 7 bytes"),
        (b"\1\0\0" + varint(40) + bytes([140]), "unknown gap models"),
        (b"\1\0\0" + varint(40) + bytes([0, 0]), "no table of steps"),
        (b"\1\0\0" + varint(40) + bytes([0, 1, 0]), "ends in level 0"),
        (b"\1\0\0" + varint(40) + bytes([0, 0xFD, 3]) + b"\xff" * 100, "ends in level"),
        (b"\1\0\0" + varint(40) + bytes([0, 1, 0x82]) + b"\xff" * 80, "padding after the last bit"),
        (b"\2\0\0" + varint(40) + varint(4) + b"nope", "not a pcodec stream"),
    ],
)
def test_false_payloads_are_refused(payload, message):
    with pytest.raises(DeltaError, match=message):
        read_block(forged(payload))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\0" + bytes(3), "a field of 4 bytes"),
        (b"\2" + bytes(4), "a constant of form 2"),
        (b"\0" + struct.pack("<I", 1 << 16), "value 65536"),
        (b"\0" + bytes(5), "a constant of form 0"),
        (b"\0" + bytes(4), "changes 1999 elements"),
        (b"\1" + bytes(4), "changes 2000 elements"),
    ],
)
def test_false_constants_are_refused(payload, message):
    with pytest.raises(DeltaError, match=message):
        read_block(forged(payload, encoding=Encoding.CONSTANT))


def patched(at, removed, inserted):
    """Return `one_block` with bytes of its fields replaced, and with correct lengths and digest."""
    block = one_block()
    size = header_size(block[:PREFIX_SIZE]) - 16
    fields = bytearray(block[PREFIX_SIZE:size])
    fields[at : at + removed] = inserted
    unsealed = MAGIC + bytes([len(fields)]) + bytes(fields)
    body = block[size + 16 :]
    return unsealed + xxhash.xxh3_128_digest(unsealed + body) + body


@pytest.mark.parametrize(
    ("at", "removed", "inserted", "message"),
    [
        (1, 1, b"\x63", "unknown element type"),
        (2, 1, b"\2", "digest code 2"),
        (3, 1, b"\0", "tensor name"),
        (3, 1, varint(65535), "tensor name"),
        (3, 1, b"\x81\0", "not in its shortest form"),
        (10, 1, varint(2**32), "a payload of"),
        (0, 0, b"x", "."),
        (40, 0, b"x", "extra bytes"),
        (3, 8, b"", "a field of 16 bytes"),
    ],
)
def test_false_header_fields_are_refused(at, removed, inserted, message):
    assert patched(0, 0, b"") == one_block()
    with pytest.raises(DeltaError, match=message):
        list(decode_blocks(patched(at, removed, inserted)))


def test_blocks_of_another_format_are_refused():
    with pytest.raises(DeltaError, match="not a block of this format"):
        list(decode_blocks(b"TMb\x01" + one_block()[4:]))


@pytest.mark.parametrize("digest", ["xxh3", "blake3"])
def test_a_digest_covers_every_byte(digest):
    block = b"".join(encode_tensor(*TENSORS[0], settings=CodecSettings(digest=digest)))
    assert read_block(block).indices.size == 40
    for at in range(len(block)):
        damaged = bytearray(block)
        damaged[at] ^= 1
        with pytest.raises(DeltaError):
            list(decode_blocks(bytes(damaged)))


def test_a_name_that_is_not_utf8_is_refused():
    block = one_block()
    header = read_header(memoryview(block))
    with pytest.raises(DeltaError, match="not UTF-8"):
        list(decode_blocks(write_block(header, b"\xff", block[-header.payload_length :])))


BOMBS = ("declared", "undeclared", "two frames", "vast", "says 80, holds 64 MiB")


@cache
def bombs():
    """Return payloads that would decompress to far more than their block may contain."""
    honest = frame(bytes(64 << 20))
    streaming = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(2000)))
    made = (
        honest,
        streaming,
        frame(bytes(80)) + honest,
        b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", 2**62) + bytes(lying[10:]),
        b"\x28\xb5\x2f\xfd\x20" + struct.pack("<B", 80) + honest[9:],
    )
    return dict(zip(BOMBS, made, strict=True))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_bounded_by_the_block(name):
    block = forged(portable(bombs()[name]))
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError):
            read_block(block)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_another_version_or_parent_is_refused():
    with pytest.raises(DeltaError, match="from version 5 to 6, not from 5 to 7"):
        read(shared(), version=7)
    with pytest.raises(DeltaError, match="not from 4 to 6"):
        read(shared(), parent=4)


def test_missing_repeated_and_moved_blocks_are_refused():
    head, tail = apart()[:EDGE_SIZE], apart()[-EDGE_SIZE:]
    first, second = (b"".join(encode_tensor(*tensor)) for tensor in TENSORS)
    assert head + first + second + tail == apart()
    for blocks in ([], [first], [second, first], [first, first, second], [first, second, second]):
        with pytest.raises(DeltaError, match="missing, repeated or moved"):
            read(b"".join([head, *blocks, tail]))


def test_bytes_after_the_end_are_refused():
    with pytest.raises(DeltaError, match="follow"):
        read(shared() + b"\0")


def test_shuffled_chunks_are_refused():
    stream = shared()
    pieces = [stream[at : at + 100] for at in range(0, len(stream), 100)]
    shuffled = pieces[:]
    random.Random(0).shuffle(shuffled)
    with pytest.raises(DeltaError):
        list(decode_delta(shuffled, 6, 5))
