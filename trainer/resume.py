"""Resuming a run after its last step, or from an older version, with the log and the nearest checkpoint.

The log records which steps were trained; a checkpoint only saves computing them again. Steps after the checkpoint are
repeated from their recorded inputs and checked. So no group is trained twice or skipped, whenever the trainer stopped.
A step with a plan but no record is taken on the inputs of its plan, and gives the weights that it would have given.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import AckedWriter, RecordProducer
from tidemill.schemas.records import StepPlan, TrainStep
from tidemill.trainer.batch import InvalidRolloutError
from tidemill.trainer.batch_builder import BatchBuilder, advantage_of
from tidemill.trainer.checkpoint import CheckpointStore, TrainerCheckpointError
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import NotRepeatableError, RecordedInputs, path_back, read_history, read_steps
from tidemill.trainer.online_queue import OnlineQueue, WeightLine
from tidemill.trainer.session import DECISIONS, Session
from tidemill.trainer.trained_weights import TrainedWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run after its last recorded step; everything up to this step is published."""

    kafka: KafkaSettings
    run_id: str
    settings: TrainerSettings
    checkpoints: CheckpointStore
    session: Session
    builder: BatchBuilder
    """Queue of the groups that have not ended."""
    queue: OnlineQueue
    """Queue of the online batches that have not ended."""
    line: WeightLine
    """The versions made so far; the gate's decisions have not been read yet."""
    begun: StepPlan | None
    """The plan of the next step, if it was written."""

    def made(self, record: TrainStep) -> None:
        """Register the version that a step made."""
        self.line.made(record.version, record.parent_version, int(record.metrics.get(DECISIONS, 0)))

    def recorded_inputs(self) -> RecordedInputs:
        """Return the inputs of recorded or planned steps; a context manager."""
        limit, session = self.settings.read_ahead_bytes, self.session
        return RecordedInputs(self.kafka, limit, session.vocab_size, session.routed)

    def go_back(self, version: int, step: int) -> None:
        """Continue training from `version`, with its weights and optimizer moments; the next step is `step` + 1.

        They are loaded from the nearest checkpoint among the version's ancestors, or from the model that the run
        started with; the steps after it are computed again from their recorded inputs and checked. Nothing is
        published: the version is in the log.

        Raises TrainerCheckpointError for a checkpoint that differs from the log, NotRepeatableError or
        LookupError if the steps after the nearest checkpoint cannot be computed again.
        """
        steps = {record.version: record for record in read_steps(self.kafka, self.run_id)}
        begin, path = path_back(version, steps, set(self.checkpoints.steps()))
        _log.info("going back to version %d: from the weights of version %d over %d steps", version, begin, len(path))
        self.session.go_back(begin)
        if begin:
            _require_recorded(self.session, steps[begin])
        if path:
            with self.recorded_inputs() as inputs:
                for record in path:
                    self.session.make_again(record, inputs.of(record))
        self.session.continue_from_here(step)

    def take_begun(self, plan: StepPlan) -> TrainStep | None:
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
                with self.recorded_inputs() as inputs:
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


def open_session(
    kafka: KafkaSettings,
    run: RunSettings,
    settings: TrainerSettings,
    producer: RecordProducer,
    publisher: WeightPublisher,
    checkpoints: CheckpointStore,
    commits: AckedWriter,
    weights: TrainedWeights,
) -> ResumedRun:
    """Return a session after the last recorded step, with everything up to it published, and its input queues.

    `weights` are the weights that the run starts from; `commits` writes `train.steps` and fences other trainers.

    Raises NotRepeatableError or VersionError if the log, the checkpoint and the settings do not fit each other,
    GroupTooSmallError as `advantage_of` does.
    """
    advantage_of(run, settings)  # before anything is published
    steps, begun = read_history(kafka, run.run_id)
    newest = checkpoints.newest(len(steps))
    saved = weights.restore(newest) if newest else None
    session = Session(run, settings, weights, producer, publisher, steps=commits, step=saved.step if saved else 0)
    if saved is not None:
        _require_recorded(session, steps[saved.step - 1])
    session.publish_start()
    line = WeightLine(run.run_id, run.branch)
    opened = ResumedRun(
        kafka=kafka,
        run_id=run.run_id,
        settings=settings,
        checkpoints=checkpoints,
        session=session,
        builder=BatchBuilder(run, settings, saved.progress if saved else None, publisher.incarnation),
        queue=OnlineQueue(run, settings, line, saved.online if saved else None, publisher.incarnation),
        line=line,
        begun=begun,
    )
    for record in steps:
        opened.made(record)
    missing = steps[session.place.step :]
    if missing:
        with opened.recorded_inputs() as inputs:
            for record in missing:
                if session.place.version != record.parent_version:
                    opened.go_back(record.parent_version, record.step - 1)
                session.repeat(record, inputs.of(record))
                opened.builder.observe_step(record)
                opened.queue.observe_step(record)
    return opened


def _require_recorded(session: Session, record: TrainStep) -> None:
    """Raise TrainerCheckpointError unless the session has the weights that a step made."""
    if session.place.fingerprint == record.fingerprint:
        return
    found = (
        f"the checkpoint of step {record.step} holds weights {session.place.fingerprint}, the log recorded "
        f"{record.fingerprint}"
    )
    if session.config_hash != record.config_hash:
        # The serving format is the only setting that changes the weights loaded from a checkpoint.
        raise TrainerCheckpointError(
            f"{found}, trained {session.difference(record.config_hash)}: start with the run's "
            "trainer.serving_format, which cannot change. If it has not changed, the checkpoint is damaged"
        )
    raise TrainerCheckpointError(f"{found}: it is damaged or of another run; delete it, and an older one is used")
