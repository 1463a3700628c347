"""The facts that an audit needs from a log: a pure fold over its topics.

The records of each topic are observed in order; the topics may be observed in any order. For records of other runs,
only the offsets count. A record is kept without its large fields: the payload of a task, the tokens of a rollout or an
answer, the tensors and chunks of a version.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic, is_compacted
from tidemill.schemas.log.consumed import ConsumedRecord, LogReference, Position

TRAINED = "trained"
R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True)
class RecordAt(Generic[R]):
    """A record, its position, and a digest of its bytes: a repeated record must have the same bytes."""

    place: Position
    record: R
    digest: bytes


def record_at(consumed: ConsumedRecord, record: R) -> RecordAt[R]:  # type: ignore[misc]  # it is only passed on
    return RecordAt(consumed.position, record, hashlib.blake2b(consumed.value or b"", digest_size=16).digest())


def references(step: r.TrainStep) -> list[r.StepInput | r.StepExclusion]:
    """Return the references of a step: its inputs, then its exclusions."""
    return [*step.inputs, *step.exclusions]


TRANSACTIONAL = frozenset({Topic.STEPS, Topic.MANIFESTS, Topic.GROUPS, Topic.OUTCOMES, Topic.ONLINE_BATCHES})
"""Topics that are written in transactions: by a trainer, so that a replaced trainer can no longer write, and by
stream workers with `stream.runner=transactional`. They may have offsets without a record: markers and aborted records.
Compacted topics may have such offsets too."""

Partition = tuple[Topic, int]


@dataclass(slots=True)
class PartitionFacts:
    """The offsets of one partition, and the number of records read from them."""

    low: int
    """First offset that the broker keeps."""
    high: int
    """The offset after the last one."""
    following: int
    """The offset after the last record read."""
    records: int = 0
    gap: int | None = None
    """The first offset from which no record was read, before the last record."""
    began_us: int | None = None
    """The time of the first record read; None if there is none."""

    @property
    def hidden(self) -> int:
        """Offsets from which no record was read."""
        return self.high - self.low - self.records

    @property
    def first_gap(self) -> int:
        """The first of these offsets, if there is one."""
        return self.following if self.gap is None else self.gap

    def observe(self, offset: int, timestamp_us: int) -> None:
        """Count a record. Offsets must increase."""
        if offset > self.following and self.gap is None:
            self.gap = self.following
        if self.began_us is None:
            self.began_us = timestamp_us
        self.records += 1
        self.following = offset + 1
        self.high = max(self.high, self.following)


class Facts:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.partitions: dict[Partition, PartitionFacts] = {}
        self.letters: dict[Position, str] = {}
        """Reasons of the dead letters, by the position of the record that could not be used."""
        self.unreadable: list[tuple[Position, int, str]] = []
        """Records that cannot be decoded: the position, the time in microseconds, the error."""
        self.runs: Counter[str] = Counter()
        """Records by run."""
        self.replayed = 0
        """Records that a replay wrote."""
        self.clock_us = 0
        """Event time: the newest timestamp in the log."""
        self.repeats: Counter[str] = Counter()
        """Records and items that only repeat earlier ones."""

        self.tasks: dict[str, RecordAt[r.Task]] = {}
        self.rollouts: defaultdict[str, list[RecordAt[r.Rollout]]] = defaultdict(list)
        """By rollout id. A worker that had not read the first record may have written it again."""
        self.dispatched: dict[str, tuple[Position, set[int]]] = {}
        """By task: the first dispatch, and the indexes in the group that workers took."""
        self.turns: dict[str, RecordAt[r.Turn]] = {}
        """By rollout id: its first turn."""
        self._next_turn: Counter[str] = Counter()
        self.sampled_by: dict[tuple[str, int], Position] = {}
        """The first turn that a replica sampled under a version."""
        self.sampled_under: dict[int, Position] = {}
        """The first rollout that was sampled under a version."""

        self.groups: list[RecordAt[r.Group]] = []
        self.group_at: dict[Position, RecordAt[r.Group]] = {}
        self.groups_of: defaultdict[str, list[RecordAt[r.Group]]] = defaultdict(list)
        """By group id, in the order read."""
        self.steps: list[RecordAt[r.TrainStep]] = []
        self.plans_and_steps: list[RecordAt[r.StepPlan | r.TrainStep]] = []
        """In the order of the log."""
        self.uses: defaultdict[Position, list[tuple[RecordAt[r.TrainStep], str]]] = defaultdict(list)
        """By the position that a step names: the step, and `TRAINED` or the reason of the exclusion."""
        self.manifests: list[RecordAt[r.Manifest]] = []
        self.skips: list[RecordAt[r.SkipDelta]] = []
        self.acks: list[RecordAt[r.WeightAck]] = []
        self.decisions: list[RecordAt[r.GateDecision]] = []

        self.served: dict[str, RecordAt[r.Interaction]] = {}
        self.served_at_place: dict[Position, r.Interaction] = {}
        self.erased: dict[str, int] = {}
        """Interactions with a tombstone, and the time of the first one, in microseconds."""
        self.ends: defaultdict[str, list[RecordAt[r.Outcome]]] = defaultdict(list)
        """By interaction: its different outcomes."""
        self.batches: list[RecordAt[r.OnlineBatch]] = []
        self.batch_at: dict[Position, r.OnlineBatch] = {}
        self.erasures: defaultdict[str, set[int]] = defaultdict(set)
        """By user: the times of their erasure requests."""

    def expect(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Set the first and next offset of partitions, as the broker reports them, before their records are observed;
        for other partitions they are taken from the records."""
        self.partitions.update({where: PartitionFacts(low, high, low) for where, (low, high) in ends.items()})

    def observe(self, consumed: ConsumedRecord) -> None:
        where = (consumed.topic, consumed.partition)
        if where not in self.partitions:
            self.expect({where: (consumed.offset, consumed.offset)})
        timestamp_us = consumed.timestamp_ms * 1_000
        self.partitions[where].observe(consumed.offset, timestamp_us)
        self.clock_us = max(self.clock_us, timestamp_us)
        self.replayed += bool(consumed.replay_id)
        if consumed.record is None:
            name = (consumed.key or b"").decode("utf-8", "replace")
            if consumed.value is not None or not is_compacted(consumed.topic):
                self.unreadable.append((consumed.position, timestamp_us, consumed.error))
            elif consumed.topic is Topic.INTERACTIONS:
                self.erased.setdefault(name, timestamp_us)
                gone = self.served.pop(name, None)
                if gone is not None:
                    self.served_at_place.pop(gone.place, None)
            elif consumed.topic is Topic.OUTCOMES:
                self.ends.pop(name, None)
            return
        run_id = getattr(consumed.record, "run_id", None)
        if run_id is not None:
            self.runs[run_id] += 1
        # A user request belongs to no run.
        if run_id is None or run_id == self.run_id:
            self._take(consumed, consumed.position)

    def _take(self, consumed: ConsumedRecord, place: Position) -> None:
        match consumed.record:
            case r.Task() as task:
                self.repeats["tasks"] += task.task_id in self.tasks
                self.tasks.setdefault(task.task_id, record_at(consumed, replace(task, payload="")))
            case r.Dispatch() as dispatch:
                taken = self.dispatched.setdefault(dispatch.task_id, (place, set()))[1]
                self.repeats["dispatched rollouts"] += len(taken.intersection(dispatch.indexes))
                taken.update(dispatch.indexes)
            case r.Turn() as turn:
                first = replace(turn, token_ids=b"", logprobs=b"", context="", expert_ids=b"")
                self.turns.setdefault(turn.rollout_id, record_at(consumed, first))
                self.repeats["turns"] += turn.turn < self._next_turn[turn.rollout_id]
                self._next_turn[turn.rollout_id] = max(self._next_turn[turn.rollout_id], turn.turn + 1)
                for span in turn.spans:
                    self.sampled_by.setdefault((turn.replica_id, span.version), place)
            case r.Rollout() as rollout:
                same = self.rollouts[rollout.rollout_id]
                if same:
                    self.repeats["rollouts"] += 1
                    self.repeats["tokens of repeated rollouts"] += rollout.sampled_tokens
                same.append(record_at(consumed, replace(rollout, segments=[], rewards=[], metrics={})))
                for version in {rollout.version_min, rollout.version_max}:
                    self.sampled_under.setdefault(version, place)
            case r.Group() as record:
                group = record_at(consumed, record)
                known = self.groups_of[record.group_id]
                self.repeats["groups"] += any(other.digest == group.digest for other in known)
                known.append(group)
                self.groups.append(group)
                self.group_at[group.place] = group
            case r.TrainStep() as record:
                step = record_at(consumed, record)
                self.steps.append(step)
                self.plans_and_steps.append(step)
                for reference in references(record):
                    reason = reference.reason if isinstance(reference, r.StepExclusion) else TRAINED
                    self.uses[Position.of(reference)].append((step, reason))
            case r.StepPlan() as plan:
                last = self.plans_and_steps[-1].record if self.plans_and_steps else None
                self.repeats["plans"] += isinstance(last, r.StepPlan) and last.step == plan.step
                self.plans_and_steps.append(record_at(consumed, plan))
            case r.Manifest() as manifest:
                self.manifests.append(record_at(consumed, replace(manifest, tensors=[], tensor_table=None, shards=[])))
            case r.SkipDelta() as skip:
                self.skips.append(record_at(consumed, replace(skip, shards=[])))
            case r.WeightAck() as ack:
                self.acks.append(record_at(consumed, ack))
            case r.GateDecision() as decision:
                self.decisions.append(record_at(consumed, decision))
            case r.Interaction() as answer:
                served = record_at(consumed, replace(answer, segments=[]))
                self.repeats["interactions"] += answer.interaction_id in self.served
                self.served.setdefault(answer.interaction_id, served)
                self.served_at_place[served.place] = served.record
            case r.Outcome() as outcome:
                end = record_at(consumed, replace(outcome, signals=[]))
                ends = self.ends[outcome.interaction_id]
                if any(other.digest == end.digest for other in ends):
                    self.repeats["outcomes"] += 1
                else:
                    ends.append(end)
            case r.OnlineBatch() as batch:
                self.batches.append(record_at(consumed, batch))
                self.batch_at[place] = batch
            case r.UserRequest(user_id=user, wish=r.UserWish.ERASE, at=at):
                self.erasures[user].add(at)

    def record_of(self, rollout_id: str, reference: LogReference) -> r.Rollout | None:
        """Return the record of a rollout at the position that a reference names; None if it has none there."""
        place = Position.of(reference)
        return next((one.record for one in self.rollouts.get(rollout_id, ()) if one.place == place), None)

    def input_at(self, place: Position) -> r.Group | r.OnlineBatch | None:
        group = self.group_at.get(place)
        return self.batch_at.get(place) if group is None else group.record

    def is_truncated(self, topic: Topic) -> bool:
        """Whether the beginning of some partition of a topic has been deleted from the log."""
        return any(facts.low > 0 for (of, _), facts in self.partitions.items() if of is topic)

    def may_be_deleted(self, where: Partition, since_us: int) -> bool:
        """Whether retention may have deleted a record that was written to a partition at a time or later."""
        facts = self.partitions.get(where)
        return facts is not None and facts.low > 0 and (facts.began_us is None or since_us <= facts.began_us)

    def is_kept(self, place: Position) -> bool:
        """Whether the log still holds the offset of a position."""
        # A topic equals its name.
        facts = self.partitions.get((cast(Topic, place.topic), place.partition))
        return facts is None or place.offset >= facts.low
