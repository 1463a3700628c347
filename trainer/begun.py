"""A step that was begun and has no record: it is taken on the inputs of its plan, and gives the weights that it would
have given.

Where that cannot be, the step is begun anew, which a newer plan in the log says: when its parent was given up by the
gate, its inputs can no longer be read, a user demanded since that something of them be deleted, or the settings of the
arithmetic are others now. Its groups have not ended then, and are decided again.
"""

from __future__ import annotations

import logging

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import StepPlan, TrainStep
from tidemill.trainer.batch import InvalidRolloutError
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import RecordedInputs
from tidemill.trainer.resume import OpenRun
from tidemill.trainer.session import NotRepeatableError

_log = logging.getLogger(__name__)


class OutdatedPlanError(RuntimeError):
    """A step that was begun cannot be taken as planned; the message says why."""


def take_begun(
    plan: StepPlan, opened: OpenRun, kafka: KafkaSettings, settings: TrainerSettings, producer: RecordProducer
) -> TrainStep | None:
    """Take the step that was begun, before anything of the run is read on; None when it has to be begun anew.

    What the gate decided and users demanded is known to `opened`. Raises what `Session.take` and `Rewinder.go_back` do.
    """
    try:
        batch = _inputs(plan, opened, kafka, settings, producer)
    except OutdatedPlanError as error:
        _log.warning("step %d was begun, and is planned again: %s", plan.step, error)
        return None
    session = opened.session
    if session.place.version != plan.parent_version:
        opened.rewinder.go_back(plan.parent_version, plan.step - 1)
    _log.info("step %d was begun by trainer %s and is taken on the same inputs", plan.step, plan.trainer)
    opened.builder.observe_step(plan)
    opened.queue.observe_step(plan)
    return session.take(plan, batch)


def _inputs(
    plan: StepPlan, opened: OpenRun, kafka: KafkaSettings, settings: TrainerSettings, producer: RecordProducer
) -> StepBatch:
    """The planned inputs. Raises OutdatedPlanError."""
    session = opened.session
    if plan.config_hash != session.config_hash:
        raise OutdatedPlanError(
            f"it was planned with other settings (hash {plan.config_hash}, now {session.config_hash})"
        )
    if plan.parent_version in opened.line.abandoned:
        raise OutdatedPlanError(f"the gate gave up version {plan.parent_version}, from which it starts")
    try:
        with RecordedInputs(kafka, producer, settings.read_ahead_bytes, session.vocab_size) as inputs:
            batch = inputs.of(plan)
    except (LookupError, InvalidRolloutError, NotRepeatableError) as error:
        raise OutdatedPlanError(f"its inputs can no longer be read ({error})") from error
    if batch.online is not None and opened.queue.erased(batch.online):
        raise OutdatedPlanError("a user demanded that something of its inputs be deleted")
    return batch
