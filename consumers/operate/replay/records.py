"""Records as they are in the log, undecoded, and the references of records to other places in the log.

A copy must equal the bytes that were written, whether they can be decoded or not. A reference is a topic (without
prefix), partition and offset in a record: the rollouts of a group, the groups of a step, the interactions of a batch or
an outcome, the chunks of a version. A copy has another offset than its original whenever the copied range does not
begin at the partition's first record, or leaves records out; references are then changed to point to the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX, Topic
from tidemill.schemas.records import Record

Header = tuple[str, bytes | None]
Lane = tuple[str, int]
"""A topic's name without its prefix, and a partition."""

RANK = {
    name: rank
    for rank, name in enumerate(f"{topic.value}{suffix}" for suffix in ("", DEAD_LETTER_SUFFIX) for topic in CATALOGUE)
}
"""Every topic that can be replayed, with its place in the order of the catalogue: causes before effects."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record of the log."""

    topic: str
    """Without its prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()

    @property
    def lane(self) -> Lane:
        """Its topic and partition."""
        return self.topic, self.partition

    @property
    def n_bytes(self) -> int:
        """Bytes of key, value and headers."""
        named = sum(len(name.encode()) + len(value or b"") for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + named

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def raw_record(message: Message, prefix: str) -> RawRecord:
    """A consumed message of a topic under `prefix`."""
    return RawRecord(
        topic=(message.topic() or "").removeprefix(prefix),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple(cast("list[Header]", message.headers() or [])),
    )


def topic_of(name: str) -> Topic:
    """The catalogue's topic of a name, that of the source for a dead-letter topic. Raises ValueError."""
    if name not in RANK:
        raise ValueError(
            f"no topic {name!r}: there are {', '.join(topic.value for topic in CATALOGUE)}, each with .dlq"
        )
    return Topic(name.removesuffix(DEAD_LETTER_SUFFIX))


Place = tuple[str, int, int]
"""Topic without prefix, partition, offset."""

REFERRING = frozenset(
    topic.value for topic in (Topic.GROUPS, Topic.ONLINE_BATCHES, Topic.OUTCOMES, Topic.STEPS, Topic.MANIFESTS)
)
"""Topics whose records hold references."""


def references(value: Any) -> Iterator[Place]:  # noqa: ANN401 - a record or a part of one
    """Every place that a record refers to, in the order of its fields."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    if _is_reference(value):
        yield from ((value.topic, value.partition, offset) for offset in _offsets(value))
    if is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from references(getattr(value, entry.name))


def relocated(record: Record, to: Callable[[Place], int | None]) -> Record:
    """The record with each reference at the offset that `to` says, unchanged where it says None.

    Returns the same object when nothing changes.
    """
    moved: Record = _moved(record, to)
    return moved


def _is_reference(value: Any) -> bool:  # noqa: ANN401 - a record or a part of one
    return all(hasattr(value, name) for name in ("topic", "partition"))


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
