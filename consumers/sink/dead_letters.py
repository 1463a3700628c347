"""Reads the dead-letter topics: unchanged bytes, with the headers that name their origin and the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Message

from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, Partition
from tidemill.schemas.log.producer import (
    HEADER_APPLICATION,
    HEADER_OFFSET,
    HEADER_PARTITION,
    HEADER_REASON,
    HEADER_TIMESTAMP,
    HEADER_TOPIC,
)
from tidemill.schemas.log.reader import PartitionReader

CLIENT_ID = "tidemill-sink-dlq"


def dead_letter(
    raw_headers: Iterable[tuple[str, bytes | None]], own: tuple[str, int, int, int], value: bytes
) -> DeadLetter:
    """Return a dead letter from its headers.

    Args:
        own: topic, partition, offset and timestamp (ms) used for headers that are missing or malformed.
    """
    headers = {name: (said or b"").decode("utf-8", "replace") for name, said in raw_headers}

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
        wanted = {names.dead_letter(topic) for topic in topics if CATALOGUE[topic].dead_letters}
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
        """Close the connections."""
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()
