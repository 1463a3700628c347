"""The task feeder: issues tasks for evaluation before, during and after a run, and for training (admission control).

It exits when the run's last evaluation has closed. All its state is in the log: it reads the topics to their end, and
then follows them. `FeederState` decides, `Feeder` reads and writes the log. Invariants:

- the state is a function of the observed records, so a restarted feeder that reads the log to its end continues where
  it stopped: a partly issued set of held-out tasks is completed under the same version, and a training task that a
  killed feeder did not write, although it wrote later ones, is issued first;
- no training task is issued while the evaluation before is open, and the evaluation after begins when the last version
  is served;
- the feeder stops waiting for a held-out group that has not closed when it is overdue;
- a held-out task with a failed rollout is issued again while the same version is served, with a doubled delay each
  time: otherwise a gate that needs a number of rollouts of that version would wait forever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import count, islice

from tidemill.producers.config import FeedSettings, RolloutSettings
from tidemill.producers.environments.base import Environment
from tidemill.producers.environments.open import open_environment
from tidemill.producers.tasks.admission import AdmissionController
from tidemill.producers.tasks.source import IndexSet, Stage, TaskName, TaskSource, evaluation_size, parse_task_name
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_us
from tidemill.schemas.config import EnvironmentEntry, KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import LOG_WAIT_S
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.guard import IdleTimes
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
TOPICS = (Topic.TASKS, Topic.GROUPS, Topic.STEPS, Topic.MANIFESTS, Topic.ACKS)
CLIENT_ID = "tidemill-feeder"
POLL_S = 0.05

AGAIN_AFTER_US = to_us(10)
"""Delay before the task of a failed held-out rollout is issued again for the first time."""


class FeederState:
    """State machine of the feeder of one run and branch; it ignores records of others."""

    def __init__(self, run: RunSettings, feed: FeedSettings) -> None:
        self._run, self._feed = run, feed
        self.admission = AdmissionController(run, feed)
        """The admission controller, for reading."""
        self._issued = IndexSet()
        """Indices of the training tasks that were issued."""
        self._eval_issued: dict[tuple[Stage, int], set[int]] = {}
        self._eval_open: dict[str, int] = {}
        self._eval_closed: set[str] = set()
        self._eval_failed: dict[str, int] = {}
        """Held-out groups with a failed rollout, with the time of their closing."""
        self._manifest_version = -1

    def observe(self, record: r.Record) -> None:
        """Process one record of `tasks`, `groups`, `train.steps`, `weights.manifests` or `weights.acks`."""
        run, replicas = self._run, self._feed.replica_ids
        match record:
            case r.Task() | r.Group() | r.TrainStep() | r.Manifest() | r.WeightAck() if record.run_id != run.run_id:
                return
            case r.Manifest() | r.WeightAck() if record.branch != run.branch:
                return
            case r.WeightAck() if replicas and record.replica_id not in replicas:
                return
        self.admission.observe(record)
        match record:
            case r.Task():
                name = parse_task_name(record.task_id)
                if name is not None and name.stage is Stage.TRAIN:
                    self._issued.add(name.index)
                elif name is not None:
                    self._eval_issued.setdefault((name.stage, name.version), set()).add(name.index)
                    if record.group_id not in self._eval_closed:
                        self._eval_open[record.group_id] = record.deadline_at
            case r.Group(mode=r.Mode.EVAL):
                self._eval_closed.add(record.group_id)
                self._eval_open.pop(record.group_id, None)
                failed = any(member.status is r.RolloutStatus.FAILED for member in record.members)
                if failed and record.closed_by is not r.CloseReason.LATE:
                    self._eval_failed[record.group_id] = record.closed_at
            case r.Manifest():
                self._manifest_version = max(self._manifest_version, record.version)

    def decide(self, now_us: int) -> tuple[list[TaskName], bool]:
        """Return the tasks to issue at `now_us`, in order, and whether the run is over. Tasks count when observed."""
        groups, replicas = self.admission.expire(now_us)
        limit = now_us - to_us(self._feed.overdue_s)
        overdue = [group for group, deadline in self._eval_open.items() if deadline < limit]
        for group in overdue:
            del self._eval_open[group]
            self._eval_closed.add(group)
            self._eval_failed[group] = now_us
        for group in (*groups, *overdue):
            LOG.warning("group %s never closed; it no longer counts as unfinished", group)
        for replica in replicas:
            LOG.warning("replica %s fell behind and is silent; not waiting for it", replica)
        names = [*self._evaluations(now_us), *self._training()] if self.admission.ready else []
        served = self.admission.finished and self.admission.served_version >= self.admission.newest_version
        done = not names and self.admission.ready and served and not self._eval_open
        done = done and not (self._feed.eval_after and self._incomplete(Stage.EVAL_AFTER))
        return names, done

    def waiting_for(self) -> frozenset[Topic]:
        """Return the topics that need a new record before the run can continue."""
        admission = self.admission
        waits = {
            Topic.MANIFESTS: self._manifest_version < max(0, admission.newest_version),
            Topic.ACKS: not admission.ready or admission.served_version < self._manifest_version,
            Topic.GROUPS: bool(self._eval_open) or admission.unclosed > 0,
            Topic.STEPS: admission.untrained > admission.unclosed and not admission.finished,
        }
        return frozenset(topic for topic, waiting in waits.items() if waiting)

    def _training(self) -> Iterator[TaskName]:
        if self._feed.eval_before:
            names = (parse_task_name(group) for group in self._eval_open)
            open_before = any(name is not None and name.stage is Stage.EVAL_BEFORE for name in names)
            if open_before or self._incomplete(Stage.EVAL_BEFORE):
                return
        unissued = (index for index in count(self._issued.first_missing) if index not in self._issued)
        for index in islice(unissued, self.admission.capacity()):
            yield TaskName(self._run.run_id, Stage.TRAIN, 0, index)

    def _evaluations(self, now_us: int) -> Iterator[TaskName]:
        # The evaluations (stage and version) that are running or must begin
        served, every, due = self.admission.served_version, self._feed.eval_every, list[tuple[Stage, int]]()
        if self._feed.eval_before:
            due.append(self._started(Stage.EVAL_BEFORE) or (Stage.EVAL_BEFORE, served))
        if every > 0 and served >= every and not self.admission.finished:
            due.append((Stage.EVAL_DURING, served - served % every))
        if self._feed.eval_after and self.admission.finished and served >= self.admission.newest_version:
            due.append(self._started(Stage.EVAL_AFTER) or (Stage.EVAL_AFTER, served))
        for stage, version in due:
            size, issued = evaluation_size(self._feed, stage), self._eval_issued.get((stage, version), set())
            for name in (TaskName(self._run.run_id, stage, version, index) for index in range(size)):
                if name.index not in issued:
                    yield name
                elif version == served:
                    # Issue it again if a rollout of the last issue failed long enough ago
                    times = next(times for times in count(1) if name.index + times * size not in issued)
                    failed_at = self._eval_failed.get(str(replace(name, index=name.index + (times - 1) * size)))
                    if failed_at is not None and now_us >= failed_at + AGAIN_AFTER_US * 2 ** (times - 1):
                        yield replace(name, index=name.index + times * size)

    def _started(self, stage: Stage) -> tuple[Stage, int] | None:
        return next((known for known in self._eval_issued if known[0] is stage), None)

    def _incomplete(self, stage: Stage) -> bool:
        started = self._started(stage)
        return started is None or not self._eval_issued[started].issuperset(range(evaluation_size(self._feed, stage)))


WRITERS: Mapping[Topic, str] = {
    Topic.GROUPS: "rollout workers (`tidemill rollout`) and group assembly (`tidemill stream`)",
    Topic.STEPS: "the trainer (`tidemill train`)",
    Topic.MANIFESTS: "the trainer (`tidemill train`)",
    Topic.ACKS: "the replicas (`tidemill serve`)",
}


class Feeder:
    """The feeder of one run: reads records and writes tasks."""

    def __init__(self, run: RunSettings, feed: FeedSettings, source: TaskSource, producer: RecordProducer) -> None:
        self._state = FeederState(run, feed)
        self._source = source
        self._still: IdleTimes[Topic] = IdleTimes(to_us(feed.stall_timeout_s))
        self._read: Counter[Topic] = Counter()
        """Number of records of each topic, to name a topic that the feeder waits for and that is silent."""
        self._producer = producer

    def observe(self, located: ConsumedRecord) -> None:
        """Process one record of the log. Skips an unreadable record: its writer or its group's reader handles it."""
        if located.record is None:
            LOG.warning("skipped an unreadable record at %s: %s", located.position, located.error)
            return
        self._state.observe(located.record)
        self._read[located.topic] += 1
        self._still.observe(located.topic, self._read[located.topic], True, now_us())
        if isinstance(located.record, r.Task | r.Group):
            self._source.observe(located.record)

    def advance(self) -> bool:
        """Issue the tasks that may be issued now; return whether the run is over. Raises DeliveryError, TaskError."""
        names, done = self._state.decide(now_us())
        waiting_for = self._state.waiting_for()
        for topic, writers in WRITERS.items():
            if self._still.observe(topic, self._read[topic], topic in waiting_for, now_us()) is not None:
                LOG.warning("no progress: nothing on topic %s. Look at %s", topic, writers)
        if names:
            issued_at, version = now_us(), self._state.admission.newest_version
            tasks = [self._source.task(name, issued_at, version) for name in names]
            self._producer.send_acked(Topic.TASKS, [(task.task_id, task) for task in tasks])
            for task in tasks:
                self._state.observe(task)
            LOG.info(
                "issued %d tasks, %s to %s, at version %d", len(tasks), tasks[0].task_id, tasks[-1].task_id, version
            )
        return done


async def opened(run: RunSettings, rollout: RolloutSettings) -> list[tuple[EnvironmentEntry, Environment]]:
    """Open the environments of a run to draw tasks from. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    found = []
    for entry in run.environments:
        environment = await open_environment(entry, entry.options, rollout)
        await environment.close()  # not played here; a closed environment can still draw tasks
        found.append((entry, environment))
    return found


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    feed: FeedSettings,
    rollout: RolloutSettings,
    stop: threading.Event | None = None,
) -> bool:
    """Feed a run until it is over or `stop` is set (by default: on SIGINT or SIGTERM); return whether it is over.

    Raises UnknownEnvironment, EnvironmentFailed or TaskError if an environment cannot be opened or has too few tasks,
    DeliveryError if the log refuses the tasks.
    """
    stop = stop or stop_on_signals()
    source = TaskSource(asyncio.run(opened(run, rollout)), run, feed)
    with (
        closing(source),
        RecordProducer(kafka, CLIENT_ID) as producer,
        LogReader(kafka, TOPICS, client_id=CLIENT_ID) as reader,
        Liveness("the feeder", kafka.stall_timeout_s) as liveness,
    ):
        feeder = Feeder(run, feed, source, producer)
        for located in reader.read_to_end():
            liveness.beat("reading the log to its end")
            feeder.observe(located)
        while not stop.is_set():
            liveness.beat("following the log", LOG_WAIT_S)
            if feeder.advance():
                return True
            for located in reader.poll(POLL_S):
                feeder.observe(located)
    return False
