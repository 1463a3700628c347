"""Records of the log as the operators' tools read them: their places, and topics read to their end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader

SILENCE_S = 60.0
"""Seconds without a record after which the broker counts as gone."""

Progress = Callable[[int, int], None]
"""Called with the number of offsets that were read, and the number of all."""
R = TypeVar("R")
Content = TypeVar("Content", covariant=True)


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Topic (without its prefix), partition and offset of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True)
class RecordAt(Generic[Content]):
    """A record, its place, and a digest of its bytes: a record may be in the log again only byte for byte the same."""

    place: RecordPlace
    record: Content
    digest: bytes


def place_of(consumed: ConsumedRecord) -> RecordPlace:
    """The place of a record."""
    return RecordPlace(consumed.topic.value, consumed.partition, consumed.offset)


def record_at(consumed: ConsumedRecord, record: R) -> RecordAt[R]:
    """A record with its place; a record without bytes is digested as it prints."""
    data = consumed.value if consumed.value else repr(record).encode()
    return RecordAt(place_of(consumed), record, hashlib.blake2b(data, digest_size=16).digest())


def no_progress(_done: int, _total: int) -> None:
    """Report progress to nobody."""


def read_whole(reader: LogReader) -> Iterator[ConsumedRecord]:
    """Every record up to the present end of the log. Raises TimeoutError when the broker stops delivering."""
    while True:
        before = reader.next_offsets()
        try:
            yield from reader.read_to_end(SILENCE_S)
            return
        except TimeoutError:
            if reader.next_offsets() == before:
                raise
