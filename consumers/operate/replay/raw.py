"""A record as it lies in the log, undecoded: what is copied must be what was written, whether it can be read or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from confluent_kafka import Message

from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX, Topic

Header = tuple[str, bytes | None]
Lane = tuple[str, int]
"""A topic's name without its prefix, and a partition of it."""

RANK = {
    name: rank
    for rank, name in enumerate(f"{topic.value}{suffix}" for suffix in ("", DEAD_LETTER_SUFFIX) for topic in CATALOGUE)
}
"""Every topic that can be replayed, with its place in the order of the catalogue: causes before effects."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record of the log."""

    topic: str
    """Without its prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()

    @property
    def lane(self) -> Lane:
        """Its topic and partition."""
        return self.topic, self.partition

    @property
    def n_bytes(self) -> int:
        """Bytes of key, value and headers."""
        named = sum(len(name.encode()) + len(value or b"") for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + named

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def raw_record(message: Message, prefix: str) -> RawRecord:
    """A consumed message of a topic under `prefix`."""
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
    """The catalogue's topic of a name, that of the source for a dead-letter topic. Raises ValueError."""
    if name not in RANK:
        raise ValueError(
            f"no topic {name!r}: there are {', '.join(topic.value for topic in CATALOGUE)}, each with .dlq"
        )
    return Topic(name.removesuffix(DEAD_LETTER_SUFFIX))
