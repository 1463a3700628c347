"""What the log has of tasks that a worker began: the rollouts that ended, and the turns of those that did not. Pure.

It is fed the records of `rollouts.progress` and `rollouts` in log order; records of other runs are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.producers.rollout import rollout_id
from tidemill.schemas.records import Dispatch, Record, Rollout, Task, Turn


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is of one task already."""

    ended: frozenset[int] = frozenset()
    """Places in the group whose rollouts are on the log."""
    turns: Mapping[int, tuple[Turn, ...]] = field(default_factory=dict)
    """Recorded turns of the others, by place, in log order; nothing about them has been checked."""

    def resumable(self, index: int) -> int:
        """How many turns of a place are recorded without a gap."""
        numbers = {turn.turn for turn in self.turns.get(index, ())}
        return next(number for number in range(len(numbers) + 1) if number not in numbers)


class Progress:
    """The begun tasks of one run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._groups: dict[str, str] = {}
        """Group of each dispatched task."""
        self._turns: dict[str, list[Turn]] = {}
        self._ended: set[str] = set()
        self._first_at: int | None = None

    @property
    def groups(self) -> frozenset[str]:
        """Groups of the dispatched tasks."""
        return frozenset(self._groups.values())

    @property
    def first_at(self) -> int:
        """When the first of the dispatched tasks was, in microseconds since the Unix epoch; 0 for none."""
        return self._first_at or 0

    def observe(self, record: Record | None) -> None:
        """Take one record in."""
        match record:
            case Dispatch() if record.run_id == self._run_id:
                self._groups[record.task_id] = record.group_id
                self._first_at = record.at if self._first_at is None else min(record.at, self._first_at)
            case Turn() if record.run_id == self._run_id:
                self._turns.setdefault(record.rollout_id, []).append(record)
            case Rollout() if record.run_id == self._run_id and record.group_id in self.groups:
                self._ended.add(record.rollout_id)
            case _:
                pass

    def was_begun(self, task: Task) -> bool:
        """Whether a worker took the task."""
        return task.task_id in self._groups

    def begun(self, task: Task) -> Begun:
        """What there is of a task. Its turns are handed out once, and are not kept."""
        names = [rollout_id(task, index) for index in range(task.group_size)]
        ended = frozenset(index for index, name in enumerate(names) if name in self._ended)
        turns = {index: tuple(self._turns.pop(name, ())) for index, name in enumerate(names)}
        return Begun(ended, {index: found for index, found in turns.items() if found and index not in ended})
