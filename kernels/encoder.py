"""Weight deltas, the writing side: from old and new bit patterns to blocks.

A tensor becomes blocks of its own, cut at multiples of the block size. A small one waits for others of its type and
shares a block with them (`kernels.parts`): what is held for that is a copy, bounded by a share of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tidemill.kernels.backend import AnyArray, backend_for, flat_rows
from tidemill.kernels.block import BlockHeader, write_block
from tidemill.kernels.container import StreamWriter
from tidemill.kernels.elements import DeltaError, ElementType, element_type
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey
from tidemill.kernels.parts import (
    DIRECTORY_LIMIT,
    BlockPart,
    check_name,
    directory_entry_limit,
    write_directory,
)
from tidemill.kernels.payload import Changes, pack
from tidemill.kernels.settings import CodecSettings

DEFAULTS = CodecSettings()
SMALL_SHARE, SHARED_SHARE = 8, 4
"""Tensors of at most 1 / 8 of a block's elements share one, of at most 1 / 4 of a block's elements."""


class TensorChange(NamedTuple):
    """One tensor before and after a step, as bit patterns of equal shape, in checkpoint coordinates."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`), for instance "bfloat16"."""
    old_bits: AnyArray
    new_bits: AnyArray


class Encoded(NamedTuple):
    """A block, and what it does."""

    data: bytes
    changes: Mapping[str, Fingerprint]
    """What it adds to the fingerprint of each tensor that it changes."""


class _Rows(NamedTuple):
    """A run of a tensor before and after a step, flat."""

    part: BlockPart
    kind: ElementType
    old: AnyArray
    new: AnyArray


class DeltaEncoder:
    """Encodes the tensors of a delta one after the other: `add` for each, then `finish`.

    Each tensor's patterns may be overwritten once `add` has been exhausted.
    """

    def __init__(self, settings: CodecSettings = DEFAULTS) -> None:
        self._settings = settings
        self._waiting: dict[ElementType, _Waiting] = {}

    def add(
        self,
        name: str,
        dtype: str,
        old_bits: AnyArray,
        new_bits: AnyArray,
        *,
        start: int = 0,
        total: int | None = None,
    ) -> Iterator[Encoded]:
        """The blocks that a tensor's change completes; arguments and errors as of `encode_tensor`."""
        rows = _checked(name, dtype, old_bits, new_bits, start, total)
        if not self._is_small(rows.part):
            yield from _blocks(rows, self._settings)
            return
        if name in self.waiting:
            raise DeltaError(f"{name} comes twice in one delta")
        waiting = self._waiting.setdefault(rows.kind, _Waiting())
        if not waiting.has_room(rows.part, self._settings.block_elements // SHARED_SHARE):
            yield from self._write(self._waiting.pop(rows.kind))
            waiting = self._waiting.setdefault(rows.kind, _Waiting())
        waiting.take(rows)

    def finish(self) -> Iterator[Encoded]:
        """The blocks of all tensors that still wait."""
        for kind in list(self._waiting):
            yield from self._write(self._waiting.pop(kind))

    @property
    def waiting(self) -> frozenset[str]:
        """Tensors whose changes are in no block yet."""
        return frozenset(rows.part.name for waiting in self._waiting.values() for rows in waiting.rows)

    def _is_small(self, part: BlockPart) -> bool:
        return part.n == part.tensor_elements <= self._settings.block_elements // SMALL_SHARE

    def _write(self, waiting: _Waiting) -> Iterator[Encoded]:
        if len(waiting.rows) == 1:
            yield from _blocks(waiting.rows[0], self._settings)
        elif waiting.rows:
            parts = tuple(rows.part for rows in waiting.rows)
            old, new = (np.concatenate([rows[side] for rows in waiting.rows]) for side in (2, 3))
            yield from _block(parts, waiting.rows[0].kind, old, new, self._settings)


class _Waiting:
    """Small tensors of one type that changed, copied."""

    def __init__(self) -> None:
        self.rows: list[_Rows] = []
        self._elements = 0
        self._directory = 0

    def has_room(self, part: BlockPart, limit: int) -> bool:
        """Whether one more tensor fits into a block of `limit` elements; the first always does."""
        fits = self._directory + directory_entry_limit(part) <= DIRECTORY_LIMIT
        return not self.rows or (fits and self._elements + part.n <= limit)

    def take(self, rows: _Rows) -> None:
        """Copy a tensor, unless nothing in it changed."""
        kernels = backend_for(rows.old)
        old, new = kernels.host(rows.old), kernels.host(rows.new)
        if not np.array_equal(old, new):
            self.rows.append(rows._replace(old=old.copy(), new=new.copy()))
            self._elements += rows.part.n
            self._directory += directory_entry_limit(rows.part)


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
    for block in _blocks(_checked(name, dtype, old_bits, new_bits, start, total), settings):
        yield block.data


def encode_delta(
    version: int, parent: int, tensors: Iterable[TensorChange], settings: CodecSettings = DEFAULTS
) -> Iterator[bytes]:
    """Encode the step from `parent` to `version` as a stream of bytes, one block at a time.

    Raises DeltaError like `encode_tensor`.
    """
    writer, encoder = StreamWriter(version, parent), DeltaEncoder(settings)
    yield writer.header()
    for tensor in tensors:
        for block in encoder.add(*tensor):
            yield writer.block(block.data)
    for block in encoder.finish():
        yield writer.block(block.data)
    yield writer.trailer()


def _checked(name: str, dtype: str, old_bits: AnyArray, new_bits: AnyArray, start: int, total: int | None) -> _Rows:
    """The run that a change covers. Raises DeltaError."""
    kind = element_type(dtype)
    if old_bits.shape != new_bits.shape:
        raise DeltaError(f"{name}: shape {old_bits.shape} became {new_bits.shape}; a delta keeps shapes, use an anchor")
    check_name(name)
    old, new = flat_rows(old_bits, kind), flat_rows(new_bits, kind)
    total = start + len(old) if total is None else total
    if start < 0 or start + len(old) > total:
        raise DeltaError(f"{name}: {len(old)} elements at {start} leave their tensor of {total}")
    return _Rows(BlockPart(name, total, start, len(old)), kind, old, new)


def _blocks(rows: _Rows, settings: CodecSettings) -> Iterator[Encoded]:
    """The blocks of one run."""
    run = rows.part
    for first, last in _cuts(run.start, run.n, settings.block_elements):
        span = slice(first - run.start, last - run.start)
        part = BlockPart(run.name, run.tensor_elements, first, last - first)
        yield from _block((part,), rows.kind, rows.old[span], rows.new[span], settings)


def _cuts(start: int, size: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) that cover [start, start + size), cut at multiples of `block_elements`."""
    first = start
    while first < start + size:
        last = min(start + size, (first // block_elements + 1) * block_elements)
        yield first, last
        first = last


def _block(
    parts: Sequence[BlockPart], kind: ElementType, old: AnyArray, new: AnyArray, settings: CodecSettings
) -> Iterator[Encoded]:
    """One block, whose parts lie one after the other in `old` and `new`; none where nothing changed."""
    kernels = backend_for(old)
    indices, old_at, new_at = kernels.compare_and_take(old, new)
    if not len(indices):
        return
    several = len(parts) > 1
    changes, base, first = {}, ZERO, 0
    ends = np.cumsum([part.n for part in parts])
    cuts = [0, *np.searchsorted(indices, ends).tolist()] if several else [0, len(indices)]
    for part, begin, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
        key, span = TensorKey.of(part.name), slice(begin, end)
        base += kernels.fingerprint(old[first : first + part.n], key, part.start)
        places = indices[span] + (part.start - first)
        changes[part.name] = kernels.fingerprint_change(key, places, old_at[span], new_at[span])
        first += part.n
    target = base + sum(changes.values(), start=ZERO)
    encoding, payload = pack(kind, old, new, Changes(indices, old_at, new_at), settings.coder)
    header = BlockHeader(
        several, encoding, kind, 0, first if several else parts[0].tensor_elements, parts[0].start, first,
        len(indices), 0, base, target, settings.digest, b"",
    )  # fmt: skip
    name = write_directory(parts) if several else parts[0].name.encode()
    yield Encoded(write_block(header, name, payload), changes)
