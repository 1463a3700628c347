"""Weight deltas: from old and new bit patterns to bytes, and from bytes back onto weights, or not at all.

The whole codec in four calls: `encode_delta`, `decode_delta`, `resolve`, `apply_change`. What they keep true:

- lossless: after the apply the target holds the new patterns, bit for bit, whatever they are;
- a block is applied to the very weights it was made from, or skipped where it is already in, or refused;
- bytes from outside raise DeltaError and nothing else, before the first write, in memory bounded by a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tidemill.kernels.backend import AnyArray, backend_for, flat_rows
from tidemill.kernels.block import NAME_LIMIT, BlockHeader, EncodedBlock, write_block
from tidemill.kernels.container import StreamWriter, decode_blocks, decode_delta
from tidemill.kernels.elements import DeltaError, ElementType, element_type
from tidemill.kernels.fingerprint import Bits, Fingerprint, Indices, TensorKey, fingerprint_change
from tidemill.kernels.payload import Changes, pack, unpack
from tidemill.kernels.settings import BLOCK_ELEMENTS, CodecSettings

__all__ = [
    "BLOCK_ELEMENTS",
    "BlockChange",
    "CodecSettings",
    "DeltaError",
    "EncodedBlock",
    "FingerprintMismatch",
    "StreamWriter",
    "TensorChange",
    "apply_change",
    "decode_blocks",
    "decode_delta",
    "encode_delta",
    "encode_tensor",
    "resolve",
]

DEFAULTS = CodecSettings()


class FingerprintMismatch(DeltaError):
    """A block meets weights that are neither the ones it was made from nor the ones it makes."""


class TensorChange(NamedTuple):
    """One tensor before and after a step, as bit patterns of equal shape, in checkpoint coordinates."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`), for instance "bfloat16"."""
    old_bits: AnyArray
    new_bits: AnyArray


@dataclass(frozen=True, slots=True, eq=False)
class BlockChange:
    """What one block writes, checked against the weights that it changes."""

    name: str
    dtype: str
    start: int
    n: int
    """The block covers elements [start, start + n) of the tensor."""
    indices: Indices
    """i8[changed], flat indices in the tensor, each once, in no particular order."""
    old_bits: Bits
    """uN[changed], the patterns that are overwritten."""
    new_bits: Bits
    """uN[changed], the new patterns, absolute."""
    base: Fingerprint
    """Fingerprint of the block's elements before the change."""
    target: Fingerprint
    """Fingerprint of the block's elements after it."""


def encode_tensor(
    name: str,
    dtype: str,
    old_bits: AnyArray,
    new_bits: AnyArray,
    *,
    start: int = 0,
    total: int | None = None,
    settings: CodecSettings = DEFAULTS,
) -> Iterator[bytes]:
    """Encode the difference of two tensors as blocks, in ascending order; unchanged blocks are left out.

    With `start` and `total` the arrays (uN, of equal shape) are the part of a tensor of `total` elements that begins at
    flat element `start`: one rank's shard. Blocks are cut at multiples of the block size counted from the tensor's
    first element, whatever the part. PyTorch tensors on a GPU are compared and split there, as `kernels.backend` says.

    Raises DeltaError when the tensors do not have the element type's width or one shape, or leave the tensor.
    """
    kind = element_type(dtype)
    if old_bits.shape != new_bits.shape:
        raise DeltaError(f"{name}: shape {old_bits.shape} became {new_bits.shape}; a delta keeps shapes, use an anchor")
    if not 0 < len(name.encode()) <= NAME_LIMIT:
        raise DeltaError(f"a tensor's name has 1 to {NAME_LIMIT} bytes: {name[:80]!r}")
    old, new = flat_rows(old_bits, kind), flat_rows(new_bits, kind)
    total = start + len(old) if total is None else total
    if start < 0 or start + len(old) > total:
        raise DeltaError(f"{name}: {len(old)} elements at {start} leave their tensor of {total}")
    for first, last in _cuts(start, len(old), settings.block_elements):
        span = slice(first - start, last - start)
        block = _encode_block(name, kind, total, first, old[span], new[span], settings)
        if block is not None:
            yield block


def encode_delta(
    version: int, parent: int, tensors: Iterable[TensorChange], settings: CodecSettings = DEFAULTS
) -> Iterator[bytes]:
    """Encode the step from `parent` to `version` as a stream of bytes, one block at a time.

    Raises DeltaError like `encode_tensor`.
    """
    writer = StreamWriter(version, parent)
    yield writer.header()
    for tensor in tensors:
        yield from map(writer.block, encode_tensor(*tensor, settings=settings))
    yield writer.trailer()


def resolve(block: EncodedBlock, bits: AnyArray, offset: int | None = None) -> BlockChange | None:
    """What a block changes in the weights `bits` (uN, any shape), or None where its target is there already.

    `bits` is the whole tensor, or, with `offset`, the local part of it that begins at flat element `offset` and holds
    the block. Nothing is written.

    Raises DeltaError when the tensor has another width or size or the payload is malformed, and FingerprintMismatch
    when the weights are neither the block's base nor its target, or when its new patterns would not make its target.
    """
    kind = element_type(block.dtype)
    local = _local(block, flat_rows(bits, kind), offset)
    kernels, key = backend_for(local), TensorKey.of(block.name)
    held = kernels.fingerprint(local, key, block.start)
    if held == block.target:
        return None
    if held != block.base:
        raise FingerprintMismatch(_mismatch(block, f"hold {held.hex()}, the delta was made from {block.base.hex()}"))
    changes = unpack(block.encoding, block.payload, kind, kernels.host(local), block.changed, block.start)
    made = held + fingerprint_change(key, *changes)
    if made != block.target:
        raise FingerprintMismatch(_mismatch(block, f"would become {made.hex()}, not {block.target.hex()}"))
    return BlockChange(
        block.name, block.dtype, block.start, block.n, *changes, block.base, block.target
    )  # fmt: skip


def apply_change(change: BlockChange, bits: AnyArray, offset: int = 0) -> None:
    """Write a change into `bits` (uN, contiguous), in place: the tensor, or its part that begins at `offset`.

    Raises DeltaError when `bits` is not contiguous or does not hold the change's range.
    """
    if isinstance(bits, np.ndarray) and not bits.flags.c_contiguous:
        raise DeltaError(f"{change.name}: a delta is written into contiguous memory only")
    flat = flat_rows(bits, element_type(change.dtype))
    if not offset <= change.start <= offset + len(flat) - change.n:
        raise DeltaError(f"{change.name}: {len(flat)} elements at {offset} do not hold {change.n} at {change.start}")
    kernels = backend_for(flat)
    kernels.scatter(flat, kernels.beside(change.indices - offset, flat), kernels.beside(change.new_bits, flat))


def _cuts(start: int, size: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) that cover [start, start + size), cut at multiples of `block_elements`."""
    first = start
    while first < start + size:
        last = min(start + size, (first // block_elements + 1) * block_elements)
        yield first, last
        first = last


def _local(block: EncodedBlock, flat: AnyArray, offset: int | None) -> AnyArray:
    """The block's elements within `flat`, which begins at `offset`, or is the whole tensor."""
    if offset is None and len(flat) != block.tensor_elements:
        raise DeltaError(f"{block.name}: {len(flat)} elements here, {block.tensor_elements} where the delta was made")
    first = block.start - (offset or 0)
    if first < 0 or first + block.n > len(flat):
        raise DeltaError(f"{block.name}: {len(flat)} elements at {offset} do not hold {block.n} at {block.start}")
    return flat[first : first + block.n]


def _mismatch(block: EncodedBlock, what: str) -> str:
    return f"{block.name}: elements {block.start} to {block.start + block.n} {what}; re-sync from an anchor"


def _encode_block(
    name: str, kind: ElementType, total: int, start: int, old: AnyArray, new: AnyArray, settings: CodecSettings
) -> bytes | None:
    kernels, key = backend_for(old), TensorKey.of(name)
    indices, old_at, new_at = kernels.compare_and_take(old, new)
    if not len(indices):
        return None
    base = kernels.fingerprint(old, key, start)
    target = base + kernels.fingerprint_change(key, indices + start, old_at, new_at)
    encoding, payload = pack(kind, old, new, Changes(indices, old_at, new_at), settings.coder)
    header = BlockHeader(
        encoding, kind, 0, total, start, len(old), len(indices), 0, base, target, settings.digest, b""
    )  # fmt: skip
    return write_block(header, name.encode(), payload)
