"""The trainer role: it reads groups and online batches from the log and publishes weight versions.

It first publishes the starting checkpoint as version 0, so that replicas have a version to serve. When it is stopped,
it finishes the current step and writes a checkpoint. If several trainers run on one run, the one that was started last
continues, and the others end with FencedError.
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

    Raises FileNotFoundError without a starting checkpoint, NotRepeatableError or VersionError if the
    log does not fit the checkpoint and the settings, GroupTooSmallError for groups of one under an objective that
    compares rollouts, ValueError if the groups in the log are not in one order, RejectedLineError if the gate rejected
    every version, FencedError if another trainer took over the run, DeliveryError or KafkaException for errors of
    the log, RanksLostError if another rank failed or is lost.
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
            return TrainedWeights(trainer, make_learner(trainer, job), checkpoints, publisher, job, beside)

        if not job.ranks.is_first:
            open_weights(stack.enter_context(open_publisher())).follow()
            return
        producer = stack.enter_context(RecordProducer(kafka, CLIENT))
        # Fences other trainers of the run before anything is read: their later records would be missed.
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
    """Return the transactional name under which the only trainer of a run writes its steps and versions. Steps are
    numbered per run, so branches share it."""
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
        """Train up to step `max_steps`, or until stopped, and write a checkpoint."""
        while self._session.place.step < max_steps and (batch := self._next_batch()) is not None:
            self._not_before = time.monotonic() + self._settings.min_step_seconds
            self._beat(f"step {self._session.place.step + 1}")
            decisions = None if self._online is None else self._opened.line.decisions
            self.took(self._session.train(batch, decisions))
        self._checkpoint()

    def took(self, record: TrainStep | None) -> None:
        """Process the record of a step that was taken, if any, and write a checkpoint if one is due."""
        if record is None:
            return
        _log.info("train %s", json.dumps(summary(record)))
        self._opened.made(record)
        if record.step % self._settings.checkpoint_every == 0:
            self._checkpoint()

    def _next_batch(self) -> StepBatch | None:
        """Return the next batch, or None if stopped before it is complete."""
        while not self._stop.is_set():
            # A publication is part of its step: the step's timeout continues until it has ended.
            if not self._session.is_publishing():
                self._beat("reading on for the next batch")
            version, builder = self._session.place.version, self._opened.builder
            if self._online is not None:
                self._online.poll()
                builder.abandon(self._opened.line.abandoned)
            self._groups.poll(POLL_S, version)
            if self._online is not None and (start := self._opened.line.start()) != version:
                _log.warning("the gate abandoned version %d: training continues from version %d", version, start)
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
        # After `go_back` there is nothing new to store until the next step; the log is enough to reach this state.
        if place.step and place.version == place.step and place.step not in self._checkpoints.steps():
            kept = self._opened.line.milestones(self._settings.keep_checkpoints)
            self._session.checkpoint(self._opened.builder.progress(), self._opened.queue.progress(), kept)


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
