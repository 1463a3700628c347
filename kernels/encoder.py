"""Weight deltas, the writing side: from old and new bit patterns to blocks.

A tensor becomes blocks of its own, cut at multiples of the block size. A small one waits for others of its type and
shares a block with them (`kernels.block`): what is held for that is a copy, bounded by a share of a block.
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
"""A tensor of at most 1 / 8 of the largest block's elements shares one; of 1 / 256 on a GPU, since it is copied."""


class Encoded(NamedTuple):
    """A block, and what it does."""

    data: bytes
    targets: Mapping[str, tuple[int, Fingerprint]]
    """How many elements of each tensor that it changes it covers, and their fingerprint after the change."""


class _Difference(NamedTuple):
    """The changes of a run, and their effect on its fingerprint."""

    part: BlockPart
    changes: ElementChanges
    """By their places in the run, ascending."""
    base: Fingerprint
    added: Fingerprint


class DeltaEncoder:
    """The encoder of a delta's tensors, one after the other: `add` for each, then `finish`.

    Each tensor's patterns may be overwritten once `add` has been exhausted. `encode` does both.
    """

    def __init__(self, settings: CodecSettings = DEFAULTS) -> None:
        self._settings = settings
        self._waiting: dict[ElementType, _SmallTensors] = {}

    def encode(self, changes: Iterable[tuple[Any, ...]]) -> Iterator[Encoded]:
        """The blocks of a whole delta; each of `changes` is what `add` takes."""
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
        """The blocks that a tensor's change completes, in ascending order; unchanged ones are left out.

        With `start` and `total` the arrays (uN, of equal shape) are the part of a tensor of `total` elements that
        begins at flat element `start`: one rank's shard. Blocks are cut at multiples of the block size counted from the
        tensor's first element, for every part. PyTorch tensors on a GPU are compared and split there, as
        `kernels.backend` says.

        Raises DeltaError when the tensors do not have the element type's width or one shape, or leave the tensor.
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
            raise DeltaError(f"{name}: {len(old)} elements at {start} leave their tensor of {total}")
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
            raise DeltaError(f"{name} comes twice in one delta")
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
        """The blocks of all tensors that still wait."""
        for waiting in self._waiting.values():
            if waiting.differences:
                yield waiting.write(self._settings)

    @property
    def waiting(self) -> frozenset[str]:
        """Tensors whose changes are in no block yet."""
        return frozenset().union(*(waiting.differences for waiting in self._waiting.values()))


class _SmallTensors:
    """Small tensors of one type that changed, up to `limit` elements: their old patterns, copied, and the changes."""

    def __init__(self, kind: ElementType, limit: int) -> None:
        self.differences: dict[str, _Difference] = {}
        """By tensor, in the order of their patterns; the changes by their places among these."""
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
        """The block of all of them; none waits any more."""
        differences = list(self.differences.values())
        changes = ElementChanges(*map(np.concatenate, zip(*(one.changes for one in differences), strict=True)))
        block = _block(differences, self._kind, self._old[: self._elements], changes, settings)
        self.differences, self._elements, self._directory = {}, 0, 0
        return block


def _difference(part: BlockPart, old: AnyArray, new: AnyArray) -> _Difference | None:
    """What changed in a run of which these are the patterns; None for nothing."""
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
    """The block of one run, or of several whole tensors, one after the other in `old` and `changes`."""
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
