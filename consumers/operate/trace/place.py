"""Where a record lies, as a trace prints it."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.schemas.log.consumed import ConsumedRecord


@dataclass(frozen=True, slots=True)
class Place:
    """Topic (without its prefix), partition and offset of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def place_of(located: ConsumedRecord) -> Place:
    """The place of a record."""
    return Place(located.topic.value, located.partition, located.offset)
