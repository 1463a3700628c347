"""Deltas and blocks made in one call, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tidemill.kernels.block import CodecSettings, EncodedBlock
from tidemill.kernels.delta import BlockChange, StreamWriter, resolve_all
from tidemill.kernels.elements import AnyArray
from tidemill.kernels.encoder import DEFAULTS, DeltaEncoder


def encode_tensor(
    name: str,
    dtype: str,
    old_bits: AnyArray,
    new_bits: AnyArray,
    start: int = 0,
    total: int | None = None,
    *,
    settings: CodecSettings = DEFAULTS,
) -> Iterator[bytes]:
    """Yield the blocks of one tensor's change in ascending order; arguments and errors as in `DeltaEncoder.add`."""
    for block in DeltaEncoder(settings).encode([(name, dtype, old_bits, new_bits, start, total)]):
        yield block.data


def resolve(block: EncodedBlock, bits: AnyArray) -> BlockChange | None:
    """Return the change of a block of one tensor, `bits`; None if the tensor already has it."""
    found = resolve_all(block, {block.parts[0].name: bits})
    return found[0] if found else None


def encode_delta(
    version: int, parent: int, tensors: Iterable[tuple[Any, ...]], settings: CodecSettings = DEFAULTS
) -> Iterator[bytes]:
    """Yield the delta from `parent` to `version` in bytes, one block at a time; errors as in `DeltaEncoder.add`."""
    writer = StreamWriter(version, parent)
    yield writer.header()
    for block in DeltaEncoder(settings).encode(tensors):
        yield writer.block(block.data)
    yield writer.trailer()
