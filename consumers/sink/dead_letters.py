"""Reads the dead-letter topics: bytes as they are, with the headers that say where they came from and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

from tidemill.consumers.sink.rows import DeadLetter, Place, Row
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, groupless_settings
from tidemill.schemas.log.dead_letter import (
    HEADER_APPLICATION,
    HEADER_OFFSET,
    HEADER_PARTITION,
    HEADER_REASON,
    HEADER_TIMESTAMP,
    HEADER_TOPIC,
)
from tidemill.schemas.log.guard import ReadingGuard
from tidemill.schemas.log.partitions import watermarks

CLIENT_ID = "tidemill-sink-dlq"


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.lstrip("-").isdigit() else otherwise


def dead_letter_row(message: Message) -> Row:
    """The row of a dead letter. Headers that are missing or malformed leave the letter's own place in their stead."""
    raw = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    headers = {name: (value or b"").decode("utf-8", "replace") for name, value in raw}
    topic, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
    timestamp, value = message.timestamp()[1], message.value() or b""
    letter = DeadLetter(
        source_topic=headers.get(HEADER_TOPIC, topic),
        source_partition=_number(headers.get(HEADER_PARTITION, ""), partition),
        source_offset=_number(headers.get(HEADER_OFFSET, ""), offset),
        source_timestamp_ms=_number(headers.get(HEADER_TIMESTAMP, ""), timestamp),
        reason=headers.get(HEADER_REASON, "no reason given"),
        found_by=headers.get(HEADER_APPLICATION, "unknown"),
        value=value,
    )
    return Row(topic, partition, offset, timestamp, message.key() or b"", letter, len(value))


class DeadLetterReader:
    """Group-less reader of the dead-letter topics that exist, from chosen offsets.

    Args:
        start: next offsets; partitions not named begin at the beginning.
        topics: whose dead letters; of every topic by default.
    """

    def __init__(
        self, kafka: KafkaSettings, start: Mapping[Place, int], topics: Iterable[Topic] = tuple(CATALOGUE)
    ) -> None:
        self._consumer = Consumer(groupless_settings(kafka, CLIENT_ID) | {"auto.offset.reset": "error"})
        self._guard = ReadingGuard(self._consumer, CLIENT_ID, kafka)
        names = Names(kafka.topic_prefix)
        wanted = {names.dead_letter(topic) for topic in topics if CATALOGUE[topic].dead_letters}
        known = self._consumer.list_topics(timeout=METADATA_TIMEOUT_S).topics
        self._assignment = [
            TopicPartition(topic, partition, start.get((topic, partition), OFFSET_BEGINNING))
            for topic in sorted(wanted & set(known))
            for partition in known[topic].partitions
        ]
        self._next = {(tp.topic, tp.partition): tp.offset for tp in self._assignment if tp.offset != OFFSET_BEGINNING}
        self._consumer.assign(self._assignment)

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Row]:
        """The next dead letters, in offset order within each partition. Raises as `LogReader.poll`."""
        self._guard.check()
        found = (self._row(message) for message in self._consumer.consume(max_records, timeout_s))
        rows = [row for row in found if row is not None]
        if not rows:
            self._guard.check()
        self._guard.look(self._next, set())
        return rows

    def _row(self, message: Message) -> Row | None:
        place = (message.topic() or "", message.partition() or 0)
        error = message.error()
        if error is None:
            self._next[place] = (message.offset() or 0) + 1
            return dead_letter_row(message)
        onward = self._guard.take(error, place, self._next.get(place))
        if onward is not None:
            self._next[place] = onward
        return None

    def close(self) -> None:
        """Give the connections back."""
        self._guard.close()
        self._consumer.close()

    def read_to_end(self, deadline_s: float = 60.0) -> Iterator[Row]:
        """Every dead letter up to the end of each topic as it is now. Raises TimeoutError past the deadline."""
        deadline = time.monotonic() + deadline_s
        places = [(tp.topic, tp.partition) for tp in self._assignment]
        bounds = {place: watermarks(self._consumer, place) for place in places}
        left = {place: high for place, (low, high) in bounds.items() if high > low}
        while left:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the end of {sorted(topic for topic, _ in left)} was not reached in {deadline_s:g} s"
                )
            yield from self.poll(0.1)
            for tp in self._consumer.position(self._assignment):
                if tp.offset >= left.get((tp.topic, tp.partition), tp.offset + 1):
                    del left[tp.topic, tp.partition]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
