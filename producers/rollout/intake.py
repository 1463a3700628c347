"""Reads tasks from the log as a member of a consumer group, with their recorded parts, and commits finished ones.

Invariants:

- while no task is wanted, the member polls every `PATIENCE_S` with its partitions paused, so that it stays a member and
  delays a rebalance no longer than that. It does not pause at once, because a paused partition needs about a second to
  deliver again, and the records that were fetched ahead are lost;
- the record of tasks that were begun earlier is read once for each assigned partition of `tasks`, when its first task
  arrives, from the time of that task on. The former owner of the partition took its tasks in order and committed none
  past an unfinished one, so that all records of later tasks are newer than that time. `rollouts` is read only for a
  task that was begun.

`TaskIntake` blocks and needs a thread of its own; the other classes are pure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Dispatch, Record, Rollout, Task, Turn, rollout_id

LOG = logging.getLogger(__name__)
Partition = tuple[Topic, int]
POLL_S = 0.05
PATIENCE_S = 2.0
REBALANCING = frozenset({
    KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS, KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._STATE, KafkaError._ASSIGNMENT_LOST, KafkaError._WAIT_COORD, KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
})  # fmt: skip
"""The errors of a commit that need no action: the partitions are moving to another member, or the group to another
broker."""
FENCED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL, KafkaError._FENCED})
"""The errors of a static member that another one replaced."""
SKEW_US = 10_000_000
"""The largest difference between the clocks of the writers of tasks, dispatches and rollouts."""


class OffsetTracker:
    """Offsets that may be committed if work finishes out of order. Pure.

    Invariants: the offset to commit of a partition is never past a record with unfinished work, so that work that a
    crash interrupts is delivered again; a record delivered again while its work runs, or after it, is not begun twice.
    """

    def __init__(self) -> None:
        self._running: dict[Partition, set[int]] = {}
        self._next: dict[Partition, int] = {}
        self.committed: dict[Partition, int] = {}
        """The offsets that were committed."""

    def begin(self, partition: Partition, offset: int) -> bool:
        """Store a record; return whether to begin its work. Offsets of a partition arrive in order, with gaps."""
        if offset < self._next.get(partition, 0):
            return False
        self._running.setdefault(partition, set()).add(offset)
        self._next[partition] = offset + 1
        return True

    def finish(self, partition: Partition, offset: int) -> None:
        """Mark the work of a record as done; ignore a dropped partition."""
        self._running.get(partition, set()).discard(offset)

    def drop(self, partition: Partition) -> None:
        """Forget a partition that now belongs to another member."""
        for state in (self._running, self._next, self.committed):
            state.pop(partition, None)

    def partitions(self) -> set[Partition]:
        """Return the partitions from which a record has arrived."""
        return set(self._next)

    def committable(self) -> dict[Partition, int]:
        """Return the next offset to read of each partition in which it is not committed yet."""
        marks = {partition: min(self._running[partition], default=end) for partition, end in self._next.items()}
        return {partition: mark for partition, mark in marks.items() if mark > self.committed.get(partition, 0)}


@dataclass(frozen=True, slots=True)
class TaskProgress:
    ended: frozenset[int] = frozenset()
    """Indexes in the group of the rollouts that are in the log."""
    turns: Mapping[int, tuple[Turn, ...]] = field(default_factory=dict)
    """Recorded turns of the other rollouts, by index, in log order, unchecked."""

    def resumable(self, index: int) -> int:
        """Return how many turns of an index are recorded. Turns of several workers with equal contexts count once."""
        return len({(turn.context, turn.turn) for turn in self.turns.get(index, ())})


NOTHING = TaskProgress()


class StartedTasks:
    """The started tasks of one run, from the records of `rollouts.progress` and `rollouts` in log order."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.tasks: set[str] = set()
        """Dispatched tasks."""
        self._turns: dict[str, list[Turn]] = {}
        self._ended: set[str] = set()
        self.groups: set[str] = set()
        """Their groups."""
        self.first_at = 0
        """Time of the first dispatch, in microseconds since the Unix epoch; 0 if there is none."""
        self.rollouts_read = False
        """Whether the records of `rollouts` were read."""

    def observe(self, record: Record | None) -> None:
        """Process one record; ignore records of other runs."""
        match record:
            case Dispatch() if record.run_id == self._run_id:
                self.first_at = min(record.at, self.first_at) if self.tasks else record.at
                self.tasks.add(record.task_id)
                self.groups.add(record.group_id)
            case Turn() if record.run_id == self._run_id:
                self._turns.setdefault(record.rollout_id, []).append(record)
            case Rollout() if record.run_id == self._run_id and record.group_id in self.groups:
                self._ended.add(record.rollout_id)

    def progress(self, task: Task) -> TaskProgress:
        """Return the recorded part of a task. Its turns are returned only once and then deleted."""
        names = [rollout_id(task.group_id, index) for index in range(task.group_size)]
        ended = frozenset(index for index, name in enumerate(names) if name in self._ended)
        turns = {index: tuple(self._turns.pop(name, ())) for index, name in enumerate(names)}
        return TaskProgress(ended, {index: found for index, found in turns.items() if found and index not in ended})


class TaskIntake:
    """Reads tasks for one member of the consumer group, with the recorded parts of those that were begun."""

    def __init__(self, member: GroupConsumer, log: LogReader, run_id: str) -> None:
        self._member, self._log, self._run_id = member, log, run_id
        self._paused = False
        self._polled_at = time.monotonic()
        self._started: dict[Partition, tuple[int, StartedTasks]] = {}
        """For each partition: the time at which its records were read, in µs since the Unix epoch, and their tasks."""

    def round(
        self, wanted: bool, offsets: dict[Partition, int]
    ) -> tuple[list[tuple[ConsumedRecord, TaskProgress]], set[Partition], dict[Partition, int]]:
        """Commit `offsets` of owned partitions; if a record is wanted, take at most one and wait up to `POLL_S`.

        Returns records of `tasks`, each with the recorded part of its task; the partitions that are owned; and the
        offsets that were committed.

        Raises RuntimeError if another worker has the same name; KafkaException, LookupError or TimeoutError if the log
        cannot be read.
        """
        try:
            committed = self._commit(offsets)
            located: list[ConsumedRecord] = []
            if wanted or time.monotonic() - self._polled_at >= PATIENCE_S:
                if not wanted:
                    self._member.pause()
                elif self._paused:
                    self._member.resume()
                self._paused = not wanted
                # A newly assigned partition is not paused, and may deliver a record that is not wanted.
                located = self._member.poll(POLL_S if wanted else 0.0, max_records=1)
                self._polled_at = time.monotonic()
        except KafkaException as error:
            if error.args[0].code() not in FENCED:
                raise
            raise RuntimeError(
                "another worker of this run joined under the same name: give every worker its own rollout.worker_id"
            ) from error
        owned = self._member.assignment()
        self._started = {place: started for place, started in self._started.items() if place in owned}
        return [(one, self._progress(one)) for one in located], owned, committed

    def _commit(self, offsets: dict[Partition, int]) -> dict[Partition, int]:
        owned = self._member.assignment()
        mine = {partition: offset for partition, offset in offsets.items() if partition in owned}
        try:
            self._member.commit(mine)
        except KafkaException as error:
            if error.args[0].code() not in REBALANCING:
                raise
            LOG.info("commit put off until the group is balanced: %s", error)
            return {}
        return mine

    def _progress(self, located: ConsumedRecord) -> TaskProgress:
        """Return the recorded part of the task in a record, or nothing if the record is not a task of the run.

        Raises LookupError, TimeoutError or KafkaException if the log cannot be read.
        """
        task, log = located.record, self._log
        if not isinstance(task, Task) or task.run_id != self._run_id:
            return NOTHING
        place = (located.topic, located.partition)
        if place not in self._started:
            self._started[place] = now_us(), StartedTasks(self._run_id)
            for found in log.read_since(Topic.PROGRESS, located.partition, to_ms(task.issued_at - SKEW_US)):
                self._started[place][1].observe(found.record)
        read_at, started = self._started[place]
        if task.issued_at > read_at + SKEW_US:  # tasks from now on were issued after it was read
            self._started[place] = read_at, StartedTasks(self._run_id)
            return NOTHING
        if task.task_id not in started.tasks:
            return NOTHING
        if not started.rollouts_read:
            started.rollouts_read = True
            count = len(log.partitions(Topic.ROLLOUTS))
            for number in sorted({partition_of(group, count) for group in started.groups}):
                for found in log.read_since(Topic.ROLLOUTS, number, to_ms(started.first_at - SKEW_US)):
                    started.observe(found.record)
        progress = started.progress(task)
        turns = sum(map(progress.resumable, progress.turns))
        LOG.info("task %s was begun: %d rollouts ended, %d turns recorded", task.task_id, len(progress.ended), turns)
        return progress
