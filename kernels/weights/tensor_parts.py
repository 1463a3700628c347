"""The part of each weight that one rank holds and publishes, and the whole weights that all parts make together.

A single process has whole weights: parts that begin at 0 and have every element. Invariant: merged parts cover every
element of every tensor exactly once, otherwise an error is raised; so the fingerprints of the merged tensors are
those of the whole tensors, for any number of ranks and any cuts.

Ranks exchange elements one tensor at a time, to change the cuts of a tensor. Every rank calls `spans_of_all` and
`exchange` in the same order; it holds only the old and the new elements of one tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from tidemill.kernels.backend import KernelBackend, backend_for, is_on_host
from tidemill.kernels.elements import BY_NAME, AnyArray, flat_row
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey
from tidemill.kernels.weights.bits import Weight, WeightLike, as_weight, dtype_of
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.ranks import Ranks
from tidemill.schemas.records import ShardPosition, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """Elements [start, start + n) of a weight, n possibly 0."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`)."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    start: int
    """Flat index in the whole weight, in C order."""
    bits: AnyArray
    """uN[n], bit patterns, flat: a numpy array, or a tensor on a device."""

    @property
    def n(self) -> int:
        """Number of elements of the part."""
        return len(self.bits)

    @property
    def total(self) -> int:
        """Number of elements of the whole weight."""
        return prod(self.shape)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the part; the sum over all ranks is the weight's fingerprint."""
        return backend_for(self.bits).fingerprint(self.bits, TensorKey.of(self.name), self.start)

    def hosted(self) -> TensorPart:
        """Return the part in the CPU's memory: itself, or a copy if it is on a device."""
        return self if isinstance(self.bits, np.ndarray) else replace(self, bits=KernelBackend.host(self.bits))

    def outline(self) -> Weight:
        """Return the whole weight's type and shape, as an array of zeros that uses no memory."""
        return Weight(self.dtype, np.broadcast_to(np.zeros((), BY_NAME[self.dtype].bits), self.shape))


Parts = Mapping[str, TensorPart]
"""A rank's part of every weight, by name, in the same order on every rank."""

TensorLike: TypeAlias = "WeightLike | TensorPart"
"""A tensor in a form that a trainer may pass: whole, or this rank's part."""

Tensors = Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]]
"""A version in the form that a trainer passes: by checkpoint name, each tensor once, in any order."""


class Place(NamedTuple):
    """The elements [start, start + n) of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    n: int


PartInfo = tuple[Place, Fingerprint]
"""A rank's elements of a tensor, with their fingerprint."""

PartInfos = Mapping[str, PartInfo]
"""One rank's part of every tensor of a version by name, in the same order on every rank."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One shard of a version, acknowledged by the log or whole in the store."""

    position: ShardPosition
    n_changed: int
    """Changed elements."""
    change: Fingerprint
    """The shard's summand in the version's fingerprint."""


def is_tensor(value: TensorLike) -> TypeGuard[torch.Tensor]:
    """Whether a value is a PyTorch tensor; PyTorch need not be loaded."""
    return not isinstance(value, np.ndarray | Weight | TensorPart)


def as_part(name: str, value: TensorLike) -> TensorPart:
    """Return `value` as a part, on its device: a view of its memory if possible, otherwise a copy.

    Raises TypeError for a type that a version cannot carry, ValueError for a part of another tensor.
    """
    if is_tensor(value) and not is_on_host(value):
        row = flat_row(value.detach().contiguous())
        return TensorPart(name, dtype_of(name, value), tuple(value.shape), 0, row)
    if not isinstance(value, TensorPart):
        weight = as_weight(name, value)
        return TensorPart(name, weight.dtype, weight.bits.shape, 0, weight.bits.reshape(-1))
    bits = value.bits
    as_weight(name, Weight(value.dtype, bits if isinstance(bits, np.ndarray) else np.empty(0, f"u{bits.itemsize}")))
    end = value.start + value.n
    if value.name != name or value.bits.ndim != 1 or not 0 <= value.start <= end <= value.total:
        raise ValueError(
            f"{name}: it is elements {value.start} to {end} of {value.name}{list(value.shape)}, as an "
            f"array of {value.bits.ndim} dimensions: give a flat array of elements within the tensor"
        )
    return value


def place_of(name: str, value: TensorLike) -> Place:
    """Return the elements that `value` has, without a copy from its device. Raises the errors of `as_part`."""
    if is_tensor(value):
        return Place(str(value.dtype).removeprefix("torch."), tuple(value.shape), 0, value.numel())
    part = as_part(name, value)
    return Place(part.dtype, part.shape, part.start, part.n)


def part_info(part: TensorPart, made: Fingerprint | None = None) -> PartInfo:
    """Return a rank's report on a part, whose fingerprint is computed if it is None."""
    return place_of(part.name, part), made or part.fingerprint()


def named(version: int, tensors: Tensors) -> Iterator[tuple[str, TensorLike]]:
    """Yield the tensors of a version by name, in the order given. Raises VersionError for a repeated name."""
    seen: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in seen:
            raise VersionError(f"version {version} has {name} twice")
        seen.add(name)
        yield name, value


def merged_tensors(of_ranks: Sequence[PartInfos]) -> list[TensorInfo]:
    """Return the tensors of a version from the parts of all ranks.

    Raises VersionError if the ranks do not report the same tensors, or no rank or several ranks hold an element.
    """
    if len({len(parts) for parts in of_ranks}) != 1:
        raise VersionError("the ranks hold different numbers of tensors: give every rank's part of every tensor")
    merged = []
    for parts in zip(*(infos.items() for infos in of_ranks), strict=True):
        tensors = {(name, place.dtype, place.shape) for name, (place, _) in parts}
        if len(tensors) != 1:
            names = ", ".join(sorted(f"{name} ({dtype}, {shape})" for name, dtype, shape in tensors))
            raise VersionError(f"the ranks do not hold the same tensors in the same order: {names}")
        ((name, dtype, shape),), end = tensors, 0
        for start, n in sorted((place.start, place.n) for _, (place, _) in parts if place.n):
            if start != end:
                what = "by several ranks" if start < end else "by no rank"
                raise VersionError(f"{name}: elements {min(start, end)} to {max(start, end)} are held {what}")
            end += n
        if end != prod(shape):
            raise VersionError(f"{name}: the ranks hold {end} of {prod(shape)} elements")
        total = sum((made for _, (_, made) in parts), ZERO)
        merged.append(TensorInfo(name, dtype, list(shape), total.hex()))
    return merged


def balanced(sizes: Mapping[str, int], bins: int) -> dict[str, int]:
    """Assign each tensor to one of `bins`: the largest first, each to the least loaded; in the order of `sizes`.

    Raises ValueError if `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"tensors need at least one bin, not {bins}")
    loads = [(0, to) for to in range(bins)]
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, to = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], to))
        chosen[name] = to
    return {name: chosen[name] for name in sizes}


Span = tuple[int, int]
"""A range of a tensor's elements: first element, number of elements."""


def spans_of_all(spans: Mapping[str, Span], ranks: Ranks) -> dict[str, list[Span]]:
    """Return the spans of every rank, in rank order, by tensor; on every rank. Raises RanksLostError."""
    found = ranks.gather(lambda: spans)
    return ranks.from_first(lambda: {name: [of_rank[name] for of_rank in found] for name in spans})


def exchange(own: TensorPart, held: Sequence[Span], wanted: Sequence[Span], ranks: Ranks) -> TensorPart:
    """Return this rank's `wanted` elements of a tensor whose `held` elements the ranks have; called by all ranks.

    Both are in rank order; `held` covers each wanted element once. Returns `own` if nothing moves, otherwise a part in
    new memory; in both cases in the CPU's memory. Raises RanksLostError.
    """
    own = own.hosted()
    if list(held) == list(wanted):
        return own
    start, n = wanted[ranks.rank]
    made = np.empty(n, own.bits.dtype)
    for source, (first, length) in enumerate(held):
        for to, (begin, size) in enumerate(wanted):
            low, high = max(first, begin), min(first + length, begin + size)
            if low >= high:
                continue
            if source == ranks.rank:
                moved = own.bits[low - own.start : high - own.start]
                if to == source:
                    made[low - start : high - start] = moved
                else:
                    ranks.send(moved, to)
            elif to == ranks.rank:
                ranks.receive(made[low - start : high - start], source)
    return replace(own, start=start, bits=made)
