"""Which elements a block covers: a run of one tensor, or several small tensors whole, one after the other.

What a block says besides its changes (fingerprints, digest, names, the tables of its coder) costs some 200 bytes, which
is much beside the changes of a small tensor; so small tensors share a block. Their directory, in its order:

    size       varint, of what follows once it is unpacked
    packed     u1 0: as it is; 1: a frame
    entries    for each tensor: length of its name, a varint; the name, UTF-8; its elements, a varint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.kernels.elements import DeltaError
from tidemill.kernels.wire import WireReader, compress, decompress, varint

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


def check_name(name: str) -> None:
    """Raises DeltaError for a tensor's name that no block can carry."""
    if not 0 < len(name.encode()) <= NAME_LIMIT:
        raise DeltaError(f"a tensor's name has 1 to {NAME_LIMIT} bytes: {name[:80]!r}")


def read_name(data: memoryview) -> str:
    """A tensor's name from its bytes. Raises DeltaError."""
    if not 0 < len(data) <= NAME_LIMIT:
        raise DeltaError(f"a tensor name of {len(data)} bytes")
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise DeltaError(f"a tensor name is not UTF-8: {bytes(data)[:80]!r}") from error


def write_directory(parts: Sequence[BlockPart]) -> bytes:
    """The directory of several whole tensors."""
    entries = b"".join(
        varint(len(part.name.encode())) + part.name.encode() + varint(part.tensor_elements) for part in parts
    )
    frame = compress(entries)
    packed = b"\1" + frame if len(frame) < len(entries) else b"\0" + entries
    return varint(len(entries)) + packed


def directory_entry_limit(part: BlockPart) -> int:
    """Upper bound of the bytes that a tensor adds to a directory's entries."""
    return len(part.name.encode()) + 16


def read_directory(data: memoryview, elements: int) -> tuple[BlockPart, ...]:
    """The tensors of a directory, at least two and each once, of `elements` elements together. Raises DeltaError."""
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
