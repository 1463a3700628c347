"""Rows: records, dead letters and tombstones with their positions, and the reader of the dead-letter topics.

A dead letter has the unchanged bytes, and headers that name their origin and the reason.

A record whose packed arrays are not a whole number of elements is a dead letter: any process may have written its
bytes, and the schema accepts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Message

from tidemill.consumers.sink.columns import Gathered, packed_fields
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic, is_compacted
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, Partition
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import (
    HEADER_APPLICATION,
    HEADER_OFFSET,
    HEADER_PARTITION,
    HEADER_REASON,
    HEADER_TIMESTAMP,
    HEADER_TOPIC,
)
from tidemill.schemas.log.reader import PartitionReader
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


CLIENT_ID = "tidemill-sink-dlq"


def dead_letter(
    raw_headers: Iterable[tuple[str, bytes | None]], own: tuple[str, int, int, int], value: bytes
) -> DeadLetter:
    """Return a dead letter from its headers.

    Args:
        own: topic, partition, offset and timestamp (ms) used for headers that are missing or malformed.
    """
    headers = {name: (content or b"").decode("utf-8", "replace") for name, content in raw_headers}

    def number(header: str, otherwise: int, digits: int = 18) -> int:
        # At most as many digits as the column of the number can hold.
        text = headers.get(header, "")
        return int(text) if re.fullmatch(rf"-?[0-9]{{1,{digits}}}", text) else otherwise

    return DeadLetter(
        source_topic=headers.get(HEADER_TOPIC, own[0]),
        source_partition=number(HEADER_PARTITION, own[1], digits=9),
        source_offset=number(HEADER_OFFSET, own[2]),
        source_timestamp_ms=number(HEADER_TIMESTAMP, own[3]),
        reason=headers.get(HEADER_REASON, "no reason given"),
        found_by=headers.get(HEADER_APPLICATION, "unknown"),
        value=value,
    )


def dead_letter_row(message: Message) -> Row:
    """Return the row of a dead letter. The letter's own position replaces headers that are missing or malformed."""
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    own = (message.topic() or "", message.partition() or 0, message.offset() or 0, message.timestamp()[1])
    value = message.value() or b""
    return Row(*own, message.key() or b"", dead_letter(headers, own, value), len(value))


class DeadLetterReader(AbstractContextManager["DeadLetterReader"]):
    """Reader, without a consumer group, of the dead-letter topics that exist, from given offsets.

    Args:
        start: next offsets; other partitions are read from the beginning.
        topics: source topics of the dead letters; every topic by default.
        gaps: skip dead letters that the log no longer keeps, without an error.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        start: Mapping[Partition, int],
        topics: Iterable[Topic] = tuple(CATALOGUE),
        *,
        gaps: bool = False,
    ) -> None:
        self._log = PartitionReader(kafka, CLIENT_ID)
        names = Names(kafka.topic_prefix)
        wanted = {names.dead_letter(topic) for topic in topics}
        known = self._log.client.list_topics(timeout=METADATA_TIMEOUT_S).topics
        partitions = [(topic, number) for topic in sorted(wanted & set(known)) for number in known[topic].partitions]
        self._log.assign({partition: start.get(partition, OFFSET_BEGINNING) for partition in partitions}, gaps=gaps)

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Row]:
        """Return the next dead letters, in offset order within each partition. Raises like `LogReader.poll`."""
        return [dead_letter_row(message) for message in self._log.poll(timeout_s, max_records)]

    def read_to_end(self) -> Iterator[Row]:
        """Yield every dead letter up to the current end of each topic. Raises like `LogReader.read_to_end`."""
        for messages in self._log.read_until(self._log.ends()):
            yield from map(dead_letter_row, messages)

    def close(self) -> None:
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()
