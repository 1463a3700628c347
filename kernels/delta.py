"""Weight deltas: from old and new bit patterns to bytes, and from bytes back onto weights, or not at all.

The whole codec in four calls: `encode_delta`, `decode_delta`, `guard`, `apply_block`. What they keep true:

- lossless: after the apply the target holds the new patterns, bit for bit, whatever they are;
- a block is applied to the very weights it was made from, or skipped where it is already in, or refused;
- bytes from outside raise DeltaError and nothing else, before the first write, in memory bounded by a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from tidemill.kernels.block import BLOCK_ELEMENTS, NAME_LIMIT, BlockHeader, DecodedBlock, write_block
from tidemill.kernels.container import StreamWriter, decode_blocks, decode_delta
from tidemill.kernels.elements import DeltaError, ElementType, element_type, flat_bits
from tidemill.kernels.fingerprint import Bits, TensorKey, fingerprint, fingerprint_change
from tidemill.kernels.payload import pack

__all__ = [
    "BLOCK_ELEMENTS",
    "DecodedBlock",
    "DeltaError",
    "FingerprintMismatch",
    "StreamWriter",
    "TensorChange",
    "Verdict",
    "apply_block",
    "decode_blocks",
    "decode_delta",
    "encode_delta",
    "encode_tensor",
    "guard",
]


class FingerprintMismatch(DeltaError):
    """A block meets weights that are neither the ones it was made from nor the ones it makes."""


class Verdict(Enum):
    """What to do with a block that fits the weights at hand."""

    APPLY = "apply"
    """The weights are the block's base."""
    SKIP = "skip"
    """The weights are the block's target already."""


class TensorChange(NamedTuple):
    """One tensor before and after a step, as bit patterns of equal shape, in checkpoint coordinates."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`), for instance "bfloat16"."""
    old_bits: Bits
    new_bits: Bits


def encode_tensor(
    name: str, dtype: str, old_bits: Bits, new_bits: Bits, block_elements: int = BLOCK_ELEMENTS
) -> Iterator[bytes]:
    """Encode the difference of two tensors as blocks, in ascending order; unchanged blocks are left out.

    Raises DeltaError when the tensors do not have the element type's width or one shape.
    """
    kind = element_type(dtype)
    if old_bits.shape != new_bits.shape:
        raise DeltaError(f"{name}: shape {old_bits.shape} became {new_bits.shape}; a delta keeps shapes, use an anchor")
    if not 0 < block_elements <= BLOCK_ELEMENTS:
        raise DeltaError(f"blocks have 1 to {BLOCK_ELEMENTS} elements, not {block_elements}")
    if not 0 < len(name.encode()) <= NAME_LIMIT:
        raise DeltaError(f"a tensor's name has 1 to {NAME_LIMIT} bytes: {name[:80]!r}")
    old, new = flat_bits(old_bits, kind), flat_bits(new_bits, kind)
    for start in range(0, old.size, block_elements):
        span = slice(start, start + block_elements)
        block = _encode_block(name, kind, old.size, start, old[span], new[span])
        if block is not None:
            yield block


def encode_delta(version: int, parent: int, tensors: Iterable[TensorChange]) -> Iterator[bytes]:
    """Encode the step from `parent` to `version` as a stream of bytes, one block at a time.

    Raises DeltaError like `encode_tensor`.
    """
    writer = StreamWriter(version, parent)
    yield writer.header()
    for tensor in tensors:
        yield from map(writer.block, encode_tensor(*tensor))
    yield writer.trailer()


def guard(block: DecodedBlock, bits: Bits) -> Verdict:
    """Whether a block fits the weights `bits` (uN, the whole tensor, any shape) that it is about to change.

    Raises DeltaError when the tensor has another width or size, and FingerprintMismatch when the weights are neither
    the block's base nor its target, or when its new patterns would not make its target.
    """
    flat = flat_bits(bits, element_type(block.dtype))
    if flat.size != block.tensor_elements:
        raise DeltaError(f"{block.name}: {flat.size} elements here, {block.tensor_elements} where the delta was made")
    key = TensorKey.of(block.name)
    held = fingerprint(flat[block.start : block.start + block.n], key, block.start)
    if held == block.target:
        return Verdict.SKIP
    if held != block.base:
        raise FingerprintMismatch(_mismatch(block, f"hold {held.hex()}, the delta was made from {block.base.hex()}"))
    made = held + fingerprint_change(key, block.indices, flat[block.indices], block.new_bits)
    if made != block.target:
        raise FingerprintMismatch(_mismatch(block, f"would become {made.hex()}, not {block.target.hex()}"))
    return Verdict.APPLY


def apply_block(block: DecodedBlock, bits: Bits) -> None:
    """Write a block that `guard` let pass into `bits` (uN, the whole tensor, contiguous), in place."""
    if not bits.flags.c_contiguous:
        raise DeltaError(f"{block.name}: a delta is written into contiguous memory only")
    bits.reshape(-1)[block.indices] = block.new_bits


def _mismatch(block: DecodedBlock, what: str) -> str:
    return f"{block.name}: elements {block.start} to {block.start + block.n} {what}; re-sync from an anchor"


def _encode_block(name: str, kind: ElementType, total: int, start: int, old: Bits, new: Bits) -> bytes | None:
    indices = np.flatnonzero(old != new)
    if not indices.size:
        return None
    key = TensorKey.of(name)
    base = fingerprint(old, key, start)
    target = base + fingerprint_change(key, indices + start, old[indices], new[indices])
    encoding, payload = pack(indices, new, kind)
    header = BlockHeader(encoding, kind, 0, total, start, old.size, indices.size, 0, base, target, b"")
    return write_block(header, name.encode(), payload)
