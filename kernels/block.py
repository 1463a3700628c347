"""One block: the independent unit of a delta. It changes at most 2**24 consecutive elements of one tensor.

A block says what it changes (tensor, element type, range), from what (base fingerprint) and into what (target
fingerprint), and carries a digest over all of its bytes. It can be checked and refused alone; what it writes can be
read only beside the weights that it changes. Layout, little-endian:

    header   88 bytes   magic, format, encoding, element type, name length, tensor elements, start, elements, changed,
                        payload length, base fingerprint, target fingerprint, xxh3-128 of everything but itself
    name     UTF-8      the tensor's name in the checkpoint
    payload             `kernels.payload`
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tidemill.kernels.elements import BY_CODE, DeltaError, ElementType
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.kernels.payload import payload_limit
from tidemill.kernels.settings import BLOCK_ELEMENTS

MAGIC = b"TMb\x01"
FORMAT = 1
NAME_LIMIT = 1024
TENSOR_LIMIT = 1 << 48
FIELDS = struct.Struct("<4sHBBHHQQIII16s16s")
DIGEST_SIZE = 16
HEADER_SIZE = FIELDS.size + DIGEST_SIZE


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block says of itself before its payload is read."""

    encoding: int
    kind: ElementType
    name_length: int
    tensor_elements: int
    start: int
    elements: int
    changed: int
    payload_length: int
    base: Fingerprint
    target: Fingerprint
    digest: bytes

    @property
    def body_length(self) -> int:
        """Bytes of name and payload that follow the header."""
        return self.name_length + self.payload_length


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBlock:
    """A block whose digest and bounds have been checked; whether it fits some weights is for `resolve`."""

    name: str
    dtype: str
    tensor_elements: int
    start: int
    n: int
    """The block covers elements [start, start + n) of the tensor."""
    changed: int
    """How many of them it changes."""
    base: Fingerprint
    """Fingerprint of the block's elements before the change."""
    target: Fingerprint
    """Fingerprint of the block's elements after it."""
    encoding: int
    payload: memoryview
    """What is written, for `kernels.payload` to read beside the old bits."""


def write_block(header: BlockHeader, name: bytes, payload: bytes) -> bytes:
    """The bytes of a block; the digest in `header` is computed, whatever it says."""
    fields = FIELDS.pack(
        MAGIC, FORMAT, header.encoding, header.kind.code, len(name), 0, header.tensor_elements, header.start,
        header.elements, header.changed, len(payload), header.base.to_bytes(), header.target.to_bytes(),
    )  # fmt: skip
    return b"".join((fields, _digest(fields, name, payload), name, payload))


def read_header(data: memoryview) -> BlockHeader:
    """Read and bounds-check the first `HEADER_SIZE` bytes of a block. Raises DeltaError."""
    if len(data) < HEADER_SIZE:
        raise DeltaError(f"the delta ends inside a block's header: {len(data)} of {HEADER_SIZE} bytes")
    magic, version, encoding, code, name_length, reserved, total, start, elements, changed, length, base, target = (
        FIELDS.unpack(data[: FIELDS.size])
    )
    if magic != MAGIC or version != FORMAT or reserved:
        raise DeltaError(f"not a block of format {FORMAT}: it begins with {bytes(data[:8]).hex()}")
    if code not in BY_CODE:
        raise DeltaError(f"unknown element type code {code} in a block")
    digest = bytes(data[FIELDS.size : HEADER_SIZE])
    fingerprints = Fingerprint.from_bytes(base), Fingerprint.from_bytes(target)
    header = BlockHeader(
        encoding, BY_CODE[code], name_length, total, start, elements, changed, length, *fingerprints, digest
    )
    _check_bounds(header)
    return header


def read_body(header: BlockHeader, fields: memoryview, body: memoryview) -> EncodedBlock:
    """Check a block from its header, the header's bytes, and `header.body_length` bytes of body.

    Raises DeltaError.
    """
    name, payload = body[: header.name_length], body[header.name_length :]
    if len(body) != header.body_length:
        raise DeltaError(f"the delta ends inside a block: {len(body)} of {header.body_length} bytes")
    if _digest(fields[: FIELDS.size], name, payload) != header.digest:
        raise DeltaError(f"digest mismatch in a block of {bytes(name)[:80]!r}: its bytes were changed on the way")
    return EncodedBlock(
        _tensor_name(name), header.kind.name, header.tensor_elements, header.start, header.elements, header.changed,
        header.base, header.target, header.encoding, payload,
    )  # fmt: skip


def _check_bounds(header: BlockHeader) -> None:
    if not 0 < header.elements <= BLOCK_ELEMENTS or header.tensor_elements > TENSOR_LIMIT:
        raise DeltaError(f"a block of {header.elements} elements in a tensor of {header.tensor_elements}")
    if header.start + header.elements > header.tensor_elements:
        raise DeltaError(f"a block at {header.start} + {header.elements} leaves its tensor of {header.tensor_elements}")
    if not 0 < header.changed <= header.elements:
        raise DeltaError(f"{header.changed} changed elements in a block of {header.elements}")
    if not 0 < header.name_length <= NAME_LIMIT:
        raise DeltaError(f"a tensor name of {header.name_length} bytes")
    if header.payload_length > payload_limit(header.elements, header.kind):
        raise DeltaError(f"a payload of {header.payload_length} bytes for {header.elements} elements")


def _tensor_name(name: memoryview) -> str:
    try:
        return bytes(name).decode()
    except UnicodeDecodeError as error:
        raise DeltaError(f"a tensor name is not UTF-8: {bytes(name)[:80]!r}") from error


def _digest(fields: bytes | memoryview, name: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(name)
    state.update(payload)
    return state.digest()
