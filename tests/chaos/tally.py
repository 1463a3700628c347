"""Counts the effects of faults in a run's log: when each role recovered, and what was done twice. A pure fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.product_tally import ProductTally
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.gate_decisions import by_gate
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import (
    CloseReason,
    Dispatch,
    Feedback,
    GateDecision,
    Group,
    Interaction,
    Manifest,
    OnlineBatch,
    Outcome,
    Record,
    Rollout,
    StepPlan,
    Task,
    Tick,
    TrainStep,
    Turn,
    WeightAck,
)

FEED, TRAIN, STREAM, SINK = "feed", "train", "stream", "sink"
JOIN, BATCHES, GATE, ROUTE, GATEWAY, USERS = "join", "batches", "gate", "route", "gateway", "users"


def author(topic: Topic, record: Record | None) -> str | None:
    """Return the role that wrote a record; None if the record does not name it."""
    match record:
        case Tick():
            return STREAM if topic is Topic.ROLLOUTS else None
        case Task():
            return FEED
        case Rollout() | Dispatch() | Turn():
            return record.worker_id
        case Group():
            return STREAM
        case StepPlan() | TrainStep() | Manifest():
            return TRAIN
        case WeightAck():
            return record.replica_id
        case Interaction():
            return ROUTE
        case Feedback():
            return GATEWAY if record.source == GATEWAY else USERS
        case Outcome():
            return JOIN
        case OnlineBatch():
            return BATCHES
        case GateDecision():
            return GATE if by_gate(record) else None
        case _:
            return None


@dataclass(slots=True)
class Recoveries:
    """Recovery times: from each fault of a role to its first progress afterwards."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By kind of fault and role: one number for each fault from which the role recovered."""
    cut_short: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and role: recoveries that another fault interrupted; their time is not measured."""
    _since: dict[str, tuple[float, str]] = field(default_factory=dict)

    def begin(self, role: str, kind: str, at_s: float) -> None:
        """Note that a role was hit, or was resumed, at `at_s`."""
        if role in self._since:
            self.cut_short[self._since[role][1], role] += 1
        self._since[role] = (at_s, kind)

    def progress(self, role: str, at_s: float) -> float | None:
        """Note progress of a role at `at_s`; return the seconds of the recovery that it ends, None if it ends none."""
        since, kind = self._since.get(role, (at_s, ""))
        if at_s <= since:
            return None
        del self._since[role]
        self.seconds.setdefault((kind, role), []).append(at_s - since)
        return at_s - since

    def under_way(self) -> set[str]:
        """Return the roles that have not recovered."""
        return set(self._since)


@dataclass(slots=True)
class Repeated:
    """Work that the log contains twice."""

    tasks: int = 0
    dispatched: Counter[str] = field(default_factory=Counter)
    """Rollouts begun again, by worker."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Rollouts among these that continued from a recorded turn."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Rollouts written again, by worker."""
    rollout_tokens: int = 0
    groups: int = 0
    groups_changed: int = 0
    """Groups written again with different content."""
    plans: int = 0
    """Step plans that another plan of the same step replaced."""
    steps: int = 0
    manifests: int = 0
    joins: Counter[str] = field(default_factory=Counter)
    """How often a replica loaded a whole version after its first, by replica."""


@dataclass(slots=True)
class Tally:
    """The counts of a run, from its log."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of authors in this run, by their usual names."""
    recoveries: Recoveries = field(default_factory=Recoveries)
    repeated: Repeated = field(default_factory=Repeated)
    product: ProductTally = field(default_factory=ProductTally)
    written: Counter[str] = field(default_factory=Counter)
    """Records by author."""
    last_s: dict[str, float] = field(default_factory=dict)
    """When each author wrote last, in seconds since the epoch."""
    step: int = 0
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Fingerprints of the weights after each step."""
    versions: set[int] = field(default_factory=set)
    """Published versions."""
    rollouts: set[str] = field(default_factory=set)
    groups: dict[str, bytes] = field(default_factory=dict)
    trained: Counter[str] = field(default_factory=Counter)
    """How often each group was the input of a step."""
    _tasks: dict[str, int] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    """Groups of the tasks."""
    _played: set[tuple[str, int]] = field(default_factory=set)
    _dispatched: set[tuple[str, int]] = field(default_factory=set)
    _plans: dict[int, float] = field(default_factory=dict)
    _recorded: dict[int, float] = field(default_factory=dict)
    _lives: dict[str, set[str]] = field(default_factory=dict)

    def observe(self, located: ConsumedRecord) -> tuple[str, float] | None:
        """Add one record; return the role whose recovery it shows and the seconds that it took, or None."""
        record, at_s = located.record, located.timestamp_ms / 1e3
        self.product.observe(located)
        said = author(located.topic, record)
        if said is None or record is None:
            return None
        name = self.renamed.get(said, said)
        self.written[name] += 1
        self.last_s[name] = max(at_s, self.last_s.get(name, 0.0))
        self._count(record, located, at_s)
        took = self.recoveries.progress(name, at_s)
        return None if took is None else (name, took)

    def lost(self) -> list[tuple[str, int]]:
        """Return the requested rollouts, by task and index in the group, without a record, even of a failure."""
        asked = ((task, index) for task, size in self._tasks.items() for index in range(size))
        return [each for each in asked if each not in self._played]

    def open_groups(self) -> set[str]:
        """Return the requested groups that are not assembled."""
        return self._asked - self.groups.keys()

    def twice(self) -> list[str]:
        """Return the groups that more than one step trained on."""
        return [group for group, times in self.trained.items() if times > 1]

    def begun_again(self, starts_s: Sequence[float]) -> int:
        """Count the steps with a start of the trainer between plan and record: it took them again, on equal inputs."""
        spans = [(self._plans[step], at_s) for step, at_s in self._recorded.items() if step in self._plans]
        return sum(any(planned < start < recorded for start in starts_s) for planned, recorded in spans)

    def _count(self, record: Record, located: ConsumedRecord, at_s: float) -> None:
        match record:
            case Task():
                self.repeated.tasks += record.task_id in self._tasks
                self._tasks[record.task_id] = record.group_size
                self._asked.add(record.group_id)
            case Dispatch():
                self._dispatch(record)
            case Rollout():
                self._rollout(record)
            case Group() if record.closed_by is not CloseReason.LATE:
                self._group(record, located.value or b"")
            case StepPlan():
                self.repeated.plans += record.step in self._plans
                self._plans[record.step] = at_s
            case TrainStep():
                self._step(record, at_s)
            case Manifest():
                self.repeated.manifests += record.version in self.versions
                self.versions.add(record.version)
            case WeightAck():
                self._ack(record)
            case _:
                pass

    def _dispatch(self, record: Dispatch) -> None:
        for index, turns in zip(record.indexes, record.resumed_turns, strict=True):
            again = (record.task_id, index) in self._dispatched
            self.repeated.dispatched[record.worker_id] += again
            self.repeated.resumed[record.worker_id] += again and turns > 0
            self._dispatched.add((record.task_id, index))

    def _rollout(self, record: Rollout) -> None:
        if record.rollout_id in self.rollouts:
            self.repeated.rollouts[record.worker_id] += 1
            self.repeated.rollout_tokens += record.sampled_tokens
        self.rollouts.add(record.rollout_id)
        self._played.add((record.task_id, record.index))

    def _group(self, record: Group, value: bytes) -> None:
        self.repeated.groups += record.group_id in self.groups
        self.repeated.groups_changed += self.groups.setdefault(record.group_id, value) != value

    def _step(self, record: TrainStep, at_s: float) -> None:
        if record.step not in self.fingerprints:
            self.trained.update(place.group_id for place in record.inputs if place.topic == Topic.GROUPS)
        self.repeated.steps += record.step in self.fingerprints
        self.fingerprints.setdefault(record.step, record.fingerprint)
        self._recorded.setdefault(record.step, at_s)
        self.step = max(self.step, record.step)

    def _ack(self, record: WeightAck) -> None:
        lives = self._lives.setdefault(record.replica_id, set())
        self.repeated.joins[record.replica_id] += bool(lives) and record.incarnation not in lives
        lives.add(record.incarnation)
