"""The recorded steps of a run, and their inputs from the log."""

from __future__ import annotations

from contextlib import ExitStack

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Interaction, OnlineBatch, StepInput, StepPlan, TrainStep
from tidemill.trainer.batch import RoutedShape
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.log_input import CLIENT, ReferenceLog, RolloutLog, trainable
from tidemill.trainer.online_input import InteractionLog
from tidemill.trainer.online_queue import repeated
from tidemill.trainer.trainable import DecidedStep, Reference, TrainableBatch


class NotRepeatableError(RuntimeError):
    """Recorded steps form no chain, or a step cannot give its weights again; the message says what to do."""


def read_steps(kafka: KafkaSettings, run_id: str) -> list[TrainStep]:
    """Return the recorded steps of a run, in order from step 1. Raises NotRepeatableError as `read_history` does."""
    return read_history(kafka, run_id)[0]


def read_history(kafka: KafkaSettings, run_id: str) -> tuple[list[TrainStep], StepPlan | None]:
    """Return the recorded steps of a run, in order from step 1, and the plan of the step after them, if there is one.

    Of several plans it returns the newest, which replaces the earlier ones.

    Raises NotRepeatableError if a step is missing or recorded twice.
    """
    with LogReader(kafka, [Topic.STEPS], client_id=CLIENT) as reader:
        found = [located.record for located in reader.read_to_end()]
    own = [record for record in found if isinstance(record, TrainStep | StepPlan) and record.run_id == run_id]
    steps = [record for record in own if isinstance(record, TrainStep)]
    numbers = [record.step for record in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise NotRepeatableError(
            f"run {run_id}: the log has steps {numbers[-20:]} where 1, 2, 3... was expected: two trainers were on one "
            "run, or part of train.steps is gone; start a new run"
        )
    plans = [record for record in own if isinstance(record, StepPlan) and record.step == len(steps) + 1]
    return steps, plans[-1] if plans else None


def path_back(version: int, steps: dict[int, TrainStep], saved: set[int]) -> tuple[int, list[TrainStep]]:
    """Return the nearest ancestor of `version` (or itself) in `saved`, otherwise 0, and the steps from it on, in order.

    `steps` maps each version to the step that made it.
    """
    path: list[TrainStep] = []
    while version and version not in saved:
        path.append(steps[version])
        version = steps[version].parent_version
    return version, path[::-1]


class RecordedInputs(ExitStack):
    """The inputs of recorded steps and of plans, read again from the log; a context manager."""

    def __init__(
        self, kafka: KafkaSettings, limit_bytes: int, vocab_size: int, routed: RoutedShape | None = None
    ) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.routed = routed
        """The shape of the model's expert ids, if tokens are routed by them."""
        self._groups = self.enter_context(ReferenceLog(kafka, Group, "end"))
        self._rollouts = self.enter_context(RolloutLog(kafka, limit_bytes))
        self._batches = self.enter_context(ReferenceLog(kafka, OnlineBatch, "end"))
        self._interactions = self.enter_context(InteractionLog(kafka, vocab_size))

    def of(self, record: DecidedStep) -> StepBatch:
        """Return the inputs of a step, without those that were excluded when it was planned.

        Raises MissingRolloutError, InvalidRolloutError or LookupError if the log no longer has an input,
        NotRepeatableError if it no longer has an interaction.
        """
        groups = [
            trainable(Reference(place, self._groups.at(place)), self._rollouts, self._vocab_size, self.routed)
            for place in record.inputs
            if place.topic == Topic.GROUPS
        ]
        online = [self._online(place, record) for place in record.inputs if place.topic == Topic.ONLINE_BATCHES]
        return StepBatch(groups, record.exclusions, online[0] if online else None)

    def _online(self, place: StepInput, record: DecidedStep) -> TrainableBatch:
        batch = self._batches.at(place)
        members = repeated(batch, record)
        found = self._interactions.fetch(members)
        interactions = [found[Position.of(member)] for member in members]
        whole = tuple(interaction for interaction in interactions if isinstance(interaction, Interaction))
        if len(whole) < len(members):
            raise NotRepeatableError(
                f"step {record.step} learns from {len(members)} interactions of batch {batch.batch_id}, and the log no "
                f"longer has {len(members) - len(whole)} of them: their users had them erased, or their retention has "
                "passed. The step's weights stay in the weight log; to train on, begin a run from a version's anchor"
            )
        excluded = tuple(entry for entry in record.exclusions if entry.topic == Topic.INTERACTIONS)
        return TrainableBatch(place, batch, tuple(members), whole, excluded)
