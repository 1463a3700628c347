"""The facts that an audit needs of a log: a pure fold over its topics; of answers to users in `OnlineFacts`.

The records of each topic are observed in order; the topics may come in any order. Records of other runs count for the
offsets alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from tidemill.consumers.operate import RecordAt, record_at
from tidemill.consumers.operate.audit.run_facts import ModelFacts, RolloutFacts
from tidemill.schemas.catalogue import Topic, is_compacted
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Interaction, OnlineBatch, Outcome, UserRequest, UserWish


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer served to a user."""

    place: Position
    interaction_id: str
    user_id: str
    version_min: int
    version_max: int
    replica_id: str
    incarnation: str
    served_at: int


@dataclass(frozen=True, slots=True)
class OutcomeFacts:
    """One outcome of an interaction."""

    interaction_id: str
    user_id: str
    revision: int
    reward: float | None
    exclusion: str
    partition: int
    offset: int
    """The place of the interaction."""


class OnlineFacts:
    """Interactions, outcomes and online batches."""

    def __init__(self) -> None:
        self.served: dict[str, ServedAnswer] = {}
        self.served_at_place: dict[Position, ServedAnswer] = {}
        self.erased: dict[str, int] = {}
        """Interactions with a tombstone, and when the first one was written, in microseconds."""
        self.ends: defaultdict[str, list[RecordAt[OutcomeFacts]]] = defaultdict(list)
        self.batches: list[RecordAt[OnlineBatch]] = []
        self.erasures: dict[str, int] = {}
        """By user: the newest time for which they asked to be erased."""
        self.erasure_times: defaultdict[str, set[int]] = defaultdict(set)
        """By user: every time for which they asked to be erased."""
        self.repeats: Counter[str] = Counter()

    def observe(self, consumed: ConsumedRecord) -> None:
        """Take in a record of the run, or a tombstone or a user's request, which belong to no run."""
        match consumed.record:
            case Interaction() as answer:
                place = consumed.position
                served = ServedAnswer(
                    place, answer.interaction_id, answer.user_id, answer.version_min, answer.version_max,
                    answer.replica_id, answer.incarnation, answer.served_at,
                )  # fmt: skip
                self.repeats["interactions"] += answer.interaction_id in self.served
                self.served.setdefault(answer.interaction_id, served)
                self.served_at_place[place] = served
            case Outcome() as outcome:
                self._take_outcome(record_at(consumed, outcome))
            case OnlineBatch() as batch:
                self.batches.append(record_at(consumed, batch))
            case UserRequest(user_id=user, wish=UserWish.ERASE, at=at):
                self.erasures[user] = max(at, self.erasures.get(user, at))
                self.erasure_times[user].add(at)
            case None if consumed.value is None:
                self._erase(consumed)

    def _take_outcome(self, outcome: RecordAt[Outcome]) -> None:
        of = outcome.record
        end = OutcomeFacts(of.interaction_id, of.user_id, of.revision, of.reward, of.exclusion, of.partition, of.offset)
        known = self.ends[of.interaction_id]
        if any(other.digest == outcome.digest for other in known):
            self.repeats["outcomes"] += 1
        else:
            known.append(RecordAt(outcome.place, end, outcome.digest))

    def _erase(self, tombstone: ConsumedRecord) -> None:
        name = (tombstone.key or b"").decode("utf-8", "replace")
        if tombstone.topic is Topic.INTERACTIONS:
            self.erased.setdefault(name, tombstone.timestamp_ms * 1_000)
            gone = self.served.pop(name, None)
            if gone is not None:
                self.served_at_place.pop(gone.place, None)
        elif tombstone.topic is Topic.OUTCOMES:
            self.ends.pop(name, None)


TRANSACTIONAL = frozenset({Topic.STEPS, Topic.MANIFESTS, Topic.GROUPS, Topic.OUTCOMES, Topic.ONLINE_BATCHES})
"""Topics that are written in transactions: by a trainer, so that one that was replaced cannot write any more, and by
stream workers with `stream.runner=transactional`. They may have offsets without a record: markers and aborted records.
So may topics that compaction removes records from."""

Partition = tuple[Topic, int]


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
        self.unreadable: list[tuple[Position, int, str]] = []
        """Records that cannot be decoded: the place, the time in microseconds, the error."""
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
                self.unreadable.append((consumed.position, timestamp_us, consumed.error))
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
