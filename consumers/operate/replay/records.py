"""Undecoded records as they are in the log, the references of records to other positions, and readers of both.

A copy must equal the bytes that were written, whether they can be decoded or not. A reference is a topic (without
prefix), partition and offset in a record: the rollouts of a group, the groups of a step, the interactions of a batch or
an outcome, the chunks of a version. A copy has a different offset from its original if the copied range does not begin
at the partition's first record, or omits records; references are then changed to point to the copies.

Ranges are read without a consumer group: no committed offsets move, and nothing is written. The end of every range is
fixed before reading begins. The order of a replay merges the records of many partitions by (timestamp, topic,
partition, offset). The order within a partition never changes: a record with an earlier timestamp than the record
before it counts as if it had the later time, so that the merged times never go back. The order depends on the records
alone, not on how they arrive from the broker.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S
from tidemill.schemas.log.reader import PartitionReader
from tidemill.schemas.log.watermarks import offset_since, watermarks
from tidemill.schemas.records import Record

Header = tuple[str, bytes | None]
Lane = tuple[str, int]
"""A topic's name without its prefix, and a partition."""

RANK = {
    name: rank
    for rank, name in enumerate(f"{topic.value}{suffix}" for suffix in ("", DEAD_LETTER_SUFFIX) for topic in CATALOGUE)
}
"""Every topic that can be replayed, with its index in the order of the catalogue: causes before effects."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    topic: str
    """Topic name without its prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()

    @property
    def lane(self) -> Lane:
        return self.topic, self.partition

    @property
    def n_bytes(self) -> int:
        named = sum(len(name.encode()) + len(value or b"") for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + named

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def raw_record(message: Message, prefix: str) -> RawRecord:
    """Convert a consumed message of a topic under `prefix`."""
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
    """Return the catalogue's topic for a name; for a dead-letter topic, its source topic. Raises ValueError."""
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


def parts(value: Any) -> Iterator[Any]:  # noqa: ANN401 - a record or a part of one
    """Yield a record and every record within it, in the order of the fields."""
    if isinstance(value, list):
        for item in value:
            yield from parts(item)
    elif is_dataclass(value):
        yield value
        for entry in fields(value):
            yield from parts(getattr(value, entry.name))


def references(record: Record | None) -> Iterator[Place]:
    """Return every position that a record refers to, in the order of its fields."""
    return (place for part in parts(record) for place in _places(part))


def relocated(value: Any, to: Callable[[Place], int | None]) -> Any:  # noqa: ANN401 - a record or a part of one
    """Return the record with the offset of each reference replaced by that from `to`; None keeps the reference.

    Returns the same object if nothing changes.
    """
    if isinstance(value, list):
        items = [relocated(item, to) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if not is_dataclass(value):
        return value
    old = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    new = {name: relocated(held, to) for name, held in old.items()}
    changes = {name: held for name, held in new.items() if held is not old[name]}
    places = _places(value)
    moved = [place[2] if (other := to(place)) is None else other for place in places]
    if moved != [place[2] for place in places]:
        changes |= {"offsets": moved} if hasattr(value, "offsets") else {"offset": moved[0]}
    part: Any = value
    return replace(part, **changes) if changes else value


def _places(value: Any) -> list[Place]:  # noqa: ANN401 - a record or a part of one
    """Return the positions that a reference names; none for any other value."""
    if not (hasattr(value, "topic") and hasattr(value, "partition")):
        return []
    offsets = value.offsets if hasattr(value, "offsets") else [value.offset]
    return [(value.topic, value.partition, offset) for offset in offsets]


READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"
CLIENT_ID = "tidemill-replay"
HELD_BYTES = 8 * 2**20
"""Held bytes from which a partition that is ahead of the others is paused until they have caught up."""


class Range(NamedTuple):
    """Offsets [start, end) of a partition."""

    start: int
    end: int


class LogSource:
    """The topics under one prefix, by their names without it."""

    def __init__(self, kafka: KafkaSettings, isolation: str = READ_COMMITTED) -> None:
        self._kafka, self._isolation = kafka, isolation
        self._log = self._reader()
        self._partitions: dict[str, int] = {}

    def _reader(self) -> PartitionReader:
        return PartitionReader(self._kafka, CLIENT_ID, isolation=self._isolation)

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic at the first call; 0 if it did not exist."""
        if not self._partitions:
            # All topics in one request: a command may need every topic, and each request is a round trip.
            topics = self._log.client.list_topics(timeout=METADATA_TIMEOUT_S).topics
            self._partitions = {name: len(found.partitions) for name, found in topics.items()}
        return self._partitions.get(self._kafka.topic_prefix + topic, 0)

    def bounds(self, lane: Lane) -> Range:
        """Return the offsets that the log holds of a partition now: the first one, and that of the next record."""
        return Range(*watermarks(self._log.client, self._full(lane)))

    def whole(self, topics: Iterable[str]) -> dict[Lane, Range]:
        """Return the offsets that the log holds now of every partition of these topics, if they exist."""
        lanes = [(topic, partition) for topic in topics for partition in range(self.partitions(topic))]
        return {lane: self.bounds(lane) for lane in lanes}

    def first_since(self, lane: Lane, timestamp_ms: int) -> int | None:
        """Return the first offset whose record is not older than a time; None if there is none."""
        return offset_since(self._log.client, self._full(lane), timestamp_ms)

    def first(self, lane: Lane) -> RawRecord | None:
        return next(self.scan({lane: self.bounds(lane)}), None)

    def scan(self, ranges: Mapping[Lane, Range]) -> Iterator[RawRecord]:
        """Yield every record of the ranges, in offset order within each partition.

        Raises TimeoutError if the broker delivers nothing for a minute.
        """
        with closing(self._reader()) as log:
            for messages in log.read_ranges({self._full(lane): held for lane, held in ranges.items()}):
                yield from (raw_record(message, self._kafka.topic_prefix) for message in messages)

    def ordered(self, ranges: Mapping[Lane, Range]) -> Iterator[tuple[int, RawRecord]]:
        """Yield every record of the ranges in the order of a replay, with the time that the order has reached.

        Raises the errors of `scan`.
        """
        left = set(ranges)
        with closing(self._reader()) as log:
            arriving = log.read_ranges({self._full(lane): held for lane, held in ranges.items()})

            def more(held_bytes: Mapping[Lane, int]) -> tuple[list[RawRecord], set[Lane]]:
                log.hold_back(self._full(lane) for lane, n_bytes in held_bytes.items() if n_bytes > HELD_BYTES)
                records = [raw_record(message, self._kafka.topic_prefix) for message in next(arriving, [])]
                ended = {lane for lane in left if self._full(lane) not in log.next_offsets()}
                left.difference_update(ended)
                return records, ended

            yield from merged(ranges, more)

    def close(self) -> None:
        self._log.close()

    def _full(self, lane: Lane) -> Lane:
        return self._kafka.topic_prefix + lane[0], lane[1]


OVERHEAD_BYTES = 500
"""Memory of a record in addition to its bytes."""


def merged(
    lanes: Iterable[Lane], more: Callable[[Mapping[Lane, int]], tuple[Iterable[RawRecord], Iterable[Lane]]]
) -> Iterator[tuple[int, RawRecord]]:
    """Merge partitions into the order of a replay; yield each record with the time that the order has reached.

    Args:
        more: called with the size of the records of each partition that wait for those of other partitions. Returns
            the next records, in offset order within each partition, and the partitions that have no more records.
    """
    held: dict[Lane, deque[RawRecord]] = {lane: deque() for lane in lanes}
    held_bytes, ended = dict.fromkeys(held, 0), set[Lane]()

    def in_order(lane: Lane) -> Iterator[tuple[tuple[int, ...], RawRecord]]:
        reached = 0
        while True:
            while not held[lane]:
                if lane in ended:
                    return
                records, over = more(held_bytes)
                for record in records:
                    held[record.lane].append(record)
                    held_bytes[record.lane] += record.n_bytes + OVERHEAD_BYTES
                ended.update(over)
            record = held[lane].popleft()
            held_bytes[lane] -= record.n_bytes + OVERHEAD_BYTES
            reached = max(reached, record.timestamp_ms)
            yield (reached, RANK[record.topic], record.partition, record.offset), record

    for (reached, *_), record in heapq.merge(*map(in_order, held), key=lambda entry: entry[0]):
        yield reached, record
