"""Going on where a run stopped, or from an older version, from the log and the nearest checkpoint.

The log says which steps were trained; a checkpoint only saves making them again. Steps after it are repeated from their
recorded inputs and checked, so at any moment of the stop, no group is trained twice and none is skipped. A step
that was begun and has no record is taken on the inputs of its plan, and gives the weights that it would have given.
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
    """A run after its last recorded step, everything up to it published."""

    kafka: KafkaSettings
    run_id: str
    settings: TrainerSettings
    checkpoints: CheckpointStore
    session: Session
    builder: BatchBuilder
    """For the groups that have not ended."""
    queue: OnlineQueue
    """For the online batches that have not ended."""
    line: WeightLine
    """The versions that were made; the gate's decisions are yet to be read."""
    begun: StepPlan | None
    """The next step, where it was begun."""

    def made(self, record: TrainStep) -> None:
        """Take in that a step was taken."""
        self.line.made(record.version, record.parent_version, int(record.metrics.get(DECISIONS, 0)))

    def recorded_inputs(self) -> RecordedInputs:
        """The inputs of steps that were recorded or planned; a context manager."""
        limit, session = self.settings.read_ahead_bytes, self.session
        return RecordedInputs(self.kafka, limit, session.vocab_size, session.routed)

    def go_back(self, version: int, step: int) -> None:
        """Train on from `version`, its weights with the optimizer's moments of then, with the step after `step`.

        They come from the nearest checkpoint on the version's line, or from the model that the run started with; the
        steps after it are made again from their recorded inputs and checked. Nothing is published by it: the version is
        in the log.

        Raises TrainerCheckpointError for a checkpoint that is not what the log recorded, NotRepeatableError or
        LookupError when the steps after the nearest checkpoint cannot be made again.
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
        """Take the step that was begun, before anything of the run is read on; None when it has to be begun anew.

        That is so, and a newer plan in the log says it, when its parent was given up by the gate, its inputs can no
        longer be read, a user has since asked for something of them to be erased, or the settings of the arithmetic
        are others now. Its groups have not ended then, and are decided again.

        What the gate decided and users requested is known by now. Raises what `Session.take` and `go_back` do.
        """
        session, outdated, batch = self.session, "", None
        if plan.config_hash != session.config_hash:
            outdated = f"it was planned {session.difference(plan.config_hash)}"
        elif plan.parent_version in self.line.abandoned:
            outdated = f"the gate gave up version {plan.parent_version}, from which it starts"
        else:
            try:
                with self.recorded_inputs() as inputs:
                    batch = inputs.of(plan)
            except (LookupError, InvalidRolloutError, NotRepeatableError) as error:
                outdated = f"its inputs can no longer be read ({error})"
        if batch is not None and batch.online is not None and self.queue.erased(batch.online):
            outdated = "a user asked for something of its inputs to be erased"
        if outdated or batch is None:
            _log.warning("step %d was begun, and is planned again: %s", plan.step, outdated)
            return None
        if session.place.version != plan.parent_version:
            self.go_back(plan.parent_version, plan.step - 1)
        _log.info("step %d was begun by trainer %s and is taken on the same inputs", plan.step, plan.trainer)
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
    """A session after the last recorded step, everything up to it published, and what goes on from there.

    `weights` are those that the run starts from; `commits` writes `train.steps`, and lets no other trainer do so.

    Raises NotRepeatableError or VersionError when the log, the checkpoint and the settings do not fit,
    GroupTooSmallError as `advantage_of`.
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
    """Raise TrainerCheckpointError unless the weights held are those that a step made."""
    if session.place.fingerprint == record.fingerprint:
        return
    found = (
        f"the checkpoint of step {record.step} holds weights {session.place.fingerprint}, the log recorded "
        f"{record.fingerprint}"
    )
    if session.config_hash != record.config_hash:
        # Other settings change the weights of a checkpoint only by the format in which they are served.
        raise TrainerCheckpointError(
            f"{found}, trained {session.difference(record.config_hash)}: start with the trainer.serving_format of "
            "then: it cannot change during a run. If it has not changed, the checkpoint is damaged"
        )
    raise TrainerCheckpointError(f"{found}: it is damaged or of another run; delete it, and an older one is used")
