"""The trainer role: groups from the log in, weight versions out, until told to stop or the run's last step.

It publishes the starting checkpoint as version 0 before anything else, so that replicas have something to serve. On
stopping it finishes the step under way and writes a checkpoint.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack

from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import TrainStep
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.trainer.batch_builder import Batch, BatchBuilder
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.log_input import CLIENT, LogInput
from tidemill.trainer.publish import WeightPublisher
from tidemill.trainer.resume import open_session
from tidemill.trainer.session import Session

_log = logging.getLogger(__name__)

POLL_S = 0.1
REPORTED = ("reward", "success", "loss", "grad_norm", "entropy", "mismatch/k3", "mismatch/max_abs_dlogp", "lag/max")
"""Metrics of the line that each step logs."""


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    trainer: TrainerSettings,
    stop: threading.Event | None = None,
) -> None:
    """Train until `stop` is set (without one: until SIGINT or SIGTERM) or step `run.max_steps` is done.

    Raises FileNotFoundError without a starting checkpoint, HistoryError, ChainError or NotRepeatableError when the log
    does not fit the checkpoint and the settings, DeliveryError or KafkaException when the log fails.
    """
    stop = stop or stop_on_signals()
    checkpoints = CheckpointStore(store.root, run.run_id, run.branch, trainer.keep_checkpoints)
    with ExitStack() as stack:
        producer = stack.enter_context(RecordProducer(kafka, CLIENT))
        publisher = WeightPublisher.open(kafka, run, store, trainer.publish, base_model=trainer.model)
        session, builder = open_session(kafka, run, trainer, producer, stack.enter_context(publisher), checkpoints)
        _log.info("trainer at step %d of %d, version %d", session.place.step, run.max_steps, session.place.version)
        source = LogInput(kafka, builder, producer, limit_bytes=trainer.read_ahead_bytes, vocab_size=session.vocab_size)
        stack.enter_context(source)
        _Loop(session, builder, source, checkpoints, trainer, stop).run(run.max_steps)


class _Loop:
    """Batches, steps and checkpoints, in turn."""

    def __init__(
        self,
        session: Session,
        builder: BatchBuilder,
        source: LogInput,
        checkpoints: CheckpointStore,
        settings: TrainerSettings,
        stop: threading.Event,
    ) -> None:
        self._session = session
        self._builder = builder
        self._source = source
        self._checkpoints = checkpoints
        self._settings = settings
        self._stop = stop
        self._not_before = time.monotonic()

    def run(self, max_steps: int) -> None:
        """Train up to step `max_steps`, or until stopped, and leave a checkpoint."""
        while self._session.place.step < max_steps and (batch := self._next_batch()) is not None:
            self._not_before = time.monotonic() + self._settings.min_step_seconds
            _log.info("train %s", json.dumps(summary(self._session.train(batch))))
            if self._session.place.step % self._settings.checkpoint_every == 0:
                self._checkpoint()
        self._checkpoint()

    def _next_batch(self) -> Batch | None:
        """The next batch, or None when stopped before there is one."""
        while not self._stop.is_set():
            version = self._session.place.version
            self._source.poll(POLL_S, version)
            if time.monotonic() >= self._not_before and (batch := self._builder.close(version)) is not None:
                return batch
        return None

    def _checkpoint(self) -> None:
        step = self._session.place.step
        if step and step not in self._checkpoints.steps():
            self._session.checkpoint(self._checkpoints, self._builder.progress())


def summary(record: TrainStep) -> dict[str, float]:
    """What a step's log line says."""
    metrics = {name: round(record.metrics[name], 5) for name in REPORTED}
    return {
        "step": record.step,
        "version": record.version,
        **metrics,
        "rollouts": record.rollouts,
        "tokens": record.tokens,
        "excluded": len(record.exclusions),
        "seconds": round(record.metrics["seconds"], 3),
    }
