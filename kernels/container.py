"""A delta as a stream: which version it makes of which parent, its blocks, and an end that says nothing is missing.

    header    40 bytes   magic, format, version, parent, xxh3-128 of these
    blocks               `kernels.block`, any number
    trailer   40 bytes   magic, format, blocks, changed elements, xxh3-128 of these and of every block's digest in order

The stream may be cut anywhere into chunks for the log; a block may span chunks. A reader holds one block at a time.
A part that is cut off, missing, repeated, moved or altered raises DeltaError, at the latest at the trailer: nothing may
be made visible before the trailer has been read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import xxhash

from tidemill.kernels.block import (
    DIGEST_SIZE,
    PREFIX_SIZE,
    BlockHeader,
    EncodedBlock,
    header_size,
    read_body,
    read_header,
)
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.wire import DeltaError

STREAM_MAGIC = b"TMs\x01"
TRAILER_MAGIC = b"TMe\x01"
STREAM_FORMAT = 1
EDGE = struct.Struct("<4sIqq")
EDGE_SIZE = EDGE.size + DIGEST_SIZE


class StreamWriter:
    """A stream of encoded blocks, as it is written: `header()`, then `block(...)` for each block, then `trailer()`."""

    def __init__(self, version: int, parent: int) -> None:
        self._edge = EDGE.pack(STREAM_MAGIC, STREAM_FORMAT, version, parent)
        self._digests = xxhash.xxh3_128()
        self.blocks = 0
        self.changed = 0
        """Changed elements of the blocks so far."""
        self.change = ZERO
        """Fingerprint of the change that the blocks so far make."""

    def header(self) -> bytes:
        return self._edge + xxhash.xxh3_128_digest(self._edge)

    def block(self, data: bytes) -> bytes:
        """Count a block in and return its bytes unchanged."""
        header = read_header(memoryview(data))
        self._digests.update(header.digest)
        self.blocks += 1
        self.changed += header.changed
        self.change += header.target - header.base
        return data

    def trailer(self) -> bytes:
        return _trailer(self.blocks, self.changed, self._digests)


def decode_blocks(data: bytes | memoryview) -> Iterator[EncodedBlock]:
    """Read blocks that lie one after the other, without a container. Raises DeltaError."""
    source = _Source([data])
    while not source.at_end():
        yield _take_block(source)[1]


def decode_delta(pieces: Iterable[bytes | memoryview], version: int, parent: int) -> Iterator[EncodedBlock]:
    """Read a stream cut anywhere into `pieces`, which must lead from `parent` to `version`. Payloads are not touched.

    Raises DeltaError, possibly after some blocks were yielded: only when the iterator ends is the delta whole.
    """
    source = _Source(pieces)
    data = source.take(EDGE_SIZE, "its header")
    magic, stream_format, its_version, its_parent = EDGE.unpack(data[: EDGE.size])
    if magic != STREAM_MAGIC or stream_format != STREAM_FORMAT:
        raise DeltaError(f"not a delta of format {STREAM_FORMAT}: it begins with {bytes(data[:8]).hex()}")
    if xxhash.xxh3_128_digest(data[: EDGE.size]) != data[EDGE.size :]:
        raise DeltaError("digest mismatch in the delta's header: its bytes were changed on the way")
    if (its_version, its_parent) != (version, parent):
        raise DeltaError(f"the delta leads from {its_parent} to {its_version}, not from {parent} to {version}")
    digests, blocks, changed = xxhash.xxh3_128(), 0, 0
    while source.peek(len(TRAILER_MAGIC)) != TRAILER_MAGIC:
        header, block = _take_block(source)
        digests.update(header.digest)
        blocks, changed = blocks + 1, changed + header.changed
        yield block
    if source.take(EDGE_SIZE, "its trailer") != _trailer(blocks, changed, digests):
        raise DeltaError("the delta's trailer does not fit its blocks: blocks are missing, repeated or moved")
    if not source.at_end():
        raise DeltaError("bytes follow the delta's trailer")


def _trailer(blocks: int, changed: int, digests: xxhash.xxh3_128) -> bytes:
    edge = EDGE.pack(TRAILER_MAGIC, STREAM_FORMAT, blocks, changed)
    state = digests.copy()
    state.update(edge)
    return edge + state.digest()


def _take_block(source: _Source) -> tuple[BlockHeader, EncodedBlock]:
    fields = source.take(header_size(source.peek(PREFIX_SIZE)), "a block's header")
    header = read_header(fields)
    return header, read_body(header, fields, source.take(header.body_length, "a block"))


class _Source:
    """Bytes of a stream that arrives in pieces; holds what has not been taken of the current pieces."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = iter(pieces)
        self._left = memoryview(b"")

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end, left in place."""
        self._fill(size)
        return bytes(self._left[:size])

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes. Raises DeltaError when the stream ends before."""
        self._fill(size)
        if len(self._left) < size:
            raise DeltaError(f"the delta ends inside {what}: {len(self._left)} of {size} bytes")
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def at_end(self) -> bool:
        return not self.peek(1)

    def _fill(self, size: int) -> None:
        if len(self._left) >= size:
            return
        parts, have = [self._left], len(self._left)
        for piece in self._pieces:
            parts.append(memoryview(piece))
            have += len(piece)
            if have >= size:
                break
        self._left = memoryview(b"".join(parts))
