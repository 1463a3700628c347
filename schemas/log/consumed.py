"""A consumed record with its position in the log.

A value that cannot be decoded arrives as a `ConsumedRecord` whose `record` is None and whose `error` says why: the
caller decides where it goes, and the stream goes on. A record that a replay wrote carries the id of the replay in its
headers: a consumer that acts on records, the trainer above all, refuses it unless it was told of that replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Record

HEADER_REPLAY_ID = "tidemill-replay-id"
HEADER_REPLAY_SOURCE = "tidemill-replay-source"
"""`topic/partition/offset` of the record that was copied, under its full name."""

Headers = Iterable[tuple[str, bytes | None]]


class LogReference(Protocol):
    """A part of a record that refers to another record by its position."""

    @property
    def topic(self) -> str:
        """Without its prefix."""

    @property
    def partition(self) -> int:
        """Number of the partition."""

    @property
    def offset(self) -> int:
        """In the partition."""


@record(frozen=True, slots=True)
class Position:
    """Where a record lies in the log."""

    topic: str
    """Without its prefix, unless said otherwise."""
    partition: int
    offset: int

    @classmethod
    def of(cls, reference: LogReference) -> Position:
        """The position that a reference names."""
        return cls(reference.topic, reference.partition, reference.offset)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@record(frozen=True, slots=True)
class ConsumedRecord:
    """A record with its position in the log."""

    topic: Topic
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    record: Record | None
    error: str = ""
    """Why `record` is None."""
    replay_id: str = ""
    """The replay that wrote it; empty for a record that no replay wrote."""

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return Position(self.topic.value, self.partition, self.offset)


def consumed_record(message: Message, names: Names, codec: Codec) -> ConsumedRecord:
    """A message of the log, decoded where it can be."""
    value = message.value()
    record, error = decoded(codec, value)
    return ConsumedRecord(
        topic=names.parse(message.topic() or ""),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=value,
        record=record,
        error=error,
        replay_id=replay_id_of(cast("Headers | None", message.headers())),
    )


def decoded(codec: Codec, value: bytes | None) -> tuple[Record | None, str]:
    """The record of a value; None, and the reason, where it cannot be decoded."""
    try:
        return codec.decode(value), ""
    except DecodeError as failure:
        return None, str(failure)


def replay_id_of(headers: Headers | None) -> str:
    """The id of the replay that wrote a record; empty for a record that no replay wrote."""
    if not headers:
        return ""
    found = (value or b"" for name, value in headers if name == HEADER_REPLAY_ID)
    return next(found, b"").decode("utf-8", "replace")


def replay_headers(replay_id: str, full_topic: str, partition: int, offset: int) -> dict[str, bytes]:
    """The headers that a replay adds to a record that it copies."""
    return {
        HEADER_REPLAY_ID: replay_id.encode(),
        HEADER_REPLAY_SOURCE: f"{full_topic}/{partition}/{offset}".encode(),
    }
