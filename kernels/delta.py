"""Weight deltas: the stream that contains the blocks, and how blocks are checked and applied to weights.

Together with the encoder of blocks (`kernels.encoder`) this is the whole codec. Invariants:

- lossless: after a block is applied, the target holds the new patterns, bit for bit, for any patterns;
- a block is applied only to the weights it was made from, is skipped if they already have its changes, or is refused;
- invalid bytes raise only DeltaError, before the first write, in memory bounded by a block.

A delta as a stream: its version and parent version, its blocks, and a trailer that proves that nothing is missing.

    header    40 bytes   magic, format, version, parent, xxh3-128 of these
    blocks               any number (`kernels.block`)
    trailer   40 bytes   magic, format, blocks, changed elements, xxh3-128 of these and of every block's digest in order

The stream may be cut anywhere into chunks for the log; a block may span chunks. A reader holds one block at a time.
Bytes that are cut off, missing, repeated, moved or altered raise DeltaError, at the latest at the trailer: no change
may become visible before the trailer has been read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from tidemill.kernels.block import (
    DIGEST_SIZE,
    PREFIX_SIZE,
    EncodedBlock,
    header_size,
    read_body,
    read_header,
)
from tidemill.kernels.compiled import Bits, Indices, compiled
from tidemill.kernels.elements import element_type, flat_bits
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey, fingerprint, fingerprint_change
from tidemill.kernels.payload import ElementChanges, unpack
from tidemill.kernels.wire import DeltaError

STREAM_MAGIC = b"TMs\x01"
TRAILER_MAGIC = b"TMe\x01"
STREAM_FORMAT = 1
EDGE = struct.Struct("<4sIqq")
EDGE_SIZE = EDGE.size + DIGEST_SIZE


class StreamWriter:
    """Writer of a stream of encoded blocks: call `header()`, then `block(...)` for each block, then `trailer()`."""

    def __init__(self, version: int, parent: int) -> None:
        self._edge = EDGE.pack(STREAM_MAGIC, STREAM_FORMAT, version, parent)
        self._digests = xxhash.xxh3_128()
        self.blocks = 0
        self.changed = 0
        """Number of changed elements of the blocks so far."""
        self.change = ZERO
        """Fingerprint of the change by the blocks so far."""

    def header(self) -> bytes:
        return self._edge + xxhash.xxh3_128_digest(self._edge)

    def block(self, data: bytes) -> bytes:
        """Add a block to the counts and the digest, and return its bytes unchanged."""
        header = read_header(memoryview(data))
        self._digests.update(header.digest)
        self.blocks += 1
        self.changed += header.changed
        self.change += header.target - header.base
        return data

    def trailer(self) -> bytes:
        return _trailer(self.blocks, self.changed, self._digests)


def decode_blocks(data: bytes | memoryview) -> Iterator[EncodedBlock]:
    """Read blocks that follow one after the other, without a stream's header and trailer. Raises DeltaError."""
    source = _Source([data])
    while not source.at_end():
        yield _take_block(source)


def decode_delta(pieces: Iterable[bytes | memoryview], version: int, parent: int) -> Iterator[EncodedBlock]:
    """Read a stream cut anywhere into `pieces`, which must lead from `parent` to `version`. Payloads are not decoded.

    Raises DeltaError, possibly after some blocks were yielded: the delta is complete only when the iterator ends.
    """
    source = _Source(pieces)
    data = source.take(EDGE_SIZE, "its header")
    magic, stream_format, its_version, its_parent = EDGE.unpack(data[: EDGE.size])
    if magic != STREAM_MAGIC or stream_format != STREAM_FORMAT:
        raise DeltaError(f"not a delta of format {STREAM_FORMAT}: it begins with {bytes(data[:8]).hex()}")
    if xxhash.xxh3_128_digest(data[: EDGE.size]) != data[EDGE.size :]:
        raise DeltaError("digest mismatch in the delta's header: its bytes were changed")
    if (its_version, its_parent) != (version, parent):
        raise DeltaError(f"the delta is from version {its_parent} to {its_version}, not from {parent} to {version}")
    digests, blocks, changed = xxhash.xxh3_128(), 0, 0
    while source.peek(len(TRAILER_MAGIC)) != TRAILER_MAGIC:
        block = _take_block(source)
        digests.update(block.header.digest)
        blocks, changed = blocks + 1, changed + block.header.changed
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


def _take_block(source: _Source) -> EncodedBlock:
    fields = source.take(header_size(source.peek(PREFIX_SIZE)), "a block's header")
    header = read_header(fields)
    return read_body(header, fields, source.take(header.body_length, "a block"))


class _Source:
    """Bytes of a stream that arrives in pieces; holds the bytes of the current pieces that were not taken yet."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = iter(pieces)
        self._left = memoryview(b"")

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end, without taking them."""
        self._fill(size)
        return bytes(self._left[:size])

    def take(self, size: int, what: str) -> memoryview:
        """Take the next `size` bytes. Raises DeltaError if the stream ends before."""
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


@dataclass(frozen=True, slots=True, eq=False)
class BlockChange:
    """The changes of one block to one tensor, checked against the weights that it changes."""

    name: str
    dtype: str
    start: int
    n: int
    """The block covers elements [start, start + n) of the tensor."""
    indices: Indices
    """i8[changed], flat indices in the tensor, each once, in no particular order."""
    old_bits: Bits
    """uN[changed], the patterns before the change."""
    new_bits: Bits
    """uN[changed], the new patterns, absolute."""
    base: Fingerprint
    """Fingerprint of the block's elements before the change."""
    target: Fingerprint
    """Fingerprint of the block's elements after it."""


def resolve_all(block: EncodedBlock, tensors: Mapping[str, Bits]) -> tuple[BlockChange, ...]:
    """Return the changes of a block in whole `tensors` (uN, any shape, by name); empty if they already have them.

    Nothing is written. Raises DeltaError if a tensor is missing or has another width or size, or the payload is
    malformed, and DeltaError if the weights have neither the base nor the target fingerprint, or if the new
    patterns would not give the target fingerprint.
    """
    header, kind, rows = block.header, block.header.kind, list[Bits]()
    for part in block.parts:
        if part.name not in tensors:
            raise DeltaError(f"the delta changes {part.name}, which these weights do not have")
        flat = flat_bits(tensors[part.name], kind)
        if len(flat) != part.tensor_elements:
            raise DeltaError(
                f"{part.name}: {len(flat)} elements here, {part.tensor_elements} where the delta was encoded"
            )
        rows.append(flat[part.start : part.start + part.n])
    keys = [TensorKey.of(part.name) for part in block.parts]
    held = [fingerprint(row, key, part.start) for part, key, row in zip(block.parts, keys, rows, strict=True)]
    before = sum(held, start=ZERO)
    if before == header.target:
        return ()
    if before != header.base:
        raise DeltaError(_mismatch(block, f"hold {before.hex()}, the delta was made from {header.base.hex()}"))
    first, old = (block.parts[0].start, rows[0]) if len(rows) == 1 else (0, np.concatenate(rows))
    changes = [unpack(header.encoding, block.payload, kind, old, header.changed, first)]
    if len(rows) > 1:
        begins, cuts = np.cumsum([0, *(part.n for part in block.parts)]), np.zeros(len(rows) + 1, np.int64)
        ordered = ElementChanges(*map(np.empty_like, changes[0]))
        _split(*changes[0], begins, *ordered, cuts)
        changes = [ElementChanges(*(side[a:b] for side in ordered)) for a, b in pairwise(cuts.tolist())]
    made = [fingerprint_change(key, *change) for key, change in zip(keys, changes, strict=True)]
    after = sum(made, start=before)
    if after != header.target:
        raise DeltaError(_mismatch(block, f"would become {after.hex()}, not {header.target.hex()}"))
    return tuple(
        BlockChange(part.name, kind.name, part.start, part.n, *change, base, base + added)
        for part, change, base, added in zip(block.parts, changes, held, made, strict=True)
        if change.indices.size
    )


def apply_change(change: BlockChange, bits: Bits, offset: int = 0) -> None:
    """Write a change into `bits` (uN, contiguous), in place: the tensor, or its part that begins at `offset`.

    Raises DeltaError if `bits` is not contiguous or does not contain the change's range.
    """
    if not bits.flags.c_contiguous:
        raise DeltaError(f"{change.name}: a delta is written into contiguous memory only")
    flat = flat_bits(bits, element_type(change.dtype))
    if not offset <= change.start <= offset + len(flat) - change.n:
        raise DeltaError(f"{change.name}: {len(flat)} elements at {offset} do not hold {change.n} at {change.start}")
    flat[change.indices - offset if offset else change.indices] = change.new_bits


@compiled
def _split(
    indices: Indices,
    old: Bits,
    new: Bits,
    begins: Indices,
    own_indices: Indices,
    own_old: Bits,
    own_new: Bits,
    cuts: Indices,
) -> None:
    """Order changes by tensor, with indices within their tensor: those of tensor i are in [cuts[i], cuts[i + 1]).

    The tensors follow one after the other: tensor i is [begins[i], begins[i + 1]) (`begins` i8[tensors + 1]).
    """
    owner = np.empty(indices.size, np.int64)
    which = 0
    for i in range(indices.size):
        while indices[i] >= begins[which + 1]:
            which += 1
        while indices[i] < begins[which]:
            which -= 1
        owner[i] = which
        cuts[which + 1] += 1
    for tensor in range(begins.size - 1):
        cuts[tensor + 1] += cuts[tensor]
    place = cuts[:-1].copy()
    for i in range(indices.size):
        at = place[owner[i]]
        own_indices[at] = indices[i] - begins[owner[i]]
        own_old[at] = old[i]
        own_new[at] = new[i]
        place[owner[i]] += 1


def _mismatch(block: EncodedBlock, what: str) -> str:
    part = block.parts[0]
    where = f"{part.name}: elements {part.start} to {part.start + part.n}"
    if len(block.parts) > 1:
        where += f", and {len(block.parts) - 1} tensors more,"
    return f"{where} {what}; re-sync from an anchor"
