"""What a flush holds: records, dead letters and tombstones with their place in the log."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.sink.misfit import misfit
from tidemill.schemas.catalogue import Names, Topic, is_compacted
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Record

APPLICATION = "tidemill-sink"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A value that nobody could use: read from a dead-letter topic, or met by the sink itself."""

    source_topic: str
    source_partition: int
    source_offset: int
    source_timestamp_ms: int
    reason: str
    found_by: str
    """The application that gave it up."""
    value: bytes


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The end of what a compacted topic holds under a key: an order to delete, and no row of its own."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class Row:
    """One row to write. `(topic, partition, offset)` is its identity; `topic` is the full name."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    record: Record | DeadLetter | Tombstone
    n_bytes: int
    """Size of the value, for bounding a flush."""


def _objection(record: object, expected: tuple[type, ...], topic: str) -> str:
    if not isinstance(record, expected):
        return f"a {type(record).__name__} has no place in {topic}"
    return misfit(record)


def row_of(located: ConsumedRecord, names: Names, expected: tuple[type, ...]) -> Row:
    """The row of a record or a tombstone; of a dead letter when it is none of `expected` or no column can hold it."""
    topic = names.of(located.topic)
    record: Record | DeadLetter | Tombstone | None = located.record
    if located.value is None and is_compacted(located.topic):
        record = Tombstone(located.topic)
    elif record is None or (reason := _objection(record, expected, topic)):
        record = DeadLetter(
            source_topic=topic,
            source_partition=located.partition,
            source_offset=located.offset,
            source_timestamp_ms=located.timestamp_ms,
            reason=located.error if record is None else reason,
            found_by=APPLICATION,
            value=located.value or b"",
        )
    return Row(
        topic=topic,
        partition=located.partition,
        offset=located.offset,
        timestamp_ms=located.timestamp_ms,
        key=located.key or b"",
        record=record,
        n_bytes=len(located.value or b""),
    )
