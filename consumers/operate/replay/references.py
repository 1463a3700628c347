"""References of records to places in the log, and making them point to the copies.

A reference is a topic (without prefix), partition and offset in a record: the rollouts of a group, the groups of a
step, the interactions of a batch or an outcome, the chunks of a version. A copy lies at another offset than its
original whenever the copied range does not begin at the partition's first record, or leaves records out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Record

Place = tuple[str, int, int]
"""Topic without prefix, partition, offset."""

REFERRING = frozenset(
    topic.value for topic in (Topic.GROUPS, Topic.ONLINE_BATCHES, Topic.OUTCOMES, Topic.STEPS, Topic.MANIFESTS)
)
"""Topics whose records hold references."""


def references(record: Record) -> Iterator[Place]:
    """Every place that a record refers to, in the order of its fields."""
    yield from _places(record)


def relocated(record: Record, to: Callable[[Place], int | None]) -> Record:
    """The record with each reference at the offset that `to` says, unchanged where it says None.

    Returns the same object when nothing changes.
    """
    moved: Record = _moved(record, to)
    return moved


def _is_reference(value: Any) -> bool:  # noqa: ANN401 - a record or a part of one
    return all(hasattr(value, name) for name in ("topic", "partition"))


def _places(value: Any) -> Iterator[Place]:  # noqa: ANN401
    if isinstance(value, list):
        for item in value:
            yield from _places(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _own_places(value)
        for entry in fields(value):
            yield from _places(getattr(value, entry.name))


def _own_places(value: Any) -> Iterator[Place]:  # noqa: ANN401
    if _is_reference(value):
        for offset in _offsets(value):
            yield value.topic, value.partition, offset


def _offsets(value: Any) -> list[int]:  # noqa: ANN401
    return list(value.offsets) if hasattr(value, "offsets") else [value.offset]


def _moved(value: Any, to: Callable[[Place], int | None]) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        items = [_moved(item, to) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for entry in fields(value):
        old = getattr(value, entry.name)
        new = _moved(old, to)
        if new is not old:
            changes[entry.name] = new
    changes |= _new_offsets(value, to)
    return replace(value, **changes) if changes else value


def _new_offsets(value: Any, to: Callable[[Place], int | None]) -> dict[str, Any]:  # noqa: ANN401
    if not _is_reference(value):
        return {}
    old = _offsets(value)
    found = [to((value.topic, value.partition, offset)) for offset in old]
    new = [offset if moved is None else moved for offset, moved in zip(old, found, strict=True)]
    if new == old:
        return {}
    return {"offsets": new} if hasattr(value, "offsets") else {"offset": new[0]}
