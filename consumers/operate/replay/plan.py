"""What a replay will copy, settled before anything is written: which offsets of which partitions, and their digests.

The k-th record chosen of a partition becomes the k-th record of the partition's copy. So the plan says where every copy
will lie, references can be made to point to copies that are not written yet, and how far an interrupted replay came is
the length of what lies in its topics.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidemill.consumers.operate.replay.raw import RANK, Lane, RawRecord
from tidemill.consumers.operate.replay.references import Place


@dataclass(slots=True)
class LanePlan:
    """What is chosen of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    """Offsets [start, end) were looked at."""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    """Of the records chosen, ascending."""
    n_bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    """Oldest and newest record time."""
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, record: RawRecord) -> None:
        """The next record chosen, in offset order."""
        self.offsets.append(record.offset)
        self.n_bytes += record.n_bytes
        self.first_ms = record.timestamp_ms if self.first_ms is None else min(self.first_ms, record.timestamp_ms)
        self.last_ms = record.timestamp_ms if self.last_ms is None else max(self.last_ms, record.timestamp_ms)
        hash_record(self._hash, record)

    @property
    def sha256(self) -> str:
        """Digest of the chosen records, in order, as they lie in the source."""
        return self._hash.hexdigest()

    def rank(self, offset: int) -> int | None:
        """The place of a record among those chosen; None when it is not chosen."""
        found = bisect_left(self.offsets, offset)
        return found if found < len(self.offsets) and self.offsets[found] == offset else None


class Plan:
    """What is chosen of every partition.

    Args:
        partitions: how many partitions each topic has.
    """

    def __init__(self, lanes: Iterable[LanePlan], partitions: Mapping[str, int]) -> None:
        ranked = sorted(lanes, key=lambda plan: (RANK[plan.topic], plan.partition))
        self.lanes: dict[Lane, LanePlan] = {(plan.topic, plan.partition): plan for plan in ranked}
        self.partitions = {topic: partitions[topic] for topic in sorted(partitions, key=RANK.__getitem__)}
        self.undecodable = 0
        """Records that an expression or a group's name was asked of and that could not be read: they are left out."""
        self.referred: set[Place] = set()
        """Every place that a chosen record refers to."""
        self.missing: set[Place] = set()
        """Places that a step names and where the log holds nothing any more: what they held was erased."""

    @property
    def topics(self) -> list[str]:
        """Names of the topics, in the order of the catalogue."""
        return list(self.partitions)

    @property
    def records(self) -> int:
        """Records chosen."""
        return sum(len(plan.offsets) for plan in self.lanes.values())

    @property
    def n_bytes(self) -> int:
        """Bytes of their keys, values and headers."""
        return sum(plan.n_bytes for plan in self.lanes.values())

    def rank(self, place: Place) -> int | None:
        """The offset that the copy of a record will have, counted from the copy's first; None when it is not chosen."""
        plan = self.lanes.get(place[:2])
        return None if plan is None else plan.rank(place[2])

    def outside(self) -> Iterator[Place]:
        """Places that chosen records refer to and that are not chosen: in the copy these references lead nowhere."""
        return (place for place in sorted(self.referred) if self.rank(place) is None)

    def sha256(self) -> str:
        """Digest of everything chosen."""
        total = hashlib.sha256()
        for plan in self.lanes.values():
            total.update(f"{plan.topic}/{plan.partition}/{len(plan.offsets)}/{plan.sha256}\n".encode())
        return total.hexdigest()


def hash_record(into: hashlib._Hash, record: RawRecord) -> None:
    """Add a record to a digest: place, time, key, value and headers, each with its length, so that nothing can shift
    from one to the next unnoticed."""
    parts: list[bytes | None] = [record.key, record.value]
    for name, value in record.headers:
        parts += [name.encode(), value]
    into.update(f"{record.offset}/{record.timestamp_ms}/{len(parts)}".encode())
    for part in parts:
        into.update(b"-" if part is None else f"+{len(part)}/".encode() + part)
