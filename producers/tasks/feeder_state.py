"""What the feeder issues next: evaluation before, training under admission control, evaluation during and after.

A pure state machine: `observe` takes the records of the log in any order that each topic keeps, `decide` says what to
issue now. What holds:

- the state is a function of the records observed, so a restarted feeder that reads the log to its end goes on where it
  stopped: a set of held-out tasks of which some were issued is completed under the same version, and a training task
  that a killed feeder did not get to the log, while later ones did, is issued first;
- no training task is issued while the evaluation before is open, and the evaluation after begins when the last version
  is served;
- a held-out group that never closes stops being waited for once it is overdue;
- a held-out task with a rollout that failed is asked for again while the same version is served, each time after twice
  as long: a gate that waits for so many rollouts of that version would otherwise wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from tidemill.producers.config import FeedSettings
from tidemill.producers.tasks.admission import AdmissionController, AdmissionPolicy, ExpiredTasks
from tidemill.producers.tasks.source import Stage, TaskName, evaluation_size, parse_task_name
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import (
    CloseReason,
    Group,
    Manifest,
    Mode,
    Record,
    RolloutStatus,
    Task,
    TrainStep,
    WeightAck,
)

AGAIN_AFTER_US = to_us(10)
"""So long after a held-out rollout failed its task is asked for again, for the first time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    names: tuple[TaskName, ...]
    """Tasks to issue, in this order."""
    done: bool
    """The run is over: nothing is left to issue or to wait for."""
    expired: ExpiredTasks


class _EvalSet(NamedTuple):
    """One evaluation: a stage at a version."""

    stage: Stage
    version: int


class FeederState:
    """State machine of the feeder of one run and branch; records of others are left alone."""

    def __init__(self, run: RunSettings, feed: FeedSettings) -> None:
        self._run = run
        self._feed = feed
        self.admission = AdmissionController(
            AdmissionPolicy(
                groups_per_step=run.groups_per_step,
                max_policy_lag=0 if feed.sync else run.max_policy_lag,
                stale_lag=run.max_policy_lag,
                max_steps=run.max_steps,
                replicas=feed.replicas,
                replica_silence_us=to_us(feed.replica_silence_s),
                overdue_us=to_us(feed.overdue_s),
                min_completed=run.min_completed,
                skip_no_signal=run.skip_no_signal,
            )
        )
        """The admission controller, to read from."""
        self._unissued = 0
        """Every training task before this one was issued."""
        self._issued_ahead: set[int] = set()
        """Training tasks issued after it."""
        self._eval_issued: dict[_EvalSet, set[int]] = {}
        self._eval_open: dict[str, int] = {}
        self._eval_closed: set[str] = set()
        self._eval_failed: dict[str, int] = {}
        """Held-out groups with a rollout that failed, and when they closed."""
        self._manifest_version = -1

    def observe(self, record: Record) -> None:
        """Take one record of `tasks`, `groups`, `train.steps`, `weights.manifests` or `weights.acks`."""
        if not self._ours(record):
            return
        self.admission.observe(record)
        match record:
            case Task():
                self._observe_task(record)
            case Group(mode=Mode.EVAL):
                self._eval_closed.add(record.group_id)
                self._eval_open.pop(record.group_id, None)
                failed = any(member.status is RolloutStatus.FAILED for member in record.members)
                if failed and record.closed_by is not CloseReason.LATE:
                    self._eval_failed[record.group_id] = record.closed_at
            case Manifest():
                self._manifest_version = max(self._manifest_version, record.version)
            case _:
                pass

    def decide(self, now_us: int) -> Decision:
        """What to issue at `now_us`, and whether the run is over. The tasks count once they are observed."""
        expired = self.admission.expire(now_us)
        limit = now_us - to_us(self._feed.overdue_s)
        overdue = [group for group, deadline in self._eval_open.items() if deadline < limit]
        for group in overdue:
            del self._eval_open[group]
            self._eval_closed.add(group)
            self._eval_failed[group] = now_us
        names = (*self._evaluations(now_us), *self._training()) if self.admission.ready else ()
        done = not names and self._over()
        return Decision(names, done, ExpiredTasks((*expired.groups, *overdue), expired.replicas))

    def waiting_for(self) -> frozenset[Topic]:
        """The topics that have to speak for the run to go on."""
        admission = self.admission
        waits = {
            Topic.MANIFESTS: self._manifest_version < max(0, admission.newest_version),
            Topic.ACKS: not admission.ready or admission.served_version < self._manifest_version,
            Topic.GROUPS: bool(self._eval_open) or admission.unclosed > 0,
            Topic.STEPS: admission.untrained > admission.unclosed and not admission.finished,
        }
        return frozenset(topic for topic, waiting in waits.items() if waiting)

    def _ours(self, record: Record) -> bool:
        match record:
            case Task() | Group() | TrainStep():
                return record.run_id == self._run.run_id
            case WeightAck() if self._feed.replica_ids and record.replica_id not in self._feed.replica_ids:
                return False
            case Manifest() | WeightAck():
                return record.run_id == self._run.run_id and record.branch == self._run.branch
            case _:
                return False

    def _observe_task(self, task: Task) -> None:
        name = parse_task_name(task.task_id)
        if name is None:
            return
        if name.stage is Stage.TRAIN:
            if name.index >= self._unissued:
                self._issued_ahead.add(name.index)
            while self._unissued in self._issued_ahead:
                self._issued_ahead.remove(self._unissued)
                self._unissued += 1
            return
        self._eval_issued.setdefault(_EvalSet(name.stage, name.version), set()).add(name.index)
        if task.group_id not in self._eval_closed:
            self._eval_open[task.group_id] = task.deadline_at

    def _training(self) -> Iterator[TaskName]:
        if self._feed.eval_before and (self._incomplete(Stage.EVAL_BEFORE) or self._stage_open(Stage.EVAL_BEFORE)):
            return
        unissued = (index for index in count(self._unissued) if index not in self._issued_ahead)
        for index in islice(unissued, self.admission.capacity()):
            yield TaskName(self._run.run_id, Stage.TRAIN, 0, index)

    def _evaluations(self, now_us: int) -> Iterator[TaskName]:
        for due in self._due():
            issued = self._eval_issued.get(due, set())
            for index in range(self._size(due.stage)):
                if index not in issued:
                    yield self._name(due, index)
                elif due.version == self.admission.served_version:
                    yield from self._again(due, index, now_us)

    def _again(self, due: _EvalSet, index: int, now_us: int) -> Iterator[TaskName]:
        """Held-out task `index` once more, where a rollout of the last time failed long enough ago."""
        size, issued = self._size(due.stage), self._eval_issued[due]
        times = next(times for times in count(1) if index + times * size not in issued)
        failed_at = self._eval_failed.get(str(self._name(due, index + (times - 1) * size)))
        if failed_at is not None and now_us >= failed_at + AGAIN_AFTER_US * 2 ** (times - 1):
            yield self._name(due, index + times * size)

    def _name(self, due: _EvalSet, index: int) -> TaskName:
        return TaskName(self._run.run_id, due.stage, due.version, index)

    def _due(self) -> Iterator[_EvalSet]:
        served = self.admission.served_version
        if self._feed.eval_before:
            yield self._begun(Stage.EVAL_BEFORE) or _EvalSet(Stage.EVAL_BEFORE, served)
        every = self._feed.eval_every
        if every > 0 and served >= every and not self.admission.finished:
            yield _EvalSet(Stage.EVAL_DURING, served - served % self._feed.eval_every)
        if self._feed.eval_after and self.admission.finished and served >= self.admission.newest_version:
            yield self._begun(Stage.EVAL_AFTER) or _EvalSet(Stage.EVAL_AFTER, served)

    def _begun(self, stage: Stage) -> _EvalSet | None:
        return next((known for known in self._eval_issued if known.stage is stage), None)

    def _size(self, stage: Stage) -> int:
        return evaluation_size(self._feed, stage)

    def _incomplete(self, stage: Stage) -> bool:
        begun = self._begun(stage)
        return begun is None or any(index not in self._eval_issued[begun] for index in range(self._size(stage)))

    def _stage_open(self, stage: Stage) -> bool:
        names = (parse_task_name(group) for group in self._eval_open)
        return any(name is not None and name.stage is stage for name in names)

    def _over(self) -> bool:
        admission = self.admission
        last_served = admission.finished and admission.ready and admission.served_version >= admission.newest_version
        evaluated = not self._feed.eval_after or not self._incomplete(Stage.EVAL_AFTER)
        return last_served and evaluated and not self._eval_open
