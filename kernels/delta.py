"""Weight deltas, the reading side: from bytes onto weights, or not at all.

`decode_delta`, `resolve` or `resolve_all`, `apply_change`: with the writing side (`kernels.encoder`) the whole codec.
What they keep true:

- lossless: after the apply the target holds the new patterns, bit for bit, for any patterns;
- a block is applied to the very weights it was made from, or skipped where it is already in, or refused;
- bytes from outside raise DeltaError and nothing else, before the first write, in memory bounded by a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tidemill.kernels.backend import backend_for
from tidemill.kernels.block import BLOCK_ELEMENTS, BlockPart, CodecSettings, EncodedBlock
from tidemill.kernels.compiled import compiled
from tidemill.kernels.container import StreamWriter, decode_blocks, decode_delta
from tidemill.kernels.elements import AnyArray, TensorChange, element_type, flat_bits
from tidemill.kernels.fingerprint import ZERO, Bits, Fingerprint, Indices, TensorKey, fingerprint_change
from tidemill.kernels.payload import ElementChanges, unpack
from tidemill.kernels.wire import DeltaError

__all__ = [
    "BLOCK_ELEMENTS",
    "BlockChange",
    "BlockPart",
    "CodecSettings",
    "DeltaError",
    "EncodedBlock",
    "FingerprintMismatch",
    "StreamWriter",
    "TensorChange",
    "apply_change",
    "decode_blocks",
    "decode_delta",
    "resolve",
    "resolve_all",
]


class FingerprintMismatch(DeltaError):
    """A block meets weights that are neither the ones it was made from nor the ones it makes."""


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


def resolve(block: EncodedBlock, bits: AnyArray, offset: int | None = None) -> BlockChange | None:
    """What a block of one tensor changes in the weights `bits` (uN, any shape), or None where its target is there.

    `bits` is the whole tensor, or, with `offset`, its local part that begins at flat element `offset` and holds
    the block. Nothing is written.

    Raises DeltaError when the tensor has another width or size, the block covers several, or the payload is malformed,
    and FingerprintMismatch when the weights are neither the block's base nor its target, or when its new patterns would
    not make its target.
    """
    if len(block.parts) != 1:
        raise DeltaError(f"a block covers {len(block.parts)} tensors where one was asked about")
    found = _resolve(block, [_local(block.parts[0], flat_bits(bits, element_type(block.dtype)), offset)])
    return found[0] if found else None


def resolve_all(block: EncodedBlock, tensors: Mapping[str, AnyArray]) -> tuple[BlockChange, ...]:
    """What a block changes in whole tensors, by name; nothing where its target is there already. Nothing is written.

    Raises like `resolve`, and DeltaError for a tensor that is not among them.
    """
    kind, rows = element_type(block.dtype), []
    for part in block.parts:
        if part.name not in tensors:
            raise DeltaError(f"the delta changes {part.name}, which is no tensor here")
        rows.append(_local(part, flat_bits(tensors[part.name], kind), None))
    return _resolve(block, rows)


def apply_change(change: BlockChange, bits: AnyArray, offset: int = 0) -> None:
    """Write a change into `bits` (uN, contiguous), in place: the tensor, or its part that begins at `offset`.

    Raises DeltaError when `bits` is not contiguous or does not hold the change's range.
    """
    if isinstance(bits, np.ndarray) and not bits.flags.c_contiguous:
        raise DeltaError(f"{change.name}: a delta is written into contiguous memory only")
    flat = flat_bits(bits, element_type(change.dtype))
    if not offset <= change.start <= offset + len(flat) - change.n:
        raise DeltaError(f"{change.name}: {len(flat)} elements at {offset} do not hold {change.n} at {change.start}")
    kernels = backend_for(flat)
    places = change.indices - offset if offset else change.indices
    kernels.scatter(flat, kernels.beside(places, flat), kernels.beside(change.new_bits, flat))


def _resolve(block: EncodedBlock, rows: list[AnyArray]) -> tuple[BlockChange, ...]:
    """What a block changes in its parts, of which `rows` are the patterns."""
    kernels = backend_for(rows[0])
    keys = [TensorKey.of(part.name) for part in block.parts]
    held = [kernels.fingerprint(row, key, part.start) for part, key, row in zip(block.parts, keys, rows, strict=True)]
    before = sum(held, start=ZERO)
    if before == block.target:
        return ()
    if before != block.base:
        raise FingerprintMismatch(_mismatch(block, f"hold {before.hex()}, the delta was made from {block.base.hex()}"))
    kind, hosted = element_type(block.dtype), [kernels.host(row) for row in rows]
    first, old = (block.parts[0].start, hosted[0]) if len(rows) == 1 else (0, np.concatenate(hosted))
    changes = [unpack(block.encoding, block.payload, kind, old, block.changed, first)]
    if len(rows) > 1:
        begins, cuts = np.cumsum([0, *(part.n for part in block.parts)]), np.zeros(len(rows) + 1, np.int64)
        ordered = ElementChanges(*map(np.empty_like, changes[0]))
        _split(*changes[0], begins, *ordered, cuts)
        changes = [ElementChanges(*(side[a:b] for side in ordered)) for a, b in pairwise(cuts.tolist())]
    made = [fingerprint_change(key, *change) for key, change in zip(keys, changes, strict=True)]
    after = sum(made, start=before)
    if after != block.target:
        raise FingerprintMismatch(_mismatch(block, f"would become {after.hex()}, not {block.target.hex()}"))
    return tuple(
        BlockChange(part.name, block.dtype, part.start, part.n, *change, base, base + added)
        for part, change, base, added in zip(block.parts, changes, held, made, strict=True)
        if change.indices.size
    )


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
    """Order changes by tensor, and count their places from its beginning: tensor i's lie in [cuts[i], cuts[i + 1]).

    The tensors lie one after the other; they begin, and the last one ends, at `begins` (i8[tensors + 1]).
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


def _local(part: BlockPart, flat: AnyArray, offset: int | None) -> AnyArray:
    """A part's elements within `flat`, which begins at `offset`, or is the whole tensor."""
    if offset is None and len(flat) != part.tensor_elements:
        raise DeltaError(f"{part.name}: {len(flat)} elements here, {part.tensor_elements} where the delta was made")
    first = part.start - (offset or 0)
    if first < 0 or first + part.n > len(flat):
        raise DeltaError(f"{part.name}: {len(flat)} elements at {offset} do not hold {part.n} at {part.start}")
    return flat[first : first + part.n]


def _mismatch(block: EncodedBlock, what: str) -> str:
    part = block.parts[0]
    where = f"{part.name}: elements {part.start} to {part.start + part.n}"
    if len(block.parts) > 1:
        where += f", and {len(block.parts) - 1} tensors more,"
    return f"{where} {what}; re-sync from an anchor"
