"""Finds in the log what other workers, or this one before it was started again, left of the tasks that it gets.

What holds: the log is looked at once for each partition of `tasks` that is assigned, when its first task arrives, from
the time of that task on: whoever had the partition took its tasks in order and committed none past an unfinished one,
so that everything of later tasks lies after that time. `rollouts` is read only where a task arrives that was begun.
Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Set

from tidemill.producers.offsets import Partition
from tidemill.producers.progress import Begun, Progress
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.located import Located
from tidemill.schemas.lookback import Lookback
from tidemill.schemas.partitioner import partition_of
from tidemill.schemas.records import Task

LOG = logging.getLogger(__name__)
SKEW_US = 10_000_000
"""How far the clocks of those who write tasks, dispatches and rollouts may be apart."""
NOTHING = Begun()


class _History:
    """What the log had of one partition's tasks when it was assigned."""

    def __init__(self, lookback: Lookback, run_id: str) -> None:
        self._lookback = lookback
        self._run_id = run_id
        self._progress: Progress | None = None
        self._rollouts_read = False
        self._read_at = 0

    def begun(self, task: Task, partition: int) -> Begun:
        if self._progress is None:
            self._read_at = now_us()
            self._progress = self._read_progress(task, partition)
        if task.issued_at > self._read_at + SKEW_US:
            self._progress = Progress(self._run_id)  # tasks from now on were issued after it was read
        if not self._progress.was_begun(task):
            return NOTHING
        if not self._rollouts_read:
            self._rollouts_read = True
            self._read_rollouts(self._progress)
        return self._progress.begun(task)

    def _read_progress(self, task: Task, partition: int) -> Progress:
        progress = Progress(self._run_id)
        for located in self._lookback.read(Topic.PROGRESS, partition, to_ms(task.issued_at - SKEW_US)):
            progress.observe(located.record)
        return progress

    def _read_rollouts(self, progress: Progress) -> None:
        count = self._lookback.partitions(Topic.ROLLOUTS)
        for partition in sorted({partition_of(group, count) for group in progress.groups}):
            for located in self._lookback.read(Topic.ROLLOUTS, partition, to_ms(progress.first_at - SKEW_US)):
                progress.observe(located.record)


class Takeover:
    """What was begun of the tasks in the partitions of one worker."""

    def __init__(self, lookback: Lookback, run_id: str) -> None:
        self._lookback = lookback
        self._run_id = run_id
        self._histories: dict[Partition, _History] = {}

    def begun(self, located: Located) -> Begun:
        """What the log has of the task in a record; nothing of a record that is no task of the run.

        Raises LookupError, TimeoutError or KafkaException when the log cannot be read.
        """
        task = located.record
        if not isinstance(task, Task) or task.run_id != self._run_id:
            return NOTHING
        history = self._histories.setdefault((located.topic, located.partition), _History(self._lookback, self._run_id))
        begun = history.begun(task, located.partition)
        if begun is not NOTHING:
            turns = sum(map(begun.resumable, begun.turns))
            LOG.info("task %s was begun: %d rollouts ended, %d turns recorded", task.task_id, len(begun.ended), turns)
        return begun

    def keep(self, owned: Set[Partition]) -> None:
        """Forget the partitions that are not among `owned`."""
        self._histories = {place: history for place, history in self._histories.items() if place in owned}

    def close(self) -> None:
        """Give the connections back."""
        self._lookback.close()
