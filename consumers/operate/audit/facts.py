"""Everything that an audit needs to know of a log: a pure fold over its topics.

Each topic is observed in its own order, the topics in any order relative to each other. Records of other runs count for
the offsets alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.consumers.operate.audit.model_facts import Model
from tidemill.consumers.operate.audit.online_facts import Online
from tidemill.consumers.operate.audit.partition_facts import Partition, PartitionFacts
from tidemill.consumers.operate.audit.rollout_facts import PlayedRollouts
from tidemill.consumers.operate.trace.place import Place, place_of
from tidemill.schemas.catalogue import Topic, is_compacted
from tidemill.schemas.log.consumed import ConsumedRecord


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: which record it is, by its place, and why it could not be used."""

    place: Place
    reason: str


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A record that nobody can read."""

    place: Place
    timestamp_us: int
    error: str


class Facts:
    """What the log says of one run.

    Args:
        run_id: the run.
        ends: first and next offset of each partition, as the broker says; of partitions not named they are taken from
            the records.
    """

    def __init__(self, run_id: str, ends: Mapping[Partition, tuple[int, int]] | None = None) -> None:
        self.run_id = run_id
        self.played, self.model, self.online = PlayedRollouts(), Model(), Online()
        self.letters: dict[Place, str] = {}
        self.undecodable: list[Undecodable] = []
        self.partitions: dict[Partition, PartitionFacts] = {}
        self._read_of: dict[tuple[str, int], PartitionFacts] = {}
        self.expect(ends or {})
        self.runs: Counter[str] = Counter()
        """Records by run."""
        self.replayed = 0
        """Records that a replay wrote."""
        self.clock_us = 0
        """Event time: the newest timestamp in the log."""

    def expect(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """First and next offset of partitions, before their records are observed."""
        for (topic, number), (low, high) in ends.items():
            facts = PartitionFacts(low, high)
            self.partitions[topic, number] = self._read_of[topic.value, number] = facts

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in."""
        where = (located.topic, located.partition)
        if where not in self.partitions:
            self.expect({where: (located.offset, located.offset)})
        self.partitions[where].observe(located.offset)
        self.clock_us = max(self.clock_us, located.timestamp_ms * 1_000)
        self.replayed += bool(located.replay_id)
        if located.record is None:
            self._take_unreadable(located)
            return
        run_id = getattr(located.record, "run_id", None)
        if run_id is not None:
            self.runs[run_id] += 1
        if run_id is None or run_id == self.run_id:
            self.played.observe(located)
            self.model.observe(located)
            self.online.observe(located)

    def observe_letter(self, letter: Letter) -> None:
        """Take a dead letter in."""
        self.letters.setdefault(letter.place, letter.reason)

    def finish(self) -> None:
        """Everything was observed."""
        for partition in self.partitions.values():
            partition.finish()

    def is_truncated(self, topic: Topic) -> bool:
        """Whether the log no longer keeps the beginning of some partition of a topic."""
        return any(facts.low > 0 for (of, _), facts in self.partitions.items() if of is topic)

    def is_kept(self, place: Place) -> bool:
        """Whether the log still keeps what lies at a place."""
        facts = self._read_of.get((place.topic, place.partition))
        return facts is None or place.offset >= facts.low

    def _take_unreadable(self, located: ConsumedRecord) -> None:
        if located.value is None and is_compacted(located.topic):
            self.online.observe(located)
        else:
            timestamp_us = located.timestamp_ms * 1_000
            self.undecodable.append(Undecodable(place_of(located), timestamp_us, located.error))
