"""The encoder of weight deltas: from old and new bit patterns to blocks.

A tensor has its own blocks, cut at multiples of the block size. A small tensor waits for others of its type and shares
a block with them (`kernels.block`): until then a copy is held, in memory bounded by a part of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tidemill.kernels.backend import KernelBackend, backend_for, is_on_host
from tidemill.kernels.block import (
    DIRECTORY_LIMIT,
    NAME_LIMIT,
    BlockHeader,
    BlockPart,
    CodecSettings,
    directory_entry_limit,
    write_block,
    write_directory,
)
from tidemill.kernels.elements import AnyArray, ElementType, element_type, flat_bits
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey
from tidemill.kernels.payload import ElementChanges, pack
from tidemill.kernels.wire import DeltaError

DEFAULTS = CodecSettings()
SHARED_SHARE = 4
"""A block that tensors share has at most 1 / 4 of the elements of the largest block."""
SMALL_SHARE, SMALL_SHARE_ON_GPU = 8, 256
"""A tensor of at most 1 / 8 of the largest block's elements shares a block; on a GPU 1 / 256, because it is copied."""


class Encoded(NamedTuple):
    """An encoded block and its effect."""

    data: bytes
    targets: Mapping[str, tuple[int, Fingerprint]]
    """By name of each tensor that it changes: number of covered elements, and their fingerprint after the change."""


class _Difference(NamedTuple):
    """The changes of a run, and their effect on its fingerprint."""

    part: BlockPart
    changes: ElementChanges
    """With indices in the run, ascending."""
    base: Fingerprint
    added: Fingerprint


class DeltaEncoder:
    """The encoder of a delta's tensors, one after the other: call `add` for each, then `finish`. `encode` does both.

    A tensor's patterns may be overwritten after the iterator of its `add` has ended.
    """

    def __init__(self, settings: CodecSettings = DEFAULTS) -> None:
        self._settings = settings
        self._waiting: dict[ElementType, _SmallTensors] = {}

    def encode(self, changes: Iterable[tuple[Any, ...]]) -> Iterator[Encoded]:
        """Yield the blocks of a whole delta; each of `changes` contains the arguments of one `add`."""
        for change in changes:
            yield from self.add(*change)
        yield from self.finish()

    def add(
        self,
        name: str,
        dtype: str,
        old_bits: AnyArray,
        new_bits: AnyArray,
        start: int = 0,
        total: int | None = None,
    ) -> Iterator[Encoded]:
        """Yield the blocks that a tensor's change completes, in ascending order; unchanged ones are omitted.

        With `start` and `total` the arrays (uN, of equal shape) are the part of a tensor of `total` elements that
        begins at flat element `start`: one rank's shard. Blocks are cut at multiples of the block size counted from the
        tensor's first element, for every part. PyTorch tensors on a GPU are compared and split there, as
        `kernels.backend` describes.

        Raises DeltaError if the arrays have different shapes or another width than the type, or exceed the tensor.
        """
        kind, settings = element_type(dtype), self._settings
        if old_bits.shape != new_bits.shape:
            raise DeltaError(
                f"{name}: shape {old_bits.shape} became {new_bits.shape}; a delta keeps shapes, use an anchor"
            )
        if not 0 < len(name.encode()) <= NAME_LIMIT:
            raise DeltaError(f"a tensor's name has 1 to {NAME_LIMIT} bytes: {name[:80]!r}")
        old, new = flat_bits(old_bits, kind), flat_bits(new_bits, kind)
        end, total = start + len(old), start + len(old) if total is None else total
        if start < 0 or end > total:
            raise DeltaError(f"{name}: {len(old)} elements at {start} exceed their tensor of {total}")
        share = SMALL_SHARE if is_on_host(old_bits) else SMALL_SHARE_ON_GPU
        if not (len(old) == total <= settings.block_elements // share):
            cuts = range(start // settings.block_elements * settings.block_elements, end, settings.block_elements)
            for first in (max(start, cut) for cut in cuts):
                span = slice(first - start, (first // settings.block_elements + 1) * settings.block_elements - start)
                part = BlockPart(name, total, first, len(old[span]))
                difference = _difference(part, old[span], new[span])
                if difference is not None:
                    yield _block([difference], kind, old[span], difference.changes, settings)
            return
        if any(name in waiting.differences for waiting in self._waiting.values()):
            raise DeltaError(f"{name} is twice in one delta")
        difference = _difference(BlockPart(name, total, 0, total), old, new)
        if difference is None:
            return
        if kind not in self._waiting:
            self._waiting[kind] = _SmallTensors(kind, settings.block_elements // SHARED_SHARE)
        waiting = self._waiting[kind]
        if not waiting.has_room(difference.part):
            yield waiting.write(settings)
        waiting.take(difference, old)

    def finish(self) -> Iterator[Encoded]:
        """Yield the blocks of all tensors that still wait."""
        for waiting in self._waiting.values():
            if waiting.differences:
                yield waiting.write(self._settings)

    @property
    def waiting(self) -> frozenset[str]:
        """Names of tensors whose changes are in no block yet."""
        return frozenset().union(*(waiting.differences for waiting in self._waiting.values()))


class _SmallTensors:
    """Small tensors of one type that changed, up to `limit` elements: their old patterns, copied, and the changes."""

    def __init__(self, kind: ElementType, limit: int) -> None:
        self.differences: dict[str, _Difference] = {}
        """By tensor, in the order of their patterns in `_old`; the indices of their changes are indices in `_old`."""
        self._kind = kind
        self._old = np.empty(limit, kind.bits)
        self._elements = 0
        self._directory = 0

    def has_room(self, part: BlockPart) -> bool:
        fits = self._directory + directory_entry_limit(part) <= DIRECTORY_LIMIT
        return fits and self._elements + part.n <= self._old.size

    def take(self, difference: _Difference, old: AnyArray) -> None:
        part, (indices, old_at, new_at) = difference.part, map(KernelBackend.host, difference.changes)
        changes = ElementChanges(indices + self._elements, old_at.copy(), new_at.copy())
        self._old[self._elements : self._elements + part.n] = KernelBackend.host(old)
        self.differences[part.name] = difference._replace(changes=changes)
        self._elements += part.n
        self._directory += directory_entry_limit(part)

    def write(self, settings: CodecSettings) -> Encoded:
        """Return one block of all waiting tensors, and remove them."""
        differences = list(self.differences.values())
        changes = ElementChanges(*map(np.concatenate, zip(*(one.changes for one in differences), strict=True)))
        block = _block(differences, self._kind, self._old[: self._elements], changes, settings)
        self.differences, self._elements, self._directory = {}, 0, 0
        return block


def _difference(part: BlockPart, old: AnyArray, new: AnyArray) -> _Difference | None:
    """Return the changes of a run with these patterns; None if nothing changed."""
    kernels, key = backend_for(old), TensorKey.of(part.name)
    changes = ElementChanges(*kernels.changed_elements(old, new))
    if not len(changes.indices):
        return None
    base = kernels.fingerprint(old, key, part.start)
    places = changes.indices + part.start if part.start else changes.indices
    return _Difference(part, changes, base, kernels.fingerprint_change(key, places, changes.old, changes.new))


def _block(
    differences: Sequence[_Difference],
    kind: ElementType,
    old: AnyArray,
    changes: ElementChanges,
    settings: CodecSettings,
) -> Encoded:
    """Return the block of one run, or of several whole tensors, one after the other in `old` and `changes`."""
    encoding, payload = pack(kind, old, changes, settings.coder)
    base = sum((one.base for one in differences), start=ZERO)
    target = sum((one.added for one in differences), start=base)
    first, several = differences[0].part, len(differences) > 1
    name = write_directory([one.part for one in differences]) if several else first.name.encode()
    total = len(old) if several else first.tensor_elements
    header = BlockHeader(
        several, encoding, kind, 0, total, first.start, len(old), len(changes.indices), 0, base, target,
        settings.digest, b"",
    )  # fmt: skip
    return Encoded(
        write_block(header, name, payload),
        {one.part.name: (one.part.n, one.base + one.added) for one in differences},
    )
