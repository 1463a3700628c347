"""The trainer role: groups and online batches from the log in, weight versions out, until told to stop or done.

It publishes the starting checkpoint as version 0 before anything else, so that replicas have something to serve. On
stopping it finishes the step under way and writes a checkpoint. Of several trainers on one run the one that was started
last goes on, and the others end with FencedError.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.fenced_producer import FencedProducer
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import TrainStep
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.job import open_job
from tidemill.trainer.log_input import CLIENT, LogInput
from tidemill.trainer.online_input import OnlineInput
from tidemill.trainer.resume import ResumedRun, open_session
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
"""Metrics of the line that each step logs."""


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    trainer: TrainerSettings,
    stop: threading.Event | None = None,
) -> None:
    """Train until `stop` is set (without one: until SIGINT or SIGTERM) or step `run.max_steps` is done.

    Under torchrun every rank calls this; all but the first do what the first one tells them.

    Raises FileNotFoundError without a starting checkpoint, NotRepeatableError or VersionError when the
    log does not fit the checkpoint and the settings, GroupTooSmallError for groups of one under an objective that
    compares rollouts, ValueError when the log has no one order of groups, RejectedLineError when the gate left no
    version to train on from, FencedError when another trainer took the run over, DeliveryError or KafkaException when
    the log fails, RanksLostError when another rank failed or is gone.
    """
    stop = stop or stop_on_signals()
    checkpoints = CheckpointStore(store.root, run.run_id, run.branch, trainer.keep_checkpoints)
    with ExitStack() as stack:
        job = stack.enter_context(open_job(trainer.ranks_timeout_s))
        job.require_same({"run": run, "store": store, "trainer": trainer})
        # What a publication tells the other ranks runs beside what a step tells them.
        ranks = job.ranks.sibling() if trainer.publish_beside else job.ranks
        open_publisher = partial(
            WeightPublisher.open, kafka, run, store, trainer.publish, base_model=trainer.model, ranks=ranks
        )

        def open_weights(publisher: WeightPublisher) -> TrainedWeights:
            # Left before the publisher: a publication under way is finished, whatever ended the loop.
            beside = stack.enter_context(ThreadPoolExecutor(1, "tidemill-publish")) if trainer.publish_beside else None
            return TrainedWeights(trainer, make_learner(trainer, job), checkpoints, publisher, job, beside)

        if not job.ranks.is_first:
            open_weights(stack.enter_context(open_publisher())).follow()
            return
        producer = stack.enter_context(RecordProducer(kafka, CLIENT))
        # Before anything is read: what another trainer of the run may still write would not be seen.
        commits = FencedProducer(kafka, CLIENT, commit_name(kafka, run))
        publisher = stack.enter_context(open_publisher(manifests=commits))
        weights = open_weights(publisher)
        opened = open_session(kafka, run, trainer, producer, publisher, checkpoints, commits, weights)
        place, vocab_size, routed = opened.session.place, opened.session.vocab_size, opened.session.routed
        _log.info("trainer at step %d of %d, version %d", place.step, run.max_steps, place.version)
        groups = stack.enter_context(LogInput(kafka, trainer, opened.builder, producer, vocab_size, routed))
        online = None
        if trainer.online.enabled:
            online = OnlineInput(kafka, trainer, opened.queue, opened.line, producer, vocab_size)
            stack.enter_context(online)
        liveness = stack.enter_context(Liveness("the trainer", kafka.stall_timeout_s))
        loop = _Loop(opened, groups, online, checkpoints, trainer, stop, liveness)
        liveness.beat("the step that was begun before", trainer.step_timeout_s)
        if opened.begun is not None and opened.begun.step <= run.max_steps and not stop.is_set():
            loop.took(opened.take_begun(opened.begun))
        loop.run(run.max_steps)
        opened.session.wait_published()
        weights.let_go()


def commit_name(kafka: KafkaSettings, run: RunSettings) -> str:
    """The name under which the one trainer of a run writes its steps and versions. Steps are numbered by run, so that
    branches share it."""
    return f"{kafka.topic_prefix}{CLIENT}.{run.run_id}"


class _Loop:
    def __init__(
        self,
        opened: ResumedRun,
        groups: LogInput,
        online: OnlineInput | None,
        checkpoints: CheckpointStore,
        settings: TrainerSettings,
        stop: threading.Event,
        liveness: Liveness,
    ) -> None:
        self._liveness = liveness
        self._opened = opened
        self._session = opened.session
        self._groups, self._online = groups, online
        self._checkpoints, self._settings, self._stop = checkpoints, settings, stop
        self._not_before = time.monotonic()

    def run(self, max_steps: int) -> None:
        """Train up to step `max_steps`, or until stopped, and leave a checkpoint."""
        while self._session.place.step < max_steps and (batch := self._next_batch()) is not None:
            self._not_before = time.monotonic() + self._settings.min_step_seconds
            self._beat(f"step {self._session.place.step + 1}")
            decisions = None if self._online is None else self._opened.line.decisions
            self.took(self._session.train(batch, decisions))
        self._checkpoint()

    def took(self, record: TrainStep | None) -> None:
        """Take in that a step was taken, or none, and leave a checkpoint where one is due."""
        if record is None:
            return
        _log.info("train %s", json.dumps(summary(record)))
        self._opened.made(record)
        if record.step % self._settings.checkpoint_every == 0:
            self._checkpoint()

    def _next_batch(self) -> StepBatch | None:
        """The next batch, or None when stopped before there is one."""
        while not self._stop.is_set():
            # A publication has the time of the step that it follows.
            if not self._session.is_publishing():
                self._beat("reading on for the next batch")
            version, builder = self._session.place.version, self._opened.builder
            if self._online is not None:
                self._online.poll()
                builder.abandon(self._opened.line.abandoned)
            self._groups.poll(POLL_S, version)
            if self._online is not None and (start := self._opened.line.start()) != version:
                _log.warning("version %d was given up by the gate: training continues from version %d", version, start)
                self._opened.go_back(start, self._session.place.step)
                version = start
            if (now := time.monotonic()) < self._not_before:
                continue
            batch = builder.close(version) if self._online is None else self._online.close(builder, version, now)
            if batch is not None:
                return batch
        return None

    def _beat(self, activity: str) -> None:
        self._liveness.beat(activity, self._settings.step_timeout_s)

    def _checkpoint(self) -> None:
        self._beat("a checkpoint")
        place = self._session.place
        # After going back there is nothing new to keep until the next step, which the log leads to as well.
        if place.step and place.version == place.step and place.step not in self._checkpoints.steps():
            kept = self._opened.line.milestones(self._settings.keep_checkpoints)
            self._session.checkpoint(self._opened.builder.progress(), self._opened.queue.progress(), kept)


def summary(record: TrainStep) -> dict[str, float]:
    """The text of a step's log line."""
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
