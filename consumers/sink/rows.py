"""The rows of a flush: records, dead letters and tombstones with their positions, and the time of the next flush.

A record whose packed arrays are not a whole number of elements is a dead letter: any process may have written its
bytes, and the schema accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tidemill.consumers.sink.columns import Gathered, packed_fields
from tidemill.consumers.sink.config import SinkSettings
from tidemill.schemas.catalogue import Names, Topic, is_compacted
from tidemill.schemas.log.client_settings import Partition
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Record

APPLICATION = "tidemill-sink"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A value that cannot be used: read from a dead-letter topic, or found by the sink itself."""

    source_topic: str
    source_partition: int
    source_offset: int
    source_timestamp_ms: int
    reason: str
    found_by: str
    """The application that wrote it as a dead letter."""
    value: bytes


@dataclass(frozen=True, slots=True)
class DeletedKey:
    """A tombstone of a compacted topic: it deletes the rows of its key and has no row of its own."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class Row:
    """One row to write. `(topic, partition, offset)` is its identity; `topic` is the full name."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    record: Record | DeadLetter | DeletedKey
    n_bytes: int
    """Size of the value, to limit a flush."""


def row_of(located: ConsumedRecord, names: Names, expected: tuple[type, ...]) -> Row:
    """Return the row of a record or a tombstone; of a dead letter if it is none of `expected` or fits no column."""
    topic = names.of(located.topic)
    place = (topic, located.partition, located.offset, located.timestamp_ms)
    record: Record | DeadLetter | DeletedKey | None = located.record
    value, reason = located.value or b"", ""
    if located.value is None and is_compacted(located.topic):
        record = DeletedKey(located.topic)
    elif record is None:
        record = DeadLetter(*place, located.error, APPLICATION, value)
    else:
        if not isinstance(record, expected):
            reason = f"a {type(record).__name__} has no place in {topic}"
        if reason := reason or packed_fault(record):
            record = DeadLetter(*place, reason, APPLICATION, value)
    return Row(*place, located.key or b"", record, len(value))


def packed_fault(record: object) -> str:
    """Return why a record's packed arrays cannot be unpacked; empty if they can."""
    gathered = Gathered([record])
    for path, size in packed_fields()[type(record)]:
        for chunk in gathered.values(*path):
            if len(chunk) % size:
                return f"{'.'.join(path)} has {len(chunk)} bytes, which is no whole number of elements of {size}"
    return ""


def cut(rows: Sequence[Row], most_bytes: int) -> Iterator[Sequence[Row]]:
    """Yield the rows in order, in groups of at most `most_bytes`; a longer row is a group of its own."""
    first, held = 0, 0
    for place, row in enumerate(rows):
        if held and held + row.n_bytes > most_bytes:
            yield rows[first:place]
            first, held = place, 0
        held += row.n_bytes
    if first < len(rows):
        yield rows[first:]


@dataclass
class PendingRows:
    """Rows that wait for the next flush."""

    settings: SinkSettings
    rows: list[Row] = field(default_factory=list)
    n_bytes: int = 0
    opened_at: float = 0.0
    """Time of the first row, in seconds on the caller's clock."""

    def add(self, rows: Iterable[Row], now: float) -> None:
        for row in rows:
            if not self.rows:
                self.opened_at = now
            self.rows.append(row)
            self.n_bytes += row.n_bytes

    def due(self, now: float) -> bool:
        if not self.rows:
            return False
        full = len(self.rows) >= self.settings.flush_rows or self.n_bytes >= self.settings.flush_bytes
        return full or now - self.opened_at >= self.settings.flush_seconds

    def next_offsets(self) -> dict[Partition, int]:
        """Return the offset after the last row of each partition."""
        return {(row.topic, row.partition): row.offset + 1 for row in self.rows}

    def clear(self) -> None:
        self.rows, self.n_bytes = [], 0
