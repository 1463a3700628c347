"""A consumed record with its place in the log.

A value that cannot be decoded arrives as a `ConsumedRecord` whose `record` is None and whose `error` says why: the
caller decides where it goes, and the stream goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.log.replayed import Headers, replay_id_of
from tidemill.schemas.records import Record


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record lies in the log."""

    topic: Topic
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class ConsumedRecord:
    """A record with its place in the log."""

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
        return Position(self.topic, self.partition, self.offset)


def locate(message: Message, names: Names, codec: Codec) -> ConsumedRecord:
    """A consumed message as a `ConsumedRecord`, decoded where it can be."""
    record, error = None, ""
    try:
        record = codec.decode(message.value())
    except DecodeError as failure:
        error = str(failure)
    return ConsumedRecord(
        topic=names.parse(message.topic() or ""),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        record=record,
        error=error,
        replay_id=replay_id_of(cast("Headers | None", message.headers())),
    )
