"""One block: the independent unit of a delta. It changes at most 2**24 elements: a run of one tensor, or small tensors.

A block contains what it changes (tensor, element type, range), the base fingerprint (before), the target fingerprint
(after) and a digest over all of its bytes. It can be checked and refused alone; its changes can be decoded only
together with the weights that it changes. Layout, little-endian, variable-length integers (`kernels.wire`):

    prefix    5 bytes   magic, which names the format: one tensor, or several; the number of bytes of fields
    fields              encoding, element type, digest, a byte each; name length, tensor elements, start, elements,
                        changed, payload length; base fingerprint, target fingerprint, 16 bytes each. For several
                        tensors: the elements of all, start 0, and the sums of their fingerprints
    digest   16 bytes   of all other bytes: xxh3-128, or the first half of blake3
    name                the tensor's name in the checkpoint, UTF-8; for several tensors, their directory
    payload             `kernels.payload`

A block has about 200 bytes in addition to its changes (fingerprints, digest, names, coder tables), which is much
compared with the changes of a small tensor; so whole small tensors share a block, one after the other. Their directory:

    size       varint, size of the unpacked entries
    packed     u1 0: plain; 1: a frame
    entries    for each tensor: length of its name, a varint; the name, UTF-8; its elements, a varint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import blake3
import xxhash

from tidemill.kernels.elements import BY_CODE, ElementType
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.kernels.wire import DeltaError, WireReader, compress, decompress, varint

CoderChoice = Literal["auto", "rans", "pcodec", "zstd"]
DigestChoice = Literal["xxh3", "blake3"]

BLOCK_ELEMENTS = 1 << 24
"""Elements of the largest block; memory on both sides is bounded by it."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """Settings for block size, coder and digest. A block records how it was made: no setting is needed to decode it.

    Raises DeltaError for a block size that no decoder accepts.
    """

    block_elements: int = BLOCK_ELEMENTS
    """Largest number of elements of a block, 1 to `BLOCK_ELEMENTS`."""
    coder: CoderChoice = "auto"
    """Entropy coder of sparse blocks; "auto" chooses the smallest."""
    digest: DigestChoice = "xxh3"
    """Digest over a block's bytes: xxh3-128 detects damage; blake3 also withstands attacks."""

    def __post_init__(self) -> None:
        if not 0 < self.block_elements <= BLOCK_ELEMENTS:
            raise DeltaError(f"blocks have 1 to {BLOCK_ELEMENTS} elements, not {self.block_elements}")


NAME_LIMIT = 1024
"""Longest name, in bytes."""
DIRECTORY_LIMIT = 1 << 20
"""Longest directory, in bytes."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Elements [start, start + n) of a tensor."""

    name: str
    tensor_elements: int
    start: int
    n: int


def read_name(data: memoryview) -> str:
    """Read a tensor's name from its bytes. Raises DeltaError."""
    if not 0 < len(data) <= NAME_LIMIT:
        raise DeltaError(f"a tensor name of {len(data)} bytes")
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise DeltaError(f"a tensor name is not UTF-8: {bytes(data)[:80]!r}") from error


def write_directory(parts: Sequence[BlockPart]) -> bytes:
    """Return the directory of several whole tensors as bytes."""
    entries = b"".join(
        varint(len(part.name.encode())) + part.name.encode() + varint(part.tensor_elements) for part in parts
    )
    frame = compress(entries)
    packed = b"\1" + frame if len(frame) < len(entries) else b"\0" + entries
    return varint(len(entries)) + packed


def directory_entry_limit(part: BlockPart) -> int:
    """Return an upper bound of the bytes that a tensor adds to a directory's entries."""
    return len(part.name.encode()) + 16


def read_directory(data: memoryview, elements: int) -> tuple[BlockPart, ...]:
    """Read a directory of at least two different tensors with `elements` elements in total. Raises DeltaError."""
    source = WireReader(data)
    size, form = source.varint(), source.byte()
    if size > DIRECTORY_LIMIT or form > 1:
        raise DeltaError(f"a directory of {size} bytes in form {form}")
    entries = decompress(source.rest(), size) if form else source.rest()
    if len(entries) != size:
        raise DeltaError(f"a directory of {len(entries)} bytes where it says {size}")
    parts: dict[str, BlockPart] = {}
    inner = WireReader(entries)
    left = elements
    while left > 0:
        name, n = read_name(inner.take(inner.varint())), inner.varint()
        if name in parts or n == 0:
            raise DeltaError(f"a directory names {name[:80]!r} twice, or without elements")
        parts[name] = BlockPart(name, n, 0, n)
        left -= n
    if left or len(inner.rest()) or len(parts) < 2:
        raise DeltaError(f"a directory of {len(parts)} tensors does not fit a block of {elements} elements")
    return tuple(parts.values())


MAGIC, SEVERAL_MAGIC = b"TMb\x02", b"TMb\x03"
TENSOR_LIMIT = 1 << 48
PREFIX_SIZE = len(MAGIC) + 1
DIGEST_SIZE = 16
DIGESTS: tuple[DigestChoice, ...] = ("xxh3", "blake3")
"""By their code."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The header of a block, read before its payload."""

    several: bool
    """Whether the block covers several tensors."""
    encoding: int
    kind: ElementType
    name_length: int
    tensor_elements: int
    start: int
    elements: int
    """Number of elements that the block covers."""
    changed: int
    """Number of elements that it changes."""
    payload_length: int
    base: Fingerprint
    """Fingerprint of the block's elements before the change."""
    target: Fingerprint
    """Fingerprint of the block's elements after it."""
    digest_kind: DigestChoice
    digest: bytes

    @property
    def body_length(self) -> int:
        """Bytes of name and payload that follow the header."""
        return self.name_length + self.payload_length


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBlock:
    """A block whose digest and bounds have been checked; `resolve_all` checks whether it fits given weights."""

    header: BlockHeader
    parts: tuple[BlockPart, ...]
    """The parts that the block covers."""
    payload: memoryview
    """The encoded changes; `kernels.payload` decodes them together with the old bits."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that it covers."""
        return tuple(part.name for part in self.parts)


def write_block(header: BlockHeader, name: bytes, payload: bytes) -> bytes:
    """Return the bytes of a block; the digest and the lengths in `header` are ignored and computed here.

    `name` is the tensor's name, or the directory of several tensors.
    """
    numbers = len(name), header.tensor_elements, header.start, header.elements, header.changed, len(payload)
    fields = b"".join(
        (
            bytes((header.encoding, header.kind.code, DIGESTS.index(header.digest_kind))),
            *map(varint, numbers),
            header.base.to_bytes(),
            header.target.to_bytes(),
        )
    )
    fields = (SEVERAL_MAGIC if header.several else MAGIC) + bytes([len(fields)]) + fields
    return b"".join((fields, _digest(header.digest_kind, fields, name, payload), name, payload))


def header_size(prefix: bytes | memoryview) -> int:
    """Return the length of the header that begins with `prefix`. Raises DeltaError if this is not a block's prefix."""
    if len(prefix) < PREFIX_SIZE:
        raise DeltaError(f"the delta ends inside a block's header: {len(prefix)} of {PREFIX_SIZE} bytes")
    if prefix[: len(MAGIC)] not in (MAGIC, SEVERAL_MAGIC):
        raise DeltaError(f"not a block of this format: it begins with {bytes(prefix[:PREFIX_SIZE]).hex()}")
    return PREFIX_SIZE + prefix[len(MAGIC)] + DIGEST_SIZE


def read_header(data: memoryview) -> BlockHeader:
    """Read and bounds-check the header at the beginning of `data`. Raises DeltaError."""
    size = header_size(data[:PREFIX_SIZE])
    if len(data) < size:
        raise DeltaError(f"the delta ends inside a block's header: {len(data)} of {size} bytes")
    source = WireReader(data[PREFIX_SIZE : size - DIGEST_SIZE])
    encoding, code, digest_code = source.byte(), source.byte(), source.byte()
    if code not in BY_CODE or digest_code >= len(DIGESTS):
        raise DeltaError(f"unknown element type code {code} or digest code {digest_code} in a block")
    name_length, total, start, elements, changed, length = (source.varint() for _ in range(6))
    base, target = (Fingerprint.from_bytes(bytes(source.take(16))) for _ in range(2))
    if len(source.rest()):
        raise DeltaError("a block's header has extra bytes")
    header = BlockHeader(
        data[: len(MAGIC)] == SEVERAL_MAGIC, encoding, BY_CODE[code], name_length, total, start, elements, changed,
        length, base, target, DIGESTS[digest_code], bytes(data[size - DIGEST_SIZE : size]),
    )  # fmt: skip
    if not 0 < elements <= BLOCK_ELEMENTS or total > TENSOR_LIMIT:
        raise DeltaError(f"a block of {elements} elements in a tensor of {total}")
    if start + elements > total:
        raise DeltaError(f"a block at {start} + {elements} exceeds its tensor of {total}")
    if not 0 < changed <= elements:
        raise DeltaError(f"{changed} changed elements in a block of {elements}")
    if header.several and elements != total:
        raise DeltaError(f"a block of several tensors has {elements} of their {total} elements")
    if not 0 < name_length <= (DIRECTORY_LIMIT if header.several else NAME_LIMIT):
        raise DeltaError(f"a tensor name or directory of {name_length} bytes")
    unpacked = elements * header.kind.bits.itemsize
    # No encoding of a block is longer.
    if length > unpacked + unpacked // 128 + 512:
        raise DeltaError(f"a payload of {length} bytes for {elements} elements")
    return header


def read_body(header: BlockHeader, fields: memoryview, body: memoryview) -> EncodedBlock:
    """Check a block from its header, the header's bytes, and `header.body_length` bytes of body.

    Raises DeltaError.
    """
    name, payload = body[: header.name_length], body[header.name_length :]
    if len(body) != header.body_length:
        raise DeltaError(f"the delta ends inside a block: {len(body)} of {header.body_length} bytes")
    if _digest(header.digest_kind, fields[:-DIGEST_SIZE], name, payload) != header.digest:
        raise DeltaError(f"digest mismatch in a block of {bytes(name)[:80]!r}: its bytes were changed")
    if header.several:
        parts = read_directory(name, header.elements)
    else:
        parts = (BlockPart(read_name(name), header.tensor_elements, header.start, header.elements),)
    return EncodedBlock(header, parts, payload)


def _digest(kind: DigestChoice, *parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128() if kind == "xxh3" else blake3.blake3()
    for part in parts:
        state.update(part)
    return bytes(state.digest()[:DIGEST_SIZE])
