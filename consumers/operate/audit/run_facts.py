"""The records of one run that an audit keeps: tasks, rollouts, groups, steps and weight versions.

A rollout is kept without its tokens, a version without its tensors and chunks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from tidemill.consumers.operate import RecordAt, record_at
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import (
    Dispatch,
    GateDecision,
    Group,
    Manifest,
    Mode,
    Rollout,
    RolloutStatus,
    SkipDelta,
    StepExclusion,
    StepInput,
    StepPlan,
    Task,
    TrainStep,
    Turn,
    WeightAck,
)

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class IssuedTask:
    """A task that was issued."""

    place: Position
    task_id: str
    group_id: str
    mode: Mode
    group_size: int
    deadline_at: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One record of a rollout."""

    place: Position
    status: RolloutStatus
    failure: str
    reward: float | None
    success: bool | None
    sampled_tokens: int
    version_min: int
    version_max: int
    incarnation: str


@dataclass(slots=True)
class PlayedRollout:
    """A rollout that has a result. A worker that could not know of the first record may have written it again."""

    rollout_id: str
    group_id: str
    task_id: str
    mode: Mode
    index: int
    group_size: int
    deadline_at: int
    records: list[RolloutRecord] = field(default_factory=list)

    def at(self, partition: int, offset: int) -> RolloutRecord | None:
        """The record at a place; None where the rollout has none there."""
        wanted = (partition, offset)
        return next((one for one in self.records if (one.place.partition, one.place.offset) == wanted), None)


@dataclass(slots=True)
class SampledTurns:
    """The turns of one rollout."""

    place: Position
    task_id: str
    group_id: str
    turns: int = 0
    """Number of different turns."""


class RolloutFacts:
    """Tasks, the workers that took them, and the results of their rollouts."""

    def __init__(self) -> None:
        self.tasks: dict[str, IssuedTask] = {}
        self.rollouts: dict[str, PlayedRollout] = {}
        self.dispatched: dict[str, tuple[Position, set[int]]] = {}
        """By task: the first dispatch, and the indexes in the group that workers took."""
        self.turns: dict[str, SampledTurns] = {}
        self.sampled_by: dict[tuple[str, int], Position] = {}
        """The first turn that a replica sampled under a version."""
        self.sampled_under: dict[int, Position] = {}
        """The first rollout that was sampled under a version."""
        self.repeats: Counter[str] = Counter()

    def observe(self, consumed: ConsumedRecord) -> None:
        """Take in a record of the run."""
        place = consumed.position
        match consumed.record:
            case Task() as task if task.task_id in self.tasks:
                self.repeats["tasks"] += 1
            case Task() as task:
                self.tasks[task.task_id] = IssuedTask(
                    place, task.task_id, task.group_id, task.mode, task.group_size, task.deadline_at
                )
            case Dispatch() as dispatch:
                known = self.dispatched.setdefault(dispatch.task_id, (place, set()))[1]
                self.repeats["dispatched rollouts"] += len(known.intersection(dispatch.indexes))
                known.update(dispatch.indexes)
            case Turn() as turn:
                found = self.turns.setdefault(turn.rollout_id, SampledTurns(place, turn.task_id, turn.group_id))
                self.repeats["turns"] += turn.turn < found.turns
                found.turns = max(found.turns, turn.turn + 1)
                for span in turn.spans:
                    self.sampled_by.setdefault((turn.replica_id, span.version), place)
            case Rollout() as rollout:
                self._take_rollout(place, rollout)

    def _take_rollout(self, place: Position, rollout: Rollout) -> None:
        known = self.rollouts.get(rollout.rollout_id)
        if known is None:
            known = PlayedRollout(
                rollout.rollout_id, rollout.group_id, rollout.task_id, rollout.mode, rollout.index,
                rollout.group_size, rollout.deadline_at,
            )  # fmt: skip
            self.rollouts[rollout.rollout_id] = known
        else:
            self.repeats["rollouts"] += 1
            self.repeats["tokens of repeated rollouts"] += rollout.sampled_tokens
        record = RolloutRecord(
            place, rollout.status, rollout.failure, rollout.reward, rollout.success, rollout.sampled_tokens,
            rollout.version_min, rollout.version_max, rollout.incarnation,
        )  # fmt: skip
        known.records.append(record)
        for version in {rollout.version_min, rollout.version_max}:
            self.sampled_under.setdefault(version, place)


class ModelFacts:
    """Groups, the steps that used them, the versions that the steps made, and the replicas that held those."""

    def __init__(self) -> None:
        self.groups: list[RecordAt[Group]] = []
        self.group_at: dict[Position, RecordAt[Group]] = {}
        self.groups_of: defaultdict[str, list[RecordAt[Group]]] = defaultdict(list)
        """By group id, in the order read."""
        self.steps: list[RecordAt[TrainStep]] = []
        self.plans_and_steps: list[RecordAt[StepPlan | TrainStep]] = []
        """In the order of the log."""
        self.uses: defaultdict[Position, list[tuple[RecordAt[TrainStep], str]]] = defaultdict(list)
        """By the place that a step names: the step, and `TRAINED` or the reason of the exclusion."""
        self.manifests: list[RecordAt[Manifest]] = []
        self.skips: list[RecordAt[SkipDelta]] = []
        self.acks: list[RecordAt[WeightAck]] = []
        self.decisions: list[RecordAt[GateDecision]] = []
        self.repeats: Counter[str] = Counter()

    def observe(self, consumed: ConsumedRecord) -> None:
        """Take in a record of the run."""
        match consumed.record:
            case Group() as record:
                group = record_at(consumed, record)
                known = self.groups_of[record.group_id]
                self.repeats["groups"] += any(other.digest == group.digest for other in known)
                known.append(group)
                self.groups.append(group)
                self.group_at[group.place] = group
            case TrainStep() as record:
                step = record_at(consumed, record)
                self.steps.append(step)
                self.plans_and_steps.append(step)
                for reference in references(record):
                    reason = reference.reason if isinstance(reference, StepExclusion) else TRAINED
                    self.uses[Position.of(reference)].append((step, reason))
            case StepPlan() as plan:
                last = self.plans_and_steps[-1].record if self.plans_and_steps else None
                self.repeats["plans"] += isinstance(last, StepPlan) and last.step == plan.step
                self.plans_and_steps.append(record_at(consumed, plan))
            case Manifest() as manifest:
                self.manifests.append(record_at(consumed, replace(manifest, tensors=[], tensor_table=None, shards=[])))
            case SkipDelta() as skip:
                self.skips.append(record_at(consumed, replace(skip, shards=[])))
            case WeightAck() as ack:
                self.acks.append(record_at(consumed, ack))
            case GateDecision() as decision:
                self.decisions.append(record_at(consumed, decision))


def references(step: TrainStep) -> list[StepInput | StepExclusion]:
    """Everything that a step names: what it trained on, then what it left out."""
    return [*step.inputs, *step.exclusions]
