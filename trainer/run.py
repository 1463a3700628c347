"""The trainer role: it reads groups and online batches from the log and publishes weight versions.

It first publishes the starting checkpoint as version 0, so that replicas have a version to serve. When it is stopped,
it finishes the current step and writes a checkpoint. If several trainers run on one run, the one that was started last
continues, and the others end with FencedError.

A run is resumed after its last step, or from an older version, with the log and the nearest checkpoint. The log records
which steps were trained; a checkpoint only saves computing them again. Steps after the checkpoint are repeated from
their recorded inputs and checked. So no group is trained twice or skipped, whenever the trainer stopped. A step with a
plan but no record is taken on the inputs of its plan, and gives the weights that it would have given.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tidemill.kernels.weights.graph import VersionGraph
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.fenced_producer import FencedProducer
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import AckedWriter, RecordProducer
from tidemill.schemas.records import StepPlan, TrainStep
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.trainer.batch import InvalidRolloutError
from tidemill.trainer.batch_builder import BatchBuilder, StepBatch, advantage_of
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import NotRepeatableError, RecordedInputs, TrainerPosition, read_history, read_steps
from tidemill.trainer.job import open_job
from tidemill.trainer.log_input import CLIENT, LogInput
from tidemill.trainer.online_input import OnlineInput
from tidemill.trainer.online_queue import OnlineQueue, WeightLine
from tidemill.trainer.session import DECISIONS, Session
from tidemill.trainer.trained_weights import PUBLISH_LOOP_SECONDS, TrainedWeights, make_learner

_log = logging.getLogger(__name__)

POLL_S = 0.1
REPORTED = (
    "reward",
    "success",
    "online/reward",
    "online/members",
    "loss",
    "grad_norm",
    "entropy",
    "mismatch/k3",
    "mismatch/max_abs_dlogp",
    "routing/otherwise",
    "lag/max",
    PUBLISH_LOOP_SECONDS,
)
"""Metrics in the log line of each step."""


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    trainer: TrainerSettings,
    stop: threading.Event | None = None,
) -> None:
    """Train until `stop` is set (without one: until SIGINT or SIGTERM) or step `run.max_steps` is done.

    Under torchrun every rank calls this; all other ranks follow the commands of the first.

    Raises FileNotFoundError without a starting checkpoint, NotRepeatableError or VersionError if the log does not fit
    the checkpoint and the settings, ValueError for groups of one under an objective that compares rollouts and if the
    groups in the log are not in one order, RuntimeError if the gate rejected every version, FencedError if another
    trainer took over the run, DeliveryError or KafkaException for errors of the log, RanksLostError if another rank
    failed or is lost.
    """
    stop = stop or stop_on_signals()
    checkpoints = CheckpointStore(store.root, run.run_id, run.branch, trainer.keep_checkpoints)
    with ExitStack() as stack:
        job = stack.enter_context(open_job(trainer.ranks_timeout_s))
        job.require_same({"run": run, "store": store, "trainer": trainer})
        # A publication sends commands to the other ranks at the same time as a step does, so it has its own channel.
        ranks = job.ranks.sibling() if trainer.publish_beside else job.ranks
        open_publisher = partial(
            WeightPublisher.open, kafka, run, store, trainer.publish, base_model=trainer.model, ranks=ranks
        )

        def open_weights(publisher: WeightPublisher) -> TrainedWeights:
            # Closed before the publisher: a running publication is finished first, even if the loop failed.
            beside = stack.enter_context(ThreadPoolExecutor(1, "tidemill-publish")) if trainer.publish_beside else None
            learner = make_learner(trainer, job)
            return TrainedWeights(trainer, learner, checkpoints, publisher.publish, publisher.go_back, job, beside)

        if not job.ranks.is_first:
            open_weights(stack.enter_context(open_publisher())).follow()
            return
        producer = stack.enter_context(RecordProducer(kafka, CLIENT))
        # Fences other trainers of the run before anything is read: their later records would be missed.
        commits = FencedProducer(kafka, CLIENT, commit_name(kafka, run))
        publisher = stack.enter_context(open_publisher(manifests=commits))
        weights = open_weights(publisher)
        resumed = resume(kafka, run, producer, publisher.versions, commits, weights)
        _log.info("trainer at step %d of %d, version %d", resumed.place.step, run.max_steps, resumed.place.version)
        resumed.train(producer, stop, run.max_steps)
        weights.let_go()


def commit_name(kafka: KafkaSettings, run: RunSettings) -> str:
    """Return the transactional name under which the only trainer of a run writes its steps and versions. Steps are
    numbered per run, so branches share it."""
    return f"{kafka.topic_prefix}{CLIENT}.{run.run_id}"


@dataclass(slots=True)
class TrainingRun:
    """A run after its last recorded step, with everything up to it published; `train` takes the steps after it."""

    kafka: KafkaSettings
    run_id: str
    settings: TrainerSettings
    session: Session
    builder: BatchBuilder
    """Queue of the groups that have not ended."""
    queue: OnlineQueue
    """Queue of the online batches that have not ended."""
    line: WeightLine
    """The versions made so far; the gate's decisions have not been read yet."""
    planned: StepPlan | None
    """The plan of the next step, if it was written."""
    stored: int
    """The last step whose checkpoint was read or written; 0 without one."""
    _liveness: Liveness | None = field(default=None, init=False)
    """The watchdog of `train`; None before."""
    _not_before: float = 0.0
    """Earliest start of the next step, on the monotonic clock."""

    @property
    def place(self) -> TrainerPosition:
        return self.session.place

    def train(self, producer: RecordProducer, stop: threading.Event, max_steps: int) -> None:
        """Take the steps up to `max_steps`, or until stopped; write a checkpoint. `producer` writes dead letters."""
        weights = self.session.weights
        with ExitStack() as stack:
            reader = LogInput(self.kafka, self.settings, self.builder, producer, weights.vocab_size, weights.routed)
            groups, online = stack.enter_context(reader), None
            if self.settings.online.enabled:
                users = OnlineInput(self.kafka, self.settings, self.queue, self.line, producer, weights.vocab_size)
                online = stack.enter_context(users)
            self._liveness = stack.enter_context(Liveness("the trainer", self.kafka.stall_timeout_s))
            self._beat("the step that was begun before")
            if self.planned is not None and self.planned.step <= max_steps and not stop.is_set():
                self._on_step(self._take_planned(self.planned))
            while self.place.step < max_steps and (batch := self._next_batch(groups, online, stop)) is not None:
                self._not_before = time.monotonic() + self.settings.min_step_seconds
                self._beat(f"step {self.place.step + 1}")
                self._on_step(self.session.train(batch, None if online is None else self.line.decisions))
            self._checkpoint()
            self.session.wait_published()

    def made(self, record: TrainStep) -> None:
        """Register the version that a step made."""
        self.line.made(record.version, record.parent_version, int(record.metrics.get(DECISIONS, 0)))

    def go_back(self, version: int, step: int) -> None:
        """Continue training from `version`; the next step is `step` + 1. Raises as `Session.go_back`."""

        def begins(record: TrainStep) -> None:
            # Many steps may be repeated: the timeout is that of each.
            self._beat(f"step {record.step}, repeated on the way back to version {version}")

        with RecordedInputs(self.kafka, self.settings, self.session.weights) as inputs:
            self.session.go_back(version, step, read_steps(self.kafka, self.run_id), inputs, begins)

    def _take_planned(self, plan: StepPlan) -> TrainStep | None:
        """Take the planned step before reading more of the run; return None if it must be planned again.

        It must be planned again, with a newer plan in the log, if the gate rejected its parent, its inputs can no
        longer be read, a user has since asked to erase part of them, or the settings of the arithmetic have changed.
        Its groups have not ended then, and are decided again.

        The gate's decisions and the users' requests must have been read before. Raises as `Session.take` and `go_back`.
        """
        session, outdated, batch = self.session, "", None
        if plan.config_hash != session.config_hash:
            outdated = f"it was planned {session.difference(plan.config_hash)}"
        elif plan.parent_version in self.line.abandoned:
            outdated = f"the gate abandoned version {plan.parent_version}, from which it starts"
        else:
            try:
                with RecordedInputs(self.kafka, self.settings, self.session.weights) as inputs:
                    batch = inputs.of(plan)
            except (LookupError, InvalidRolloutError, NotRepeatableError) as error:
                outdated = f"its inputs can no longer be read ({error})"
        if batch is not None and batch.online is not None and self.queue.erased(batch.online):
            outdated = "a user asked to erase a part of its inputs"
        if outdated or batch is None:
            _log.warning("step %d was planned before the stop, and is planned again: %s", plan.step, outdated)
            return None
        if session.place.version != plan.parent_version:
            self.go_back(plan.parent_version, plan.step - 1)
        _log.info("step %d was planned by trainer %s and is taken on the same inputs", plan.step, plan.trainer)
        self.builder.observe_step(plan)
        self.queue.observe_step(plan)
        return session.take(plan, batch)

    def _on_step(self, record: TrainStep | None) -> None:
        """Process the record of a step that was taken, if any, and write a checkpoint if one is due."""
        if record is None:
            return
        _log.info("train %s", json.dumps(summary(record)))
        self.made(record)
        if record.step % self.settings.checkpoint_every == 0:
            self._checkpoint()

    def _next_batch(self, groups: LogInput, online: OnlineInput | None, stop: threading.Event) -> StepBatch | None:
        """Return the next batch, or None if stopped before it is complete."""
        while not stop.is_set():
            # A publication is part of its step: the step's timeout continues until it has ended.
            if not self.session.is_publishing():
                self._beat("reading on for the next batch")
            version, builder = self.place.version, self.builder
            if online is not None:
                online.poll()
                builder.abandon(self.line.abandoned)
            groups.poll(POLL_S, version)
            if online is not None and (start := self.line.start()) != version:
                _log.warning("the gate abandoned version %d: training continues from version %d", version, start)
                self.go_back(start, self.place.step)
                version = start
            if (now := time.monotonic()) < self._not_before:
                continue
            batch = builder.close(version) if online is None else online.next_batch(builder, version, now)
            if batch is not None:
                return batch
        return None

    def _beat(self, activity: str) -> None:
        if self._liveness is not None:
            self._liveness.beat(activity, self.settings.step_timeout_s)

    def _checkpoint(self) -> None:
        self._beat("a checkpoint")
        place = self.place
        # After `go_back` there is nothing new to store until the next step; the log is enough to reach this state. A
        # checkpoint of this step that is in the store already is of another log, and is replaced.
        if place.version == place.step != self.stored:
            kept = self.line.milestones(self.settings.keep_checkpoints)
            self.session.checkpoint(self.builder.progress(), self.queue.progress(), kept)
            self.stored = place.step


def resume(
    kafka: KafkaSettings,
    run: RunSettings,
    producer: RecordProducer,
    versions: VersionGraph,
    commits: AckedWriter,
    weights: TrainedWeights,
) -> TrainingRun:
    """Return the run after its last recorded step, with everything up to it published.

    `weights` are the weights that the run starts from; `commits` writes `train.steps` and fences other trainers;
    `versions` are the versions in the log.

    Raises NotRepeatableError or VersionError if the log, the checkpoint and the settings do not fit each other,
    ValueError as `advantage_of` does.
    """
    settings = weights.settings
    advantage_of(run, settings)  # before anything is published
    steps, planned = read_history(kafka, run.run_id)
    newest = weights.checkpoints.newest(len(steps))
    start = weights.snapshot() if newest else ""
    saved = weights.restore(newest) if newest else None
    session = Session(run, weights, producer, versions, steps=commits, step=saved.step if saved else 0)
    if saved is not None:
        session.require_recorded(steps[saved.step - 1])
        session.require_start(start)
    session.publish_start()
    line = WeightLine(run.run_id, run.branch)
    resumed = TrainingRun(
        kafka=kafka,
        run_id=run.run_id,
        settings=settings,
        session=session,
        builder=BatchBuilder(run, settings, saved.progress if saved else None, versions.incarnation),
        queue=OnlineQueue(run, settings, line, saved.online if saved else None, versions.incarnation),
        line=line,
        planned=planned,
        stored=saved.step if saved else 0,
    )
    for record in steps:
        resumed.made(record)
    missing = steps[session.place.step :]
    if missing:
        with RecordedInputs(kafka, settings, weights) as inputs:
            for record in missing:
                if session.place.version != record.parent_version:
                    resumed.go_back(record.parent_version, record.step - 1)
                session.repeat(record, inputs.of(record))
                resumed.builder.observe_step(record)
                resumed.queue.observe_step(record)
    return resumed


def summary(record: TrainStep) -> dict[str, float]:
    """Return the values in a step's log line."""
    metrics = {name: round(record.metrics[name], 5) for name in REPORTED if name in record.metrics}
    return {
        "step": record.step,
        "version": record.version,
        **metrics,
        "rollouts": record.rollouts,
        "tokens": record.tokens,
        "excluded": len(record.exclusions),
        "seconds": round(record.metrics["seconds"], 3),
    }
