"""A consumed record with its position in the log.

A value that cannot be decoded is a `ConsumedRecord` whose `record` is None and whose `error` is the reason: the caller
decides what to do with it, and reading continues. A record that a replay wrote has the id of the replay in its headers:
a consumer that acts on records, the trainer above all, refuses it unless its settings accept that replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.record_class import record
from tidemill.schemas.records import GroupMember, OnlineMember, Outcome, Record, SignalUse, StepExclusion, StepInput

HEADER_REPLAY_ID = "tidemill-replay-id"
HEADER_REPLAY_SOURCE = "tidemill-replay-source"
"""`topic/partition/offset` of the record that was copied, with the topic's full name."""

Headers = Iterable[tuple[str, bytes | None]]


LogReference = GroupMember | OnlineMember | StepInput | StepExclusion | SignalUse | Outcome
"""A part of a record that refers to another record by its topic (without prefix), partition and offset."""


@record(frozen=True, slots=True)
class Position:
    """The position of a record in the log."""

    topic: str
    """Name without the prefix, unless stated otherwise."""
    partition: int
    offset: int

    @classmethod
    def of(cls, reference: LogReference) -> Position:
        """Return the position that a reference contains."""
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
    """Reason why `record` is None."""
    replay_id: str = ""
    """Id of the replay that wrote it; empty for a record that no replay wrote."""

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return Position(self.topic.value, self.partition, self.offset)


def consumed_record(message: Message, names: Names, codec: Codec) -> ConsumedRecord:
    """Return the consumed record of a Kafka message, decoded if possible."""
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
    """Return the decoded record and ""; None and the reason if the value cannot be decoded."""
    try:
        return codec.decode(value), ""
    except DecodeError as failure:
        return None, str(failure)


def replay_id_of(headers: Headers | None) -> str:
    """Return the id of the replay that wrote a record; an empty string if no replay wrote it."""
    if not headers:
        return ""
    found = (value or b"" for name, value in headers if name == HEADER_REPLAY_ID)
    return next(found, b"").decode("utf-8", "replace")


def replay_headers(replay_id: str, full_topic: str, partition: int, offset: int) -> dict[str, bytes]:
    """Return the headers that a replay adds to a record that it copies."""
    return {HEADER_REPLAY_ID: replay_id.encode(), HEADER_REPLAY_SOURCE: f"{full_topic}/{partition}/{offset}".encode()}
