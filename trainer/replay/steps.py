"""Replay of the trainer's steps from the log: the same inputs, settings and seed give the same weights.

A replay starts from the nearest checkpoint among the ancestors of the first step's parent, or from the model that the
run started with, and computes the steps in between with the original settings, and checks each. Then it computes the
requested steps. It publishes nothing and writes nothing to the log.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from tidemill.kernels.weights.anchor import anchor_uri, write_anchor
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.records import Interaction, Rollout, TrainStep
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import RecordedInputs, RepeatableRun, read_steps
from tidemill.trainer.job import SINGLE, Job
from tidemill.trainer.serving_view import ServingView
from tidemill.trainer.step import StepOutcome
from tidemill.trainer.trained_weights import TrainedWeights, make_learner

REMEDY = "give the original --config, device and number of ranks; `replay steps` takes settings to change as --what-if"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A recorded step that was computed again."""

    record: TrainStep
    fingerprint: str
    """Fingerprint of the replayed weights, hexadecimal."""
    outcome: StepOutcome
    seconds: float

    @property
    def same(self) -> bool:
        """Whether the replayed weights equal the recorded ones."""
        return self.fingerprint == self.record.fingerprint

    def metric_changes(self) -> dict[str, tuple[float, float]]:
        """Return recorded and replayed value of each metric that differs; only of metrics that both have."""
        return {
            name: (self.record.metrics[name], value)
            for name, value in sorted(self.outcome.metrics.items())
            if name in self.record.metrics and repr(self.record.metrics[name]) != repr(value)
        }


@dataclass(frozen=True, slots=True)
class Halt:
    """The inputs of a step, immediately before it is computed."""

    record: TrainStep
    batch: StepBatch
    weights: Callable[[], ServingView]
    """Returns the serving weights that it starts from, whole; call it before the step is computed."""
    base_model: Path
    """The checkpoint with the configuration and tokenizer for these weights."""


class StepReplay:
    """Computes recorded steps of one run again, in memory: on the first rank of a job; the others `follow_replay`.

    Raises ValueError if the log has no steps of the run, NotRepeatableError for steps that form no chain.
    """

    def __init__(
        self, kafka: KafkaSettings, run: RunSettings, store: StoreSettings, settings: TrainerSettings, job: Job = SINGLE
    ) -> None:
        self.steps = read_steps(kafka, run.run_id)
        """The recorded steps, in order."""
        self._weights = replayed_weights(run, store, settings, job)
        self._run = RepeatableRun(self._weights, 0, REMEDY)
        self._inputs = RecordedInputs(kafka, settings, self._weights)

    def run(
        self,
        first: int,
        last: int,
        *,
        what_if: TrainerSettings | None = None,
        halt: Callable[[Halt], None] = lambda _halt: None,
    ) -> Iterator[ReplayedStep]:
        """Compute the steps `first` to `last` again; `halt` is called before each of them.

        Args:
            what_if: other settings for these steps: a counterfactual, whose weights differ from its first step on.

        Raises:
            ValueError: the run has no such steps, or a counterfactual crosses steps that the gate rejected.
            NotRepeatableError: a step was taken with other settings, or a step in between gives other weights.
            RuntimeError: a checkpoint differs from the log.
            LookupError: the log no longer has an input.
        """
        chosen = [record for record in self.steps if first <= record.step <= last]
        if first > last or [record.step for record in chosen] != list(range(first, last + 1)):
            raise ValueError(f"steps {first} to {last} are not in the log, which has 1 to {len(self.steps)}")
        model = self._weights.settings.model
        for record in chosen:
            if what_if is None:
                self._run.require_same_settings(record)
            begins = record is chosen[0]
            if what_if is not None and not begins and self._run.place.version != record.parent_version:
                raise ValueError(
                    f"step {record.step} starts from version {record.parent_version}, not from the step before it: a "
                    "counterfactual ends there; replay the steps after it separately"
                )
            if begins or self._run.place.version != record.parent_version:
                self._run.go_to(record.parent_version, self.steps, self._inputs)
            if begins and what_if is not None:
                self._weights.change_settings(what_if.model_copy(update={"model": model}))
            batch = self._inputs.of(record)
            halt(Halt(record, batch, self._weights.whole, Path(model)))
            started = time.monotonic()
            outcome = self._run.compute(record, batch)
            yield ReplayedStep(record, self._run.place.fingerprint, outcome, time.monotonic() - started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._inputs.close()
        if kind is None:
            self._weights.let_go()


def follow_replay(run: RunSettings, store: StoreSettings, settings: TrainerSettings, job: Job) -> None:
    """Follow the calls of the first rank's `StepReplay` on another rank, until it ends."""
    replayed_weights(run, store, settings, job).follow()


def replayed_weights(run: RunSettings, store: StoreSettings, settings: TrainerSettings, job: Job) -> TrainedWeights:
    """Return the weights that the run starts from, on every rank: those of the configured model if it exists, otherwise
    of the anchor of version 0."""
    anchor = Path(anchor_uri(store.root, run.run_id, run.branch, 0).removeprefix("file://"))
    if not (Path(settings.model) / "config.json").is_file() and (anchor / "config.json").is_file():
        settings = settings.model_copy(update={"model": str(anchor)})
    checkpoints = CheckpointStore(store.root, run.run_id, run.branch, settings.keep_checkpoints)
    return TrainedWeights(settings, make_learner(settings, job), checkpoints, job=job)


def write_halt(root: Path, halt: Halt) -> Path:
    """Write the inputs of a step into a folder of its own below `root`, and return the folder.

    step-00000007/
      step.json       the record of the step
      groups.jsonl    one trained group a line, with its rollouts: tokens, masks, logprobs, rewards
      online.json     the online batch and its interactions, if there was one
      weights/        the weights before the step, as a Hugging Face checkpoint
      metrics.json    the step's metrics, recorded and replayed (`write_metrics`)

    Raises FileExistsError if the folder is not empty.
    """
    folder = root / f"step-{halt.record.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give another --out")
    _write_json(folder / "step.json", dataclasses.asdict(halt.record))
    lines = [
        {
            "place": dataclasses.asdict(group.place),
            "group": dataclasses.asdict(group.group),
            "rollouts": [_trajectory(rollout) for rollout in group.rollouts],
        }
        for group in halt.batch.groups
    ]
    (folder / "groups.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    if (online := halt.batch.online) is not None:
        members = [_trajectory(interaction) for interaction in online.interactions]
        _write_json(folder / "online.json", {**dataclasses.asdict(online.batch), "interactions": members})
    write_anchor(str((folder / "weights").absolute()), halt.base_model, halt.weights())
    return folder


def write_metrics(folder: Path, made: ReplayedStep) -> None:
    """Write the recorded and the replayed metrics of a step."""
    document = {
        "recorded": {"fingerprint": made.record.fingerprint, **made.record.metrics},
        "replayed": {"fingerprint": made.fingerprint, **made.outcome.metrics},
    }
    _write_json(folder / "metrics.json", document)


def _trajectory(sampled: Rollout | Interaction) -> dict[str, Any]:
    segments = [
        {
            "token_ids": segment.ids().tolist(),
            "loss_mask": segment.mask().tolist(),
            "logprobs": segment.sampled_logprobs().tolist(),
            "spans": [dataclasses.asdict(span) for span in segment.spans],
        }
        for segment in sampled.segments
    ]
    return {**dataclasses.asdict(dataclasses.replace(sampled, segments=[])), "segments": segments}


def _write_json(path: Path, document: object) -> None:
    """Write a document; JSON has no NaN and no infinity, which become null."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
