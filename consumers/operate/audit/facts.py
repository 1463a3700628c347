"""The facts that an audit needs of a log: a pure fold over its topics.

The records of each topic are observed in order; the topics may come in any order. Records of other runs count for the
offsets alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from tidemill.consumers.operate.audit.online_facts import OnlineFacts
from tidemill.consumers.operate.audit.run_facts import ModelFacts, RolloutFacts
from tidemill.schemas.catalogue import Topic, is_compacted
from tidemill.schemas.log.consumed import ConsumedRecord, Position

TRANSACTIONAL = frozenset({Topic.STEPS, Topic.MANIFESTS, Topic.GROUPS, Topic.OUTCOMES, Topic.ONLINE_BATCHES})
"""Topics that are written in transactions: by a trainer, so that one that was replaced cannot write any more, and by
stream workers with `stream.runner=transactional`."""

Partition = tuple[Topic, int]


def may_have_gaps(topic: Topic) -> bool:
    """Whether a topic may have offsets without a record: markers and aborted records of transactions, and records that
    compaction removed."""
    return topic in TRANSACTIONAL or is_compacted(topic)


@dataclass(slots=True)
class PartitionFacts:
    """The offsets of one partition, and how many records were read from them."""

    low: int
    """First offset that the broker keeps."""
    high: int
    """The offset after the last one."""
    following: int = field(init=False)
    """The offset after the last record read."""
    records: int = 0
    hidden: int = 0
    """Offsets from which no record was read."""
    first_gap: int | None = None

    def __post_init__(self) -> None:
        self.following = self.low

    def observe(self, offset: int) -> None:
        """Count a record. Offsets rise."""
        self._skip_to(offset)
        self.records += 1
        self.following = offset + 1
        self.high = max(self.high, self.following)

    def finish(self) -> None:
        """Count the offsets after the last record."""
        self._skip_to(self.high)
        self.following = self.high

    def _skip_to(self, offset: int) -> None:
        if offset > self.following:
            self.first_gap = self.following if self.first_gap is None else self.first_gap
            self.hidden += offset - self.following


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A record that cannot be decoded."""

    place: Position
    timestamp_us: int
    error: str


class Facts:
    """The facts of one run.

    Args:
        run_id: the run.
        ends: first and next offset of each partition, as the broker says; for other partitions they are taken from the
            records.
    """

    def __init__(self, run_id: str, ends: Mapping[Partition, tuple[int, int]] | None = None) -> None:
        self.run_id = run_id
        self.played, self.model, self.online = RolloutFacts(), ModelFacts(), OnlineFacts()
        self.letters: dict[Position, str] = {}
        """Reasons of the dead letters, by the place of the record that could not be used."""
        self.unreadable: list[UnreadableRecord] = []
        self.partitions: dict[Partition, PartitionFacts] = {}
        self.expect(ends or {})
        self.runs: Counter[str] = Counter()
        """Records by run."""
        self.replayed = 0
        """Records that a replay wrote."""
        self.clock_us = 0
        """Event time: the newest timestamp in the log."""

    def expect(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Set first and next offset of partitions, before their records are observed."""
        self.partitions.update({where: PartitionFacts(low, high) for where, (low, high) in ends.items()})

    def observe(self, consumed: ConsumedRecord) -> None:
        """Take in a record."""
        where = (consumed.topic, consumed.partition)
        if where not in self.partitions:
            self.expect({where: (consumed.offset, consumed.offset)})
        self.partitions[where].observe(consumed.offset)
        timestamp_us = consumed.timestamp_ms * 1_000
        self.clock_us = max(self.clock_us, timestamp_us)
        self.replayed += bool(consumed.replay_id)
        if consumed.record is None:
            if consumed.value is None and is_compacted(consumed.topic):
                self.online.observe(consumed)
            else:
                self.unreadable.append(UnreadableRecord(consumed.position, timestamp_us, consumed.error))
            return
        run_id = getattr(consumed.record, "run_id", None)
        if run_id is not None:
            self.runs[run_id] += 1
        if run_id is None or run_id == self.run_id:
            self.played.observe(consumed)
            self.model.observe(consumed)
            self.online.observe(consumed)

    def observe_letter(self, place: Position, reason: str) -> None:
        """Take in a dead letter: the place of the record that could not be used, and the reason."""
        self.letters.setdefault(place, reason)

    def finish(self) -> None:
        """Mark the end of the records."""
        for partition in self.partitions.values():
            partition.finish()

    def is_truncated(self, topic: Topic) -> bool:
        """Whether the log no longer keeps the beginning of some partition of a topic."""
        return any(facts.low > 0 for (of, _), facts in self.partitions.items() if of is topic)

    def is_kept(self, place: Position) -> bool:
        """Whether the log still keeps the offset of a place."""
        # A topic equals its name.
        facts = self.partitions.get((cast(Topic, place.topic), place.partition))
        return facts is None or place.offset >= facts.low
