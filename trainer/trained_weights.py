"""The trained weights, on all ranks of the job.

Invariant: every rank makes the same calls on the weights in the same order. Only the first rank reads the log, plans
and records, and calls the methods here; the others `follow` it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.tensor_parts import Parts, merged_tensors, part_info
from tidemill.trainer.batch import RoutedShape
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.choices import ServingActivations, ServingFormat, StepMachine
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.job import SINGLE, Job, machine_of
from tidemill.trainer.model import load_model
from tidemill.trainer.serving_view import ServingView, local_parts, serving_view
from tidemill.trainer.step import Learner, StepOutcome
from tidemill.trainer.stored_model import NotByRowsError, StoredModel
from tidemill.trainer.trainable import TrainableBatch, TrainableGroup

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PUBLISH_SECONDS = "publish/seconds"
"""Metric of a step: duration of the previous version's publication, in seconds."""
PUBLISH_LOOP_SECONDS = "publish/loop_seconds"
"""Metric of a step: the part of these seconds in which the trainer's loop waited for it."""


def _on_every_rank(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a call of the method on the first rank run on every rank. Such methods do not call each other."""

    def called(weights: TrainedWeights, /, *args: P.args, **options: P.kwargs) -> T:
        job = weights.job

        def announced() -> T:
            if job.ranks.is_first:
                job.tell((method.__name__, args, options))
            return method(weights, *args, **options)

        return job.together(announced)

    return update_wrapper(called, method)


class TrainedWeights:
    """The weights of `learner`, and a snapshot of them: trains, restores, saves and publishes them.

    Its methods raise the errors of this rank's own work, or RanksLostError, which names the lost or failed rank.

    Args:
        checkpoints: the same location for every rank.
        publish: `WeightPublisher.publish` of a publisher of the same ranks; with `beside`, on a process group of its
            own. None: versions are not published.
        go_back: `go_back` of the same publisher.
        beside: runs a publication while this rank continues; without it `publish` waits.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        learner: Learner,
        checkpoints: CheckpointStore,
        publish: Callable[..., object] | None = None,
        go_back: Callable[[int, Parts], None] | None = None,
        job: Job = SINGLE,
        beside: Executor | None = None,
    ) -> None:
        self.settings = settings
        self._learner = learner
        self.checkpoints = checkpoints
        self._publish, self._go_back = publish, go_back
        self.job = job
        self.machine = learner.machine
        self.vocab_size = int(learner.model.config.vocab_size)
        """Size of the vocabulary; every token id is smaller."""
        self._parts: Parts = {}
        self._beside = beside
        self.publication: Future[float] | None = None
        """The publication in the other thread, until `published` has returned its result."""
        self.publish_costs: dict[str, float] = {}
        """Metrics of the last finished publication."""

    @property
    def routed(self) -> RoutedShape | None:
        """The shape of the model's expert ids, if tokens are routed by them."""
        return None if self._learner.replay is None else self._learner.replay.shape

    def follow(self) -> None:
        """Make the calls of the first rank, until it calls `let_go`. Raises their errors here, or RanksLostError."""
        while (call := self.job.together(self.job.next_call)) is not None:
            name, args, options = call
            getattr(self, name)(*args, **options)

    def let_go(self) -> None:
        """End `follow` on the other ranks."""
        self.job.tell(None)

    @_on_every_rank
    def train(
        self, groups: Sequence[TrainableGroup], step: int, version: int, seed: int, online: TrainableBatch | None
    ) -> StepOutcome:
        return self._learner.train(groups, step, version, seed, online)

    @_on_every_rank
    def snapshot(self) -> str:
        """Copy the present serving weights; return their fingerprint, hexadecimal, on the first rank."""
        ranks = self.job.ranks
        # The previous copy is released first; while it is published, the publisher keeps it.
        self._parts = {}
        with self._learner.masters.as_served():
            on_device = self.settings.publish.on_device
            self._parts = local_parts(self._learner.model, first=ranks.is_first, on_device=on_device)
        reports = ranks.gather(lambda: {name: part_info(part) for name, part in self._parts.items()})
        return total_fingerprint(merged_tensors(reports)).hex() if ranks.is_first else ""

    @_on_every_rank
    def restore(self, step: int) -> CheckpointState | None:
        """Load the weights and moments of a checkpoint; for step 0, the weights that the run started from.

        Raises RuntimeError if it is damaged.
        """
        if step == 0:
            stored = _open_stored(self.settings, self._learner.machine, self.job)
            if stored is None:
                self._learner.masters.restart(load_model(self.settings.model))
            else:
                rows = stored.rows(self._learner.model)
                self._learner.masters.load({f"master/{name}": own for name, own in rows.items()})
            return None
        state, tensors = self.checkpoints.read(step, self._learner.masters.rows)
        self._learner.masters.load(tensors)
        return state

    @_on_every_rank
    def save(self, state: CheckpointState, keep: Collection[int]) -> None:
        """Store the weights and moments; the checkpoints of the steps in `keep` are not deleted."""
        masters = self._learner.masters
        self.checkpoints.write(state, masters.state(), keep, self.job.ranks, masters.rows)

    @_on_every_rank
    def publish(
        self,
        version: int,
        learning_rate: float = 0.0,
        step: int | None = None,
        parent: int | None = None,
        trained_at: int | None = None,
    ) -> None:
        """Publish the snapshot as `version`, as `WeightPublisher.publish` does; with `beside`, only start it."""
        if self._publish is None:
            return
        self._wait()
        form, activations = self.settings.serving_format, self.settings.serving_activations
        publish = partial(
            self._publish,
            version,
            self._parts,
            learning_rate=learning_rate,
            step=step,
            parent=parent,
            trained_at=trained_at,
            serving_format="" if form is ServingFormat.BF16 else form.value,
            serving_activations="" if activations is ServingActivations.NONE else activations.value,
        )
        if self._beside is None:
            seconds = _timed(publish)
            self.publish_costs = {PUBLISH_SECONDS: seconds, PUBLISH_LOOP_SECONDS: seconds}
        else:
            self.publication = self._beside.submit(_timed, publish)

    @_on_every_rank
    def published(self) -> None:
        """Wait for the publication in the other thread. Raises the errors of `WeightPublisher.publish` there."""
        self._wait()

    @_on_every_rank
    def go_back(self, version: int) -> None:
        """Make `version`, whose weights are the snapshot, the next version's parent, as `WeightPublisher.go_back`."""
        if self._go_back is not None:
            self._wait()
            self._go_back(version, self._parts)

    @_on_every_rank
    def whole(self) -> ServingView:
        """Return all present serving weights, also if they are sharded."""
        with self._learner.masters.as_served():
            return serving_view(self._learner.model)

    @_on_every_rank
    def change_settings(self, settings: TrainerSettings) -> None:
        """Continue with other settings from these weights and moments; the starting model must be the same."""
        state = self._learner.masters.state()
        self._learner = make_learner(settings, self.job)
        self._learner.masters.load(state)

    def _wait(self) -> None:
        publication, self.publication = self.publication, None
        if publication is not None:
            began = time.monotonic()
            seconds = publication.result()
            self.publish_costs = {PUBLISH_SECONDS: seconds, PUBLISH_LOOP_SECONDS: time.monotonic() - began}


def _timed(work: Callable[[], object]) -> float:
    """Do `work`, and return its duration in seconds."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def make_learner(settings: TrainerSettings, job: Job = SINGLE) -> Learner:
    """Return a learner at the starting checkpoint, on every rank. Raises FileNotFoundError if there is none."""
    stored = _open_stored(settings, machine_of(settings, job), job)
    make = partial(load_model, settings.model, settings.experts) if stored is None else stored.outline
    reference = make() if settings.kl.coefficient else None
    return Learner(make(), settings, reference, job, stored)


def _open_stored(settings: TrainerSettings, machine: StepMachine, job: Job) -> StoredModel | None:
    """Return the starting checkpoint, of which each rank reads its own rows; None if each rank must load it whole."""
    opened: list[StoredModel] = []
    try:
        if machine.is_sharded:
            # If one rank must load it whole, all ranks do so: they check the model together.
            job.ranks.gather(lambda: opened.append(StoredModel(settings.model, settings.experts)))
    except NotByRowsError as error:
        _log.warning("each rank loads the whole of %s into its memory: %s", settings.model, error)
        return None
    return opened[0] if opened else None
