"""What the log says of tasks and their rollouts: one small record each, whatever their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidemill.consumers.operate.trace.place import Place, place_of
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Dispatch, Mode, Rollout, RolloutStatus, Task, Turn


def rollout_name(group_id: str, index: int) -> str:
    """The id that workers give to the rollout at a place of a group."""
    return f"{group_id}/{index}"


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task that was issued."""

    place: Place
    task_id: str
    group_id: str
    mode: Mode
    group_size: int
    deadline_at: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record of a rollout."""

    place: Place
    status: RolloutStatus
    failure: str
    reward: float | None
    success: bool | None
    sampled_tokens: int
    version_min: int
    version_max: int
    incarnation: str


@dataclass(slots=True)
class RolloutFacts:
    """A rollout that has a result. A worker that could not know of the first one may have written it again."""

    rollout_id: str
    group_id: str
    task_id: str
    mode: Mode
    index: int
    group_size: int
    deadline_at: int
    attempts: list[Attempt] = field(default_factory=list)

    def at(self, partition: int, offset: int) -> Attempt | None:
        """The record at a place; None where it has none there."""
        wanted = (partition, offset)
        return next((one for one in self.attempts if (one.place.partition, one.place.offset) == wanted), None)


@dataclass(slots=True)
class Sampled:
    """The turns of one rollout."""

    place: Place
    task_id: str
    group_id: str
    records: int = 0
    turns: int = 0
    """How many different ones, since they are counted from 0."""


class PlayedRollouts:
    """Tasks, who took them, and how their rollouts went."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskFacts] = {}
        self.rollouts: dict[str, RolloutFacts] = {}
        self.dispatched: dict[str, tuple[Place, set[int]]] = {}
        """Places in the group that some worker took, by task, with the first dispatch."""
        self.turns: dict[str, Sampled] = {}
        self.sampled_by: dict[tuple[str, int], Place] = {}
        """Where a replica first sampled a turn under a version."""
        self.sampled_under: dict[int, Place] = {}
        """Where a rollout was first sampled under a version."""
        self.repeats: Counter[str] = Counter()

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record of the run in."""
        place = place_of(located)
        match located.record:
            case Task() as task:
                self._take_task(place, task)
            case Dispatch() as dispatch:
                self._take_dispatch(place, dispatch)
            case Turn() as turn:
                self._take_turn(place, turn)
            case Rollout() as rollout:
                self._take_rollout(place, rollout)

    def _take_task(self, place: Place, task: Task) -> None:
        if task.task_id in self.tasks:
            self.repeats["tasks"] += 1
            return
        self.tasks[task.task_id] = TaskFacts(
            place, task.task_id, task.group_id, task.mode, task.group_size, task.deadline_at
        )

    def _take_dispatch(self, place: Place, dispatch: Dispatch) -> None:
        known = self.dispatched.setdefault(dispatch.task_id, (place, set()))[1]
        self.repeats["dispatched rollouts"] += len(known.intersection(dispatch.indexes))
        known.update(dispatch.indexes)

    def _take_turn(self, place: Place, turn: Turn) -> None:
        found = self.turns.setdefault(turn.rollout_id, Sampled(place, turn.task_id, turn.group_id))
        found.records += 1
        self.repeats["turns"] += turn.turn < found.turns
        found.turns = max(found.turns, turn.turn + 1)
        for span in turn.spans:
            self.sampled_by.setdefault((turn.replica_id, span.version), place)

    def _take_rollout(self, place: Place, rollout: Rollout) -> None:
        known = self.rollouts.get(rollout.rollout_id)
        if known is None:
            known = RolloutFacts(
                rollout.rollout_id, rollout.group_id, rollout.task_id, rollout.mode, rollout.index,
                rollout.group_size, rollout.deadline_at,
            )  # fmt: skip
            self.rollouts[rollout.rollout_id] = known
        else:
            self.repeats["rollouts"] += 1
            self.repeats["tokens of repeated rollouts"] += rollout.sampled_tokens
        known.attempts.append(_attempt(place, rollout))
        for version in {rollout.version_min, rollout.version_max}:
            self.sampled_under.setdefault(version, place)


def _attempt(place: Place, rollout: Rollout) -> Attempt:
    return Attempt(
        place=place,
        status=rollout.status,
        failure=rollout.failure,
        reward=rollout.reward,
        success=rollout.success,
        sampled_tokens=rollout.sampled_tokens,
        version_min=rollout.version_min,
        version_max=rollout.version_max,
        incarnation=rollout.incarnation,
    )
