"""What each rank says of its part of a version, and what the parts of all ranks come to. Pure.

Keeps true: the parts that are merged cover every element of every tensor exactly once, or there is an error; so the
fingerprints of the merged tensors are those of the whole, whatever the number of ranks and wherever the cuts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.kernels.weights.shard_report import ShardReport
from tidemill.kernels.weights.sharded_parts import Parts
from tidemill.schemas.records import TensorInfo


class CoverageError(ValueError):
    """The parts of the ranks are not one whole version."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What a rank holds of one tensor: elements [start, start + n)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    n: int
    fingerprint: Fingerprint
    """Of the part."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part of a version."""

    parts: Sequence[PartInfo]
    """Of every tensor, in the same order on every rank."""
    shards: Sequence[ShardReport]
    """The shards that the rank published; none where there is no delta."""


def part_infos(parts: Parts) -> list[PartInfo]:
    """What a rank says of its parts, in their order."""
    return [
        PartInfo(part.name, part.dtype, part.shape, part.start, part.bits.size, part.fingerprint())
        for part in parts.values()
    ]


def merged_tensors(reports: Sequence[RankReport]) -> list[TensorInfo]:
    """The tensors of the version that the reports of all ranks make up.

    Raises CoverageError when the ranks do not speak of the same tensors, or an element is held by none or by several.
    """
    if len({len(report.parts) for report in reports}) != 1:
        raise CoverageError("the ranks hold different numbers of tensors: give every rank's part of every tensor")
    return [_merged(parts) for parts in zip(*(report.parts for report in reports), strict=True)]


def _merged(parts: Sequence[PartInfo]) -> TensorInfo:
    first = parts[0]
    if len({(part.name, part.dtype, part.shape) for part in parts}) != 1:
        names = ", ".join(sorted({f"{part.name} ({part.dtype}, {part.shape})" for part in parts}))
        raise CoverageError(f"the ranks do not hold the same tensors in the same order: {names}")
    end = 0
    for part in sorted((part for part in parts if part.n), key=lambda part: part.start):
        if part.start != end:
            what = "by several ranks" if part.start < end else "by no rank"
            raise CoverageError(
                f"{first.name}: elements {min(part.start, end)} to {max(part.start, end)} are held {what}"
            )
        end += part.n
    if end != prod(first.shape):
        raise CoverageError(f"{first.name}: the ranks hold {end} of {prod(first.shape)} elements")
    fingerprint = sum((part.fingerprint for part in parts), ZERO)
    return TensorInfo(first.name, first.dtype, list(first.shape), fingerprint.hex())
