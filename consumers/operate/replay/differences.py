"""Comparison of the records of two sides, by their identity and field by field. Pure.

Records of one side with the same identity and equal bytes count once: a worker that was killed may have written a
record again. Records with the same identity and different bytes are numbered in their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidemill.schemas import records as r
from tidemill.schemas.log.consumed import Position

ABSENT = "nothing"
SHOWN_BYTES = 16


class DifferenceKind(StrEnum):
    CHANGED = "changed"
    ONLY_THERE = "only_there"
    ONLY_HERE = "only_here"


@dataclass(frozen=True, slots=True)
class Item:
    key: bytes | None
    value: bytes | None
    record: r.Record | None
    place: Position
    """Its position, with the full topic name; that of the record that decided it if it was not written."""
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field in which two records differ, by its path; for a side without it, its text says so."""

    path: str
    there: str
    here: str


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    kind: DifferenceKind
    at_us: int
    """Event time: when the subject of the record ended, or its timestamp."""
    there: Position | None
    here: Position | None
    fields: list[FieldChange]
    """Empty for a record that only one side has, and for equal records that were written with different schemas."""


@dataclass(frozen=True, slots=True)
class OutputComparison:
    there: int
    here: int
    """Records of each side, without repetitions."""
    identical: int
    differences: list[Difference]
    """In order of event time, then of position."""
    repeated_there: int
    repeated_here: int
    """Records that repeat an earlier one, byte for byte."""

    @property
    def total(self) -> int:
        """Number of identities on either side."""
        return self.identical + len(self.differences)

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def count(self, kind: DifferenceKind) -> int:
        return sum(difference.kind is kind for difference in self.differences)


def compare(
    there: Iterable[Item], here: Iterable[Item], begin: int | None = None, end: int | None = None
) -> OutputComparison:
    """Compare two sides: every identity of which at least one side has a record that ended in [begin, end), in
    microseconds of event time; None is an open bound."""

    def within(item: Item) -> bool:
        at = event_us(item)
        return (begin is None or at >= begin) and (end is None or at < end)

    left, repeated_there = named(there)
    right, repeated_here = named(here)
    names = [
        name
        for name in dict.fromkeys([*left, *right])
        if any(within(side[name]) for side in (left, right) if name in side)
    ]
    found = []
    for name in names:
        one, other = left.get(name), right.get(name)
        fields: list[FieldChange] = []
        if one is None or other is None:
            kind = DifferenceKind.ONLY_HERE if one is None else DifferenceKind.ONLY_THERE
        elif one.value == other.value:
            continue
        else:
            kind = DifferenceKind.CHANGED
            if one.record is None or other.record is None:
                fields = list(field_changes(one.value, other.value, "value"))
            else:
                fields = list(field_changes(one.record, other.record))
        sides = [item for item in (one, other) if item is not None]
        at_us, first = min(map(event_us, sides)), sides[0].place
        places = (None if one is None else one.place, None if other is None else other.place)
        found.append(((at_us, first.partition, first.offset, name), Difference(name, kind, at_us, *places, fields)))
    differences = [difference for _, difference in sorted(found, key=lambda pair: pair[0])]
    return OutputComparison(
        there=sum(name in left for name in names),
        here=sum(name in right for name in names),
        identical=len(names) - len(differences),
        differences=differences,
        repeated_there=repeated_there,
        repeated_here=repeated_here,
    )


def named(items: Iterable[Item]) -> tuple[dict[str, Item], int]:
    """Return the records by identity in their order, and the number of repetitions."""
    found: dict[str, Item] = {}
    known: dict[str, set[bytes | None]] = {}
    repeated = 0
    for item in items:
        name = identity(item)
        values = known.setdefault(name, set())
        if item.value in values:
            repeated += 1
            continue
        values.add(item.value)
        found[name if len(values) == 1 else f"{name}#{len(values)}"] = item
    return found, repeated


def out_of_order(there: Iterable[Item], here: Iterable[Item]) -> tuple[Item, Item] | None:
    """Return the first two records whose order differs, among those that a partition has on both sides, or None."""
    sides: list[dict[int, dict[str, Item]]] = [{}, {}]
    for by_partition, items in zip(sides, (there, here), strict=True):
        for name, item in sorted(named(items)[0].items(), key=lambda entry: entry[1].place.offset):
            by_partition.setdefault(item.place.partition, {})[name] = item
    left, right = sides
    for partition in sorted(left.keys() & right.keys()):
        one, other = left[partition], right[partition]
        shared = one.keys() & other.keys()
        pairs = zip((n for n in one if n in shared), (n for n in other if n in shared), strict=True)
        moved = next(((a, b) for a, b in pairs if a != b), None)
        if moved is not None:
            return one[moved[0]], other[moved[1]]
    return None


def identity(item: Item) -> str:
    """Return the key by which two records count as the same one, even if their contents differ."""
    match item.record:
        case r.Group(group_id=group_id, closed_by=closed_by, members=members):
            late = closed_by is r.CloseReason.LATE and members
            return f"{group_id}, late {members[0].rollout_id}" if late else group_id
        case r.Outcome(interaction_id=name, revision=revision):
            return f"{name}, revision {revision}"
        case r.OnlineBatch(run_id=run_id, branch=branch, sequence=sequence):
            return f"{run_id}, {branch}, batch {sequence}"
        case r.TrainStep(run_id=run_id, step=step):
            return f"{run_id}, step {step}"
        case r.StepPlan(run_id=run_id, step=step):
            return f"{run_id}, plan of step {step}"
        case r.Rollout(rollout_id=name) | r.Interaction(interaction_id=name):
            return name
        case r.Manifest(run_id=run_id, branch=branch, version=version):
            return f"{run_id}, {branch}, version {version}"
        case r.SkipDelta(run_id=run_id, branch=branch, version=version, base=base):
            return f"{run_id}, {branch}, version {version} from {base}"
        case _:
            if item.key is None:
                return f"no key, partition {item.place.partition}"
            return item.key.decode("utf-8", "backslashreplace")


def event_us(item: Item) -> int:
    """Return when the subject of a record ended, in microseconds; the timestamp of a record without such a field."""
    match item.record:
        case r.Group(closed_at=at) | r.Outcome(closed_at=at) | r.OnlineBatch(closed_at=at):
            return at
        case _:
            return item.timestamp_ms * 1_000


def field_changes(there: Any, here: Any, path: str = "") -> Iterator[FieldChange]:  # noqa: ANN401 - parts of records
    """Yield the fields in which two records differ, in the order of the schema."""
    if type(there) is type(here):
        if dataclasses.is_dataclass(there):
            for name in (field.name for field in dataclasses.fields(there)):
                inner = f"{path}.{name}" if path else name
                yield from field_changes(getattr(there, name), getattr(here, name), inner)
            return
        if isinstance(there, Sequence | Mapping) and not isinstance(there, str | bytes):
            left, right = (dict(enumerate(x)) if isinstance(x, Sequence) else x for x in (there, here))
            for key in sorted(left.keys() | right.keys()):
                if key in left and key in right:
                    yield from field_changes(left[key], right[key], f"{path}[{key}]")
                else:
                    yield FieldChange(
                        f"{path}[{key}]", *(_shown(x[key]) if key in x else ABSENT for x in (left, right))
                    )
            return
    # `repr` makes a NaN equal to itself: it has the same bytes.
    if repr(there) != repr(here):
        yield FieldChange(path, _shown(there), _shown(here))


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        tail = "..." if len(value) > SHOWN_BYTES else ""
        return f"{len(value)} bytes {value[:SHOWN_BYTES].hex()}{tail}"
    return str(value)
