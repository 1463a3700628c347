"""Reading ranges of the log without a group: nobody's committed offsets move, and nothing is written.

The end of every range is fixed before reading begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaError, TopicPartition

from tidemill.consumers.operate.reading import SILENCE_S
from tidemill.consumers.operate.replay.merge import Merge
from tidemill.consumers.operate.replay.raw import Lane, RawRecord, raw_record
from tidemill.consumers.operate.replay.selection import READ_COMMITTED
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, groupless_settings, raise_lasting
from tidemill.schemas.log.partitions import offset_since, watermarks

CLIENT_ID = "tidemill-replay"
POLL_S = 0.1
BATCH = 500
HELD_BYTES = 8 * 2**20
"""A partition that is so far ahead of the others is not fetched from until they have caught up."""


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets [start, end) of a partition."""

    start: int
    end: int


class LogSource:
    """The topics under one prefix, by their names without it."""

    def __init__(self, kafka: KafkaSettings, isolation: str = READ_COMMITTED) -> None:
        self._prefix = kafka.topic_prefix
        own = {"isolation.level": isolation, "enable.partition.eof": True}
        self._settings = groupless_settings(kafka, CLIENT_ID) | own
        self._consumer = Consumer(self._settings)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 when it does not exist."""
        full = self._prefix + topic
        found = self._consumer.list_topics(full, timeout=METADATA_TIMEOUT_S).topics[full]
        return 0 if found.error is not None else len(found.partitions)

    def bounds(self, lane: Lane) -> Range:
        """What the log holds of a partition now: from its first offset to the one that the next record will have."""
        return Range(*watermarks(self._consumer, self._full(lane)))

    def first_since(self, lane: Lane, timestamp_ms: int) -> int | None:
        """The first offset whose record is not older than a time; None when there is none."""
        return offset_since(self._consumer, self._full(lane), timestamp_ms)

    def first(self, lane: Lane) -> RawRecord | None:
        """The oldest record that the log holds of a partition."""
        return next(self.scan({lane: self.bounds(lane)}), None)

    def scan(self, ranges: Mapping[Lane, Range]) -> Iterator[RawRecord]:
        """Every record of some ranges, in offset order within each partition.

        Raises TimeoutError when the broker delivers nothing for a minute.
        """
        with _Reading(self._settings, self._prefix, ranges) as reading:
            while reading.left:
                yield from reading.poll()

    def ordered(self, ranges: Mapping[Lane, Range]) -> Iterator[tuple[int, RawRecord]]:
        """Every record of some ranges in the order of `Merge`, with the time that the merge has reached.

        Raises like `scan`.
        """
        merge = Merge(ranges)
        with _Reading(self._settings, self._prefix, ranges) as reading:
            open_lanes = set(ranges)
            while open_lanes:
                for record in reading.poll():
                    merge.add(record)
                for lane in open_lanes - reading.left:
                    merge.end(lane)
                open_lanes &= reading.left
                yield from merge.take()
                reading.hold_back({lane for lane in open_lanes if merge.held_bytes(lane) > HELD_BYTES})

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def _full(self, lane: Lane) -> Lane:
        return self._prefix + lane[0], lane[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reading:
    """One pass over some ranges.

    It has a consumer of its own: pauses and positions outlive the assignment that they were made in.
    """

    def __init__(self, settings: dict[str, Any], prefix: str, ranges: Mapping[Lane, Range]) -> None:
        self._consumer, self._prefix = Consumer(settings), prefix
        self._ends = {lane: r.end for lane, r in ranges.items()}
        self.left = {lane for lane, r in ranges.items() if r.start < r.end}
        self._held_back: set[Lane] = set()
        self._heard = time.monotonic()
        self._assignment = [TopicPartition(prefix + lane[0], lane[1], ranges[lane].start) for lane in sorted(self.left)]

    def __enter__(self) -> Self:
        self._consumer.assign(self._assignment)
        return self

    def __exit__(self, *_error: object) -> None:
        self._consumer.close()

    def poll(self) -> list[RawRecord]:
        """The next records; partitions that have been read to their end are no longer `left`."""
        found = []
        ended: set[Lane] = set()
        for message in self._consumer.consume(BATCH, POLL_S):
            error = message.error()
            if error is not None:
                raise_lasting(error)
                if error.code() == KafkaError._PARTITION_EOF:
                    ended.add(((message.topic() or "").removeprefix(self._prefix), message.partition() or 0))
                continue
            record = raw_record(message, self._prefix)
            if record.offset >= self._ends[record.lane]:
                ended.add(record.lane)
            elif record.lane in self.left:
                found.append(record)
        before = len(self.left)
        self._settle(found, ended)
        if found or len(self.left) < before or not self.left - self._held_back:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE_S:
            raise TimeoutError(f"the broker delivered nothing of {_named(self.left)} for {SILENCE_S:g} s")
        return found

    def hold_back(self, lanes: Iterable[Lane]) -> None:
        """Fetch from every partition that is left but these."""
        wanted = set(lanes) & self.left
        self._consumer.pause([self._at(lane) for lane in sorted(wanted - self._held_back)])
        self._consumer.resume([self._at(lane) for lane in sorted((self._held_back - wanted) & self.left)])
        self._held_back = wanted

    def _settle(self, found: list[RawRecord], ended: set[Lane]) -> None:
        """Take note of what is read to its end. Markers and compacted records at the end bring no record: there the
        consumer's position, or its word that nothing more can be read, says so."""
        done = ended | {r.lane for r in found if r.offset + 1 >= self._ends[r.lane]}
        for place in self._consumer.position(self._assignment):
            lane = (place.topic.removeprefix(self._prefix), place.partition)
            if place.offset >= self._ends[lane]:
                done.add(lane)
        finished = done & self.left
        if finished:
            self._consumer.pause([self._at(lane) for lane in sorted(finished)])
            self.left -= finished
            self._held_back -= finished

    def _at(self, lane: Lane) -> TopicPartition:
        return TopicPartition(self._prefix + lane[0], lane[1])


def _named(lanes: Iterable[Lane]) -> str:
    return ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(lanes))
