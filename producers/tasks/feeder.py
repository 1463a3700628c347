"""The task feeder: issues evaluation before, training under admission control, evaluation during and after a run.

It exits when the run's last evaluation has closed. It holds no state that the log does not: it reads the topics to
their end, and then follows them. `FeederState` decides, `Feeder` does the talking. What holds:

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

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from types import MappingProxyType

from tidemill.producers.config import FeedSettings, RolloutSettings
from tidemill.producers.environments.base import Environment
from tidemill.producers.environments.open import open_environment
from tidemill.producers.tasks.admission import AdmissionController
from tidemill.producers.tasks.source import (
    Stage,
    TaskName,
    TaskSource,
    evaluation_size,
    parse_task_name,
)
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_us
from tidemill.schemas.config import EnvironmentEntry, KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import LOG_WAIT_S
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.guard import IdleTimes
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
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
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
TOPICS = (Topic.TASKS, Topic.GROUPS, Topic.STEPS, Topic.MANIFESTS, Topic.ACKS)
CLIENT_ID = "tidemill-feeder"
POLL_S = 0.05

AGAIN_AFTER_US = to_us(10)
"""So long after a held-out rollout failed its task is asked for again, for the first time."""


class FeederState:
    """State machine of the feeder of one run and branch; records of others are left alone."""

    def __init__(self, run: RunSettings, feed: FeedSettings) -> None:
        self._run, self._feed = run, feed
        self.admission = AdmissionController(run, feed)
        """The admission controller, to read from."""
        self._unissued = 0
        """Every training task before this one was issued."""
        self._issued_ahead: set[int] = set()
        """Training tasks issued after it."""
        self._eval_issued: dict[tuple[Stage, int], set[int]] = {}
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

    def decide(self, now_us: int) -> tuple[list[TaskName], bool]:
        """The tasks to issue at `now_us`, in order, and whether the run is over. They count once they are observed."""
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
        self._eval_issued.setdefault((name.stage, name.version), set()).add(name.index)
        if task.group_id not in self._eval_closed:
            self._eval_open[task.group_id] = task.deadline_at

    def _training(self) -> Iterator[TaskName]:
        if self._feed.eval_before:
            names = (parse_task_name(group) for group in self._eval_open)
            open_before = any(name is not None and name.stage is Stage.EVAL_BEFORE for name in names)
            if open_before or self._incomplete(Stage.EVAL_BEFORE):
                return
        unissued = (index for index in count(self._unissued) if index not in self._issued_ahead)
        for index in islice(unissued, self.admission.capacity()):
            yield TaskName(self._run.run_id, Stage.TRAIN, 0, index)

    def _evaluations(self, now_us: int) -> Iterator[TaskName]:
        for stage, version in self._due():
            size, issued = evaluation_size(self._feed, stage), self._eval_issued.get((stage, version), set())
            for name in (TaskName(self._run.run_id, stage, version, index) for index in range(size)):
                if name.index not in issued:
                    yield name
                elif version == self.admission.served_version:
                    # Once more, where a rollout of the last time failed long enough ago
                    times = next(times for times in count(1) if name.index + times * size not in issued)
                    failed_at = self._eval_failed.get(str(replace(name, index=name.index + (times - 1) * size)))
                    if failed_at is not None and now_us >= failed_at + AGAIN_AFTER_US * 2 ** (times - 1):
                        yield replace(name, index=name.index + times * size)

    def _due(self) -> Iterator[tuple[Stage, int]]:
        """Evaluations, each a stage at a version, that are under way or to begin."""
        served, every = self.admission.served_version, self._feed.eval_every
        if self._feed.eval_before:
            yield self._begun(Stage.EVAL_BEFORE) or (Stage.EVAL_BEFORE, served)
        if every > 0 and served >= every and not self.admission.finished:
            yield Stage.EVAL_DURING, served - served % every
        if self._feed.eval_after and self.admission.finished and served >= self.admission.newest_version:
            yield self._begun(Stage.EVAL_AFTER) or (Stage.EVAL_AFTER, served)

    def _begun(self, stage: Stage) -> tuple[Stage, int] | None:
        return next((known for known in self._eval_issued if known[0] is stage), None)

    def _incomplete(self, stage: Stage) -> bool:
        begun = self._begun(stage)
        return begun is None or not self._eval_issued[begun].issuperset(range(evaluation_size(self._feed, stage)))


WRITERS = MappingProxyType(
    {
        Topic.GROUPS: "rollout workers (`tidemill rollout`) and group assembly (`tidemill stream`)",
        Topic.STEPS: "the trainer (`tidemill train`)",
        Topic.MANIFESTS: "the trainer (`tidemill train`)",
        Topic.ACKS: "the replicas (`tidemill serve`)",
    }
)


class Feeder:
    """One run's feeder: records in, tasks out."""

    def __init__(self, run: RunSettings, feed: FeedSettings, source: TaskSource, producer: RecordProducer) -> None:
        self._state = FeederState(run, feed)
        self._source = source
        self._still: IdleTimes[Topic] = IdleTimes(to_us(feed.stall_timeout_s))
        self._read: Counter[Topic] = Counter()
        """Records of each topic, so that a topic that is waited for and silent is named."""
        self._producer = producer

    def observe(self, located: ConsumedRecord) -> None:
        """Take one record of the log. One that cannot be read is its writer's or its group reader's to answer for."""
        if located.record is None:
            LOG.warning("skipped an unreadable record at %s: %s", located.position, located.error)
            return
        self._state.observe(located.record)
        self._read[located.topic] += 1
        self._still.observe(located.topic, self._read[located.topic], True, now_us())
        if isinstance(located.record, Task | Group):
            self._source.observe(located.record)

    def advance(self) -> bool:
        """Issue what may be issued now; true when the run is over. Raises DeliveryError, TaskError."""
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
    """The environments of a run, to draw tasks from. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    found = []
    for entry in run.environments:
        environment = await open_environment(entry, entry.options, rollout)
        await environment.close()  # it is not played here, and draws tasks all the same
        found.append((entry, environment))
    return found


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    feed: FeedSettings,
    rollout: RolloutSettings,
    stop: threading.Event | None = None,
) -> bool:
    """Feed a run until it is over or `stop` is set (without one: SIGINT or SIGTERM comes); whether it is over.

    Raises UnknownEnvironment, EnvironmentFailed or TaskError when an environment cannot be opened or has no such tasks,
    DeliveryError when the log refuses them.
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
