"""The log's record of tasks that a worker began: rollouts that ended, and sampled turns of those that did not.

What holds: the log is read once for each partition of `tasks` that is assigned, when its first task arrives, from the
time of that task on. The former owner of the partition took its tasks in order and committed none past an unfinished
one, so that everything of later tasks lies after that time. `rollouts` is read only for a task that was begun.
`TaskRecovery` blocks; `BegunTasks` is pure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Dispatch, Record, Rollout, Task, Turn, rollout_id

LOG = logging.getLogger(__name__)
Partition = tuple[Topic, int]
SKEW_US = 10_000_000
"""How far the clocks of those who write tasks, dispatches and rollouts may be apart."""


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The recorded part of one task."""

    ended: frozenset[int] = frozenset()
    """Places in the group whose rollouts are on the log."""
    turns: Mapping[int, tuple[Turn, ...]] = field(default_factory=dict)
    """Recorded turns of the others, by place, in log order, unchecked."""

    def resumable(self, index: int) -> int:
        """How many turns of a place are recorded, those of equal contexts by several workers counted once each."""
        return len({(turn.context, turn.turn) for turn in self.turns.get(index, ())})


NOTHING = TaskProgress()


class BegunTasks:
    """The begun tasks of one run, from the records of `rollouts.progress` and `rollouts` in log order."""

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
        """Time of the first dispatch, in microseconds since the Unix epoch; 0 for none."""
        return self._first_at or 0

    def observe(self, record: Record | None) -> None:
        """Take one record; those of other runs are left alone."""
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

    def progress(self, task: Task) -> TaskProgress:
        """The recorded part of a task. Its turns are handed out once, and are not kept."""
        names = [rollout_id(task.group_id, index) for index in range(task.group_size)]
        ended = frozenset(index for index, name in enumerate(names) if name in self._ended)
        turns = {index: tuple(self._turns.pop(name, ())) for index, name in enumerate(names)}
        return TaskProgress(ended, {index: found for index, found in turns.items() if found and index not in ended})


class _PartitionHistory:
    """The log's record of one partition's tasks when it was assigned."""

    def __init__(self, log: LogReader, run_id: str) -> None:
        self._log = log
        self._run_id = run_id
        self._begun: BegunTasks | None = None
        self._rollouts_read = False
        self._read_at = 0

    def progress(self, task: Task, partition: int) -> TaskProgress:
        if self._begun is None:
            self._read_at = now_us()
            self._begun = BegunTasks(self._run_id)
            for located in self._log.read_since(Topic.PROGRESS, partition, to_ms(task.issued_at - SKEW_US)):
                self._begun.observe(located.record)
        if task.issued_at > self._read_at + SKEW_US:
            self._begun = BegunTasks(self._run_id)  # tasks from now on were issued after it was read
        if not self._begun.was_begun(task):
            return NOTHING
        if not self._rollouts_read:
            self._rollouts_read = True
            count = len(self._log.partitions(Topic.ROLLOUTS))
            for number in sorted({partition_of(group, count) for group in self._begun.groups}):
                for ended in self._log.read_since(Topic.ROLLOUTS, number, to_ms(self._begun.first_at - SKEW_US)):
                    self._begun.observe(ended.record)
        return self._begun.progress(task)


class TaskRecovery:
    """Finds the recorded part of the tasks in the partitions of one worker."""

    def __init__(self, log: LogReader, run_id: str) -> None:
        self._log = log
        self._run_id = run_id
        self._histories: dict[Partition, _PartitionHistory] = {}

    def progress(self, located: ConsumedRecord) -> TaskProgress:
        """The recorded part of the task in a record; nothing for a record that is no task of the run.

        Raises LookupError, TimeoutError or KafkaException when the log cannot be read.
        """
        task = located.record
        if not isinstance(task, Task) or task.run_id != self._run_id:
            return NOTHING
        place = (located.topic, located.partition)
        history = self._histories.setdefault(place, _PartitionHistory(self._log, self._run_id))
        progress = history.progress(task, located.partition)
        if progress is not NOTHING:
            turns = sum(map(progress.resumable, progress.turns))
            LOG.info(
                "task %s was begun: %d rollouts ended, %d turns recorded", task.task_id, len(progress.ended), turns
            )
        return progress

    def keep(self, owned: Set[Partition]) -> None:
        """Forget the partitions that are not among `owned`."""
        self._histories = {place: history for place, history in self._histories.items() if place in owned}

    def close(self) -> None:
        """Give the connections back."""
        self._log.close()
