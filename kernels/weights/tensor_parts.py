"""The part of each weight that one rank holds and publishes, and the whole that the parts of all ranks make up.

A process alone has whole weights: parts that begin at 0 and have every element. Keeps true: the parts that are merged
cover every element of every tensor exactly once, or there is an error; so the fingerprints of the merged tensors are
those of the whole, for any number of ranks and any cuts.

Elements move between ranks one tensor at a time: a tensor that is cut one way becomes cut another way. Every rank calls
`spans_of_all` and `exchange` in the same order; it holds what it had and what it gets of one tensor, and no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from tidemill.kernels.backend import KernelBackend, backend_for, is_on_host
from tidemill.kernels.elements import BY_NAME, AnyArray, flat_row
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey
from tidemill.kernels.weights.bits import Weight, WeightLike, as_weight, dtype_of
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.ranks import Ranks
from tidemill.schemas.records import ShardPosition, TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """Elements [start, start + n) of a weight, n possibly 0."""

    name: str
    dtype: str
    """Name of the element type (`kernels.elements`)."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    start: int
    """Flat element of the whole weight, in C order."""
    bits: AnyArray
    """uN[n], bit patterns, flat: a numpy array, or a tensor on a device."""

    @property
    def n(self) -> int:
        """Elements of the part."""
        return len(self.bits)

    @property
    def total(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape)

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the part; those of all ranks add up to the weight's."""
        return backend_for(self.bits).fingerprint(self.bits, TensorKey.of(self.name), self.start)

    def hosted(self) -> TensorPart:
        """The part in the CPU's memory: itself, or a copy of one that lies on a device."""
        return self if isinstance(self.bits, np.ndarray) else replace(self, bits=KernelBackend.host(self.bits))

    def outline(self) -> Weight:
        """The whole weight's type and shape, in an array of zeros that takes no memory."""
        return Weight(self.dtype, np.broadcast_to(np.zeros((), BY_NAME[self.dtype].bits), self.shape))


Parts = Mapping[str, TensorPart]
"""A rank's part of every weight, by name, in the same order on every rank."""

TensorLike = WeightLike | TensorPart
"""A tensor as a trainer may hand it over: whole, or this rank's part of it."""

Tensors = Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]]
"""A version as a trainer hands it over: by checkpoint name, each tensor once, in any order."""


class Place(NamedTuple):
    """Which elements of which tensor: [start, start + n)."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    n: int


PartInfo = tuple[Place, Fingerprint]
"""A rank's elements of a tensor, and their fingerprint."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One shard of a version, acknowledged by the log or whole in the store."""

    position: ShardPosition
    n_changed: int
    """Changed elements."""
    change: Fingerprint
    """The shard's summand in the version's fingerprint."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part of a version."""

    parts: Mapping[str, PartInfo]
    """Of every tensor by name, in the same order on every rank."""
    shards: Sequence[ShardReport] = ()
    """The shards that the rank published; none where there is no delta."""


def as_part(name: str, value: TensorLike) -> TensorPart:
    """`value` as a part, where it lies: a view of its memory where that is possible, not a copy.

    Raises TypeError for a type that a version cannot carry, ValueError for a part that is not of this tensor.
    """
    if isinstance(value, torch.Tensor) and not is_on_host(value):
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
            f"{name}: the part given is elements {value.start} to {end} of {value.name}{list(value.shape)}, as an "
            f"array of {value.bits.ndim} dimensions: give a flat array of elements that lie in the tensor"
        )
    return value


def place_of(name: str, value: TensorLike) -> Place:
    """Which elements a tensor is, without moving it off its device. Raises like `as_part`."""
    if isinstance(value, torch.Tensor):
        return Place(str(value.dtype).removeprefix("torch."), tuple(value.shape), 0, value.numel())
    part = as_part(name, value)
    return Place(part.dtype, part.shape, part.start, part.n)


def part_info(part: TensorPart, made: Fingerprint | None = None) -> PartInfo:
    """A rank's report of a part, whose fingerprint is computed unless it is given."""
    return place_of(part.name, part), made or part.fingerprint()


def named(version: int, tensors: Tensors) -> Iterator[tuple[str, TensorLike]]:
    """The tensors of a version by name, in the order given. Raises VersionError for a name that comes twice."""
    seen: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in seen:
            raise VersionError(f"version {version} has {name} twice")
        seen.add(name)
        yield name, value


def merged_tensors(reports: Sequence[RankReport]) -> list[TensorInfo]:
    """The tensors of the version that the reports of all ranks make up.

    Raises VersionError when the ranks do not speak of the same tensors, or an element is held by none or by several.
    """
    if len({len(report.parts) for report in reports}) != 1:
        raise VersionError("the ranks hold different numbers of tensors: give every rank's part of every tensor")
    merged = []
    for parts in zip(*(report.parts.items() for report in reports), strict=True):
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


def deal(sizes: Mapping[str, int], hands: int) -> dict[str, int]:
    """Which of `hands` takes each tensor: the largest first, each to the hand that has least; in the order of `sizes`.

    Raises ValueError for no hands.
    """
    if hands < 1:
        raise ValueError(f"tensors are dealt to at least one hand, not {hands}")
    loads = [(0, hand) for hand in range(hands)]
    dealt: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, hand = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], hand))
        dealt[name] = hand
    return {name: dealt[name] for name in sizes}


Span = tuple[int, int]
"""Elements of a tensor: the first, and how many."""


def spans_of_all(spans: Mapping[str, Span], ranks: Ranks) -> dict[str, list[Span]]:
    """The spans of every rank, in rank order, by tensor; on every rank. Raises RanksLostError."""
    found = ranks.gather(lambda: spans)
    return ranks.from_first(lambda: {name: [of_rank[name] for of_rank in found] for name in spans})


def exchange(own: TensorPart, held: Sequence[Span], wanted: Sequence[Span], ranks: Ranks) -> TensorPart:
    """This rank's `wanted` elements of a tensor of which every rank has its `held` ones; called by all ranks.

    Both are in rank order and cover what is wanted once. The part itself where nothing moves; else memory of its own.
    All of them in the CPU's memory. Raises RanksLostError.
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
