"""Turns the names that the feeder decides on into tasks, by drawing from an environment.

What holds: a training payload is issued once in a run, restarts and changed options included, and is never one of the
held-out ones; held-out task `i` is the same at every evaluation, so that evaluations compare, and comes again under
the index `i + n * size` where an evaluation of that size asks for it again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

from tidemill.producers.config import FeedSettings
from tidemill.producers.environment import Environment, Split, TaskDraft, TaskError, TaskQuery
from tidemill.producers.task_names import Stage, TaskName, parse_task_name
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import Mode, Task

AS_MANY_AS_THERE_ARE = sys.maxsize


class TaskSource:
    """Draws the tasks of one run. Raises `TaskError` at once when the environment refuses the options."""

    def __init__(self, environment: Environment, run: RunSettings, feed: FeedSettings) -> None:
        self._environment = environment
        self._run = run
        self._feed = feed
        held_out = max(feed.eval_tasks, feed.eval_during_tasks)
        self._held_out = list(self._draw(Split.EVAL, held_out))
        self._used = {draft.payload for draft in self._held_out}
        self._training = self._draw(Split.TRAIN, AS_MANY_AS_THERE_ARE)

    def observe(self, task: Task) -> None:
        """Remember that a training task of this run was issued, by this process or one before it."""
        name = parse_task_name(task.task_id)
        if task.run_id == self._run.run_id and name is not None and name.stage is Stage.TRAIN:
            self._used.add(task.payload)

    def task(self, name: TaskName, issued_at: int, issued_version: int) -> Task:
        """The task to issue under `name`. Raises `TaskError` when the environment has no unused one left."""
        training = name.stage.mode is Mode.TRAIN
        draft = self._unused() if training else self._held_out[name.index % evaluation_size(self._feed, name.stage)]
        deadline_s = self._feed.deadline_s if training else self._feed.eval_deadline_s
        return Task(
            task_id=str(name),
            group_id=str(name),
            run_id=name.run_id,
            environment=self._environment.name,
            payload=draft.payload,
            mode=name.stage.mode,
            group_size=self._feed.group_size if training else self._feed.eval_group_size,
            max_turns=draft.max_turns,
            seed=task_seed(self._run.seed, name),
            issued_at=issued_at,
            deadline_at=issued_at + to_us(deadline_s),
            issued_version=issued_version,
        )

    def _draw(self, split: Split, count: int) -> Iterator[TaskDraft]:
        query = TaskQuery(self._run.seed, count, split, self._feed.options)
        for draft in self._environment.tasks(query):
            if draft.split is not split:
                raise TaskError(f"{self._environment.name} answered a query for {split} tasks with a {draft.split} one")
            yield draft

    def _unused(self) -> TaskDraft:
        for draft in self._training:
            if draft.payload not in self._used:
                self._used.add(draft.payload)
                return draft
        raise TaskError(f"{self._environment.name} has no unused training task left; allow more by its options")


def evaluation_size(feed: FeedSettings, stage: Stage) -> int:
    """Held-out tasks of an evaluation."""
    return feed.eval_during_tasks if stage is Stage.EVAL_DURING else feed.eval_tasks


def task_seed(run_seed: int, name: TaskName) -> int:
    """The seed of a task: 63 bits of BLAKE2b over the run's seed and the task's name."""
    digest = hashlib.blake2b(f"{run_seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
