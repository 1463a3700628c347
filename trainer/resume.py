"""Going on where a run stopped, from the log and the newest checkpoint.

The log says which steps were trained; a checkpoint only saves making them again. Steps after it are repeated from their
recorded inputs and checked, so whatever the moment of the stop, no group is trained twice and none is skipped.
"""

from __future__ import annotations

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import TrainStep
from tidemill.trainer.batch_builder import BatchBuilder, Rules
from tidemill.trainer.checkpoint import CheckpointError, CheckpointState, CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.groups import TrainableGroup
from tidemill.trainer.log_input import CLIENT, GroupLog, RolloutLog, trainable
from tidemill.trainer.model import load_model
from tidemill.trainer.publish import WeightPublisher
from tidemill.trainer.session import Session
from tidemill.trainer.step import Learner


class HistoryError(RuntimeError):
    """The recorded steps of a run do not form one chain."""


def read_steps(kafka: KafkaSettings, run_id: str) -> list[TrainStep]:
    """The recorded steps of a run, in order from step 1. Raises HistoryError when one is missing or there twice."""
    with LogReader(kafka, [Topic.STEPS], client_id=CLIENT) as reader:
        found = [located.record for located in reader.read_to_end()]
    steps = [record for record in found if isinstance(record, TrainStep) and record.run_id == run_id]
    numbers = [record.step for record in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise HistoryError(
            f"run {run_id}: the log has steps {numbers[-20:]} where 1, 2, 3... was expected: two trainers were on one "
            "run, or part of train.steps is gone; start a new run"
        )
    return steps


def rules_of(run: RunSettings, settings: TrainerSettings) -> Rules:
    """What decides which groups are trained."""
    return Rules(
        run_id=run.run_id,
        groups_per_step=run.groups_per_step,
        max_policy_lag=run.max_policy_lag,
        min_completed=run.min_completed,
        skip_no_signal=run.skip_no_signal,
        remembered_groups=settings.remembered_groups,
    )


def make_learner(settings: TrainerSettings) -> Learner:
    """A learner at the starting checkpoint. Raises FileNotFoundError when there is none."""
    reference = load_model(settings.model) if settings.kl.coefficient else None
    return Learner(load_model(settings.model), settings, reference)


def open_session(
    kafka: KafkaSettings,
    run: RunSettings,
    settings: TrainerSettings,
    producer: RecordProducer,
    publisher: WeightPublisher,
    checkpoints: CheckpointStore,
) -> tuple[Session, BatchBuilder]:
    """A session after the last recorded step, everything up to it published, and the builder that goes on from there.

    Raises HistoryError, ChainError or NotRepeatableError when the log, the checkpoint and the settings do not fit.
    """
    steps = read_steps(kafka, run.run_id)
    learner = make_learner(settings)
    saved = _restore(learner, checkpoints, len(steps))
    session = Session(run, settings, learner, producer, publisher, step=saved.step if saved else 0)
    builder = BatchBuilder(rules_of(run, settings), saved.progress if saved else None)
    if saved is not None:
        _require_recorded(session, steps[saved.step - 1])
    session.publish_start()
    _repeat(kafka, settings, producer, session, builder, steps[session.place.step :])
    return session, builder


def _restore(learner: Learner, checkpoints: CheckpointStore, last_step: int) -> CheckpointState | None:
    step = checkpoints.newest(last_step)
    if step is None or step == 0:
        return None
    state, tensors = checkpoints.read(step)
    learner.masters.load(tensors)
    return state


def _require_recorded(session: Session, record: TrainStep) -> None:
    if session.place.fingerprint != record.fingerprint:
        raise CheckpointError(
            f"the checkpoint of step {record.step} holds weights {session.place.fingerprint}, the log recorded "
            f"{record.fingerprint}: it is damaged or of another run; delete it, and an older one is used"
        )


def _repeat(
    kafka: KafkaSettings,
    settings: TrainerSettings,
    producer: RecordProducer,
    session: Session,
    builder: BatchBuilder,
    steps: list[TrainStep],
) -> None:
    if not steps:
        return
    groups, rollouts = GroupLog(kafka, producer, "end"), RolloutLog(kafka, settings.read_ahead_bytes)
    try:
        for record in steps:
            session.repeat(record, _inputs(record, groups, rollouts, session.vocab_size))
            builder.observe_step(record)
    finally:
        groups.close()
        rollouts.close()


def _inputs(record: TrainStep, groups: GroupLog, rollouts: RolloutLog, vocab_size: int) -> list[TrainableGroup]:
    return [trainable(place, groups.at(place), rollouts, vocab_size) for place in record.inputs]
