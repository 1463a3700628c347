"""How much of each partition was read: its ends, its records, and the offsets that no reader gets to see.

An offset without a record is a transaction's marker or an aborted record where the topic's writer uses transactions,
and a record that the broker has dropped where the topic is compacted. Elsewhere there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic, is_compacted

TRANSACTIONAL = frozenset({Topic.STEPS, Topic.MANIFESTS})
"""What a trainer writes within transactions, so that a deposed one is shut out."""

Partition = tuple[Topic, int]


def may_have_gaps(topic: Topic) -> bool:
    """Whether offsets without a record are in order."""
    return topic in TRANSACTIONAL or is_compacted(topic)


@dataclass(slots=True)
class PartitionFacts:
    """What was read of one partition."""

    low: int
    """First offset that the broker keeps."""
    high: int
    """The offset after the last one."""
    following: int = field(init=False)
    """The offset after the last record read."""
    records: int = 0
    hidden: int = 0
    """Offsets between records, and before the end, that no record was read from."""
    first_gap: int | None = None

    def __post_init__(self) -> None:
        self.following = self.low

    def observe(self, offset: int) -> None:
        """A record was read. Offsets rise."""
        self._skip_to(offset)
        self.records += 1
        self.following = offset + 1
        self.high = max(self.high, self.following)

    def finish(self) -> None:
        """Everything was read."""
        self._skip_to(self.high)
        self.following = self.high

    def _skip_to(self, offset: int) -> None:
        if offset > self.following:
            self.first_gap = self.following if self.first_gap is None else self.first_gap
            self.hidden += offset - self.following
