"""The recorded steps of a run, their inputs from the log, and how they are computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Interaction, OnlineBatch, StepPlan, TrainStep
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.log_input import CLIENT, ReferenceLog, RolloutLog, trainable
from tidemill.trainer.mismatch import TrainedTokens
from tidemill.trainer.online_input import InteractionLog
from tidemill.trainer.online_queue import repeated
from tidemill.trainer.step import StepOutcome
from tidemill.trainer.trainable import DecidedStep, Reference, TrainableBatch
from tidemill.trainer.trained_weights import TrainedWeights

_log = logging.getLogger(__name__)


class NotRepeatableError(RuntimeError):
    """Recorded steps form no chain, or a step cannot give its weights again; the message says what to do."""


def read_steps(kafka: KafkaSettings, run_id: str) -> list[TrainStep]:
    """Return the recorded steps of a run, in order from step 1.

    Raises ValueError if there are none, NotRepeatableError as `read_history` does.
    """
    steps, _ = read_history(kafka, run_id)
    if not steps:
        raise ValueError(
            f"the log has no steps of run {run_id!r} under the prefix {kafka.topic_prefix!r}: give the run's --config, "
            "or its --run-id and --topic-prefix"
        )
    return steps


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


class RecordedInputs(ExitStack):
    """The inputs of recorded steps and of plans, read again from the log; a context manager."""

    def __init__(self, kafka: KafkaSettings, settings: TrainerSettings, weights: TrainedWeights) -> None:
        super().__init__()
        self._weights = weights
        self._groups = self.enter_context(ReferenceLog(kafka, Group, "end"))
        self._rollouts = self.enter_context(RolloutLog(kafka, settings.read_ahead_bytes))
        self._batches = self.enter_context(ReferenceLog(kafka, OnlineBatch, "end"))
        self._interactions = self.enter_context(InteractionLog(kafka, weights.vocab_size))

    def of(self, record: DecidedStep) -> StepBatch:
        """Return the inputs of a step, without those that were excluded when it was planned.

        Raises MissingRolloutError, InvalidRolloutError or LookupError if the log no longer has an input,
        NotRepeatableError if it no longer has an interaction.
        """
        vocab_size, routed = self._weights.vocab_size, self._weights.routed
        groups = [
            trainable(Reference(place, self._groups.at(place)), self._rollouts, vocab_size, routed)
            for place in record.inputs
            if place.topic == Topic.GROUPS
        ]
        place = next((place for place in record.inputs if place.topic == Topic.ONLINE_BATCHES), None)
        if place is None:
            return StepBatch(groups, record.exclusions)
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
        online = TrainableBatch(place, batch, tuple(members), whole, excluded)
        return StepBatch(groups, record.exclusions, online)


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """The position of the weights in the run."""

    step: int
    """The last step taken; the weights may be older ones if the session went back."""
    version: int
    fingerprint: str
    """Fingerprint of the serving weights, hexadecimal."""


class RepeatableRun:
    """The weights of a run at one of its versions: makes recorded steps again, from their recorded inputs.

    Args:
        step: the recorded step that made `weights`; 0 for the weights that the run starts from.
        remedy: for a step that was trained with other settings.
    """

    def __init__(self, weights: TrainedWeights, step: int, remedy: str) -> None:
        self.weights, self._remedy = weights, remedy
        self.config_hash = weights.settings.arithmetic_hash(weights.machine)
        self.place = self._snapshot(step)

    def difference(self, recorded: str) -> str:
        """Describe how a step with the configuration hash `recorded` was trained, and how it would be trained now."""
        return self.weights.settings.difference(recorded, self.weights.machine)

    def go_to(
        self,
        version: int,
        steps: Iterable[TrainStep],
        inputs: RecordedInputs,
        begins: Callable[[TrainStep], None] = lambda _: None,
    ) -> None:
        """Make the weights and optimizer moments of `version`: load those of the nearest checkpoint among its
        ancestors, or of the model that the run started with, and repeat the steps after it. `begins` is called before
        each of these steps.

        Raises RuntimeError for a checkpoint or a starting model that differs from the log, NotRepeatableError as
        `make_again`, LookupError if the log no longer has an input of these steps.
        """
        made_by, saved = {record.version: record for record in steps}, set(self.weights.checkpoints.steps())
        begin, path = version, list[TrainStep]()
        while begin and begin not in saved:
            path.insert(0, made_by[begin])
            begin = made_by[begin].parent_version
        _log.info("going to version %d: from the weights of version %d over %d steps", version, begin, len(path))
        self.weights.restore(begin)
        self.place = self._snapshot(begin)
        if begin:
            self.require_recorded(made_by[begin])
        started = {record.parent_fingerprint for record in made_by.values() if record.parent_version == 0}
        if not begin and started - {self.place.fingerprint}:
            raise RuntimeError(
                f"trainer.model {self.weights.settings.model} holds weights {self.place.fingerprint}, the run started "
                f"from {', '.join(started)}: name the checkpoint that it started from"
            )
        for record in path:
            begins(record)
            self.make_again(record, inputs.of(record), on_the_way_to=version)

    def require_recorded(self, record: TrainStep) -> None:
        """Raise RuntimeError unless the weights, which were loaded from a checkpoint, are those that a step made."""
        if self.place.fingerprint == record.fingerprint:
            return
        found = (
            f"the checkpoint of step {record.step} holds weights {self.place.fingerprint}, the log recorded "
            f"{record.fingerprint}"
        )
        if self.config_hash != record.config_hash:
            # The serving format is the only setting that changes the weights loaded from a checkpoint.
            raise RuntimeError(
                f"{found}, trained {self.difference(record.config_hash)}: start with the run's "
                "trainer.serving_format, which cannot change. If it has not changed, the checkpoint is damaged"
            )
        raise RuntimeError(f"{found}: it is damaged or of another run; delete it, and an older one is used")

    def require_same_settings(self, record: TrainStep) -> None:
        """Raise NotRepeatableError if a step was trained with other settings or on another machine."""
        if record.config_hash != self.config_hash:
            raise NotRepeatableError(
                f"step {record.step} was trained {self.difference(record.config_hash)}: {self._remedy}"
            )

    def make_again(self, record: TrainStep, batch: StepBatch, on_the_way_to: int | None = None) -> TrainedTokens | None:
        """Compute a recorded step again from its inputs, and check it; return the trained tokens.

        Raises NotRepeatableError if the settings have changed or the resulting weights differ.
        """
        self.require_same_settings(record)
        outcome = self.compute(record, batch)
        if self.place.fingerprint != record.fingerprint:
            way = "" if on_the_way_to is None else f", on the way to version {on_the_way_to},"
            raise NotRepeatableError(
                f"step {record.step}{way} gave weights {self.place.fingerprint} and is recorded with "
                f"{record.fingerprint}: run it on the original machine type and library versions, or start a new run"
            )
        return outcome.trained

    def compute(self, step: DecidedStep, batch: StepBatch) -> StepOutcome:
        """Compute a step from its inputs. Raises ValueError if it starts from another version."""
        if self.place.version != step.parent_version:
            raise ValueError(f"step {step.step} starts from version {step.parent_version}, not {self.place.version}")
        outcome = self.weights.train(batch.groups, step.step, step.parent_version, step.seed, batch.online)
        self.place = self._snapshot(step.step)
        return outcome

    def _snapshot(self, step: int) -> TrainerPosition:
        # Each step makes one version, and the run starts from version 0.
        return TrainerPosition(step=step, version=step, fingerprint=self.weights.snapshot())
