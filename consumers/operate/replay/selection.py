"""What is to be replayed, as an operator says it, and the parsers of how he says it.

Every condition narrows the choice: a record is replayed when it lies in one of the topics, within the offsets and the
times, belongs to one of the steps, versions or groups where any are named, and fits the expression.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from tidemill.consumers.operate.replay.raw import topic_of

READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [start, end) of one partition of a topic, or of each; None reaches to the partition's own bound."""

    topic: str
    partition: int | None
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers first to last, both included."""

    first: int
    last: int

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be replayed."""

    topics: tuple[str, ...] = ()
    """Without prefix, in the order of the catalogue. Empty: those that the steps, versions or groups lie in."""
    from_ms: int | None = None
    to_ms: int | None = None
    """Record times [from, to), milliseconds since the Unix epoch."""
    offsets: tuple[OffsetRange, ...] = ()
    steps: tuple[Span, ...] = ()
    versions: tuple[Span, ...] = ()
    groups: tuple[str, ...] = ()
    where: str = ""
    run_id: str = ""
    """Whose steps and versions are meant."""
    isolation: str = READ_COMMITTED

    def __post_init__(self) -> None:
        for name in (*self.topics, *(r.topic for r in self.offsets)):
            topic_of(name)
        if not (self.topics or self.offsets or self.names_records):
            raise ValueError("nothing is chosen: give --topic, --offsets, --step, --version or --group")
        if self.from_ms is not None and self.to_ms is not None and self.from_ms >= self.to_ms:
            raise ValueError(
                f"the range of times is empty: {utc_text(self.from_ms)} is not before {utc_text(self.to_ms)}"
            )
        if self.isolation not in (READ_COMMITTED, READ_UNCOMMITTED):
            raise ValueError(f"isolation {self.isolation!r}: give {READ_COMMITTED} or {READ_UNCOMMITTED}")

    @property
    def names_records(self) -> bool:
        """Whether it names records by what they belong to."""
        return bool(self.steps or self.versions or self.groups)

    def in_times(self, timestamp_ms: int) -> bool:
        """Whether a record's time is within the range."""
        after = self.from_ms is None or timestamp_ms >= self.from_ms
        return after and (self.to_ms is None or timestamp_ms < self.to_ms)

    def ranges_of(self, topic: str, partition: int) -> list[OffsetRange]:
        """The ranges that speak of a partition; none where the topic is chosen without offsets."""
        return [r for r in self.offsets if r.topic == topic and r.partition in (None, partition)]

    def limits(self, topic: str) -> bool:
        """Whether offsets were given for a topic, so that partitions without any are left out."""
        return any(r.topic == topic for r in self.offsets)

    def digest(self, prefix: str) -> str:
        """sha256 of what is selected of the topics under a prefix: two commands that mean the same have the same."""
        return hashlib.sha256(json.dumps([prefix, asdict(self)], sort_keys=True).encode()).hexdigest()


def offset_range(text: str) -> OffsetRange:
    """`rollouts/3=100:200` is partition 3 from offset 100 up to, not including, 200; `rollouts=100:` every partition.

    Raises ValueError.
    """
    match = re.fullmatch(r"([^/=]+)(?:/(\d+))?=(\d*):(\d*)", text)
    if match is None:
        raise ValueError(f"--offsets {text!r}: expected TOPIC[/PARTITION]=FROM:TO, for instance rollouts/3=100:200")
    topic, partition, start, end = match.groups()
    topic_of(topic)
    found = OffsetRange(
        topic, int(partition) if partition else None, int(start) if start else None, int(end) if end else None
    )
    if found.start is not None and found.end is not None and found.start >= found.end:
        raise ValueError(f"--offsets {text!r}: the range is empty, its end is not included")
    return found


def span(text: str) -> Span:
    """`7`, `v7`, or `7..9` with both ends included. Raises ValueError."""
    match = re.fullmatch(r"v?(\d+)(?:\.\.v?(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r}: expected a number, or a range such as 7..9")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"{text!r}: the range is empty")
    return Span(first, last)


def utc_text(timestamp_ms: int) -> str:
    """A record's time as ISO 8601, UTC, to the millisecond."""
    return datetime.fromtimestamp(timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
