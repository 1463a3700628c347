"""The weights under training, on all ranks of the job.

Keeps true: what is done to the weights is done on every rank, by the same calls in the same order. The first rank alone
reads the log, plans and records, and calls the methods here; the others `follow` it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.kernels.weights.tensor_parts import Parts, RankReport, merged_tensors, part_info
from tidemill.trainer.batch import RoutedShape
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.choices import ServingFormat, StepMachine
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.device import machine_of
from tidemill.trainer.job import SINGLE, Job
from tidemill.trainer.model import load_model
from tidemill.trainer.serving_view import ServingView, serving_view
from tidemill.trainer.sharded_view import local_parts
from tidemill.trainer.step import Learner, StepOutcome
from tidemill.trainer.stored_model import NotByRowsError, StoredModel
from tidemill.trainer.trainable import TrainableBatch, TrainableGroup

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PUBLISH_SECONDS = "publish/seconds"
"""Metric of a step: seconds that the publication of the version before took."""
PUBLISH_LOOP_SECONDS = "publish/loop_seconds"
"""Metric of a step: those of them in which the trainer's loop waited for it."""


def _on_every_rank(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let the first rank's call be every rank's. Such methods do not call each other."""

    def called(weights: TrainedWeights, /, *args: P.args, **options: P.kwargs) -> T:
        return weights.do(method.__name__, lambda: method(weights, *args, **options), args, options)

    return update_wrapper(called, method)


class TrainedWeights:
    """The weights of `learner`, and a snapshot of them: trained, restored, saved, published.

    Its methods raise what the rank's own part raises, or RanksLostError, which names the rank that is gone or failed.

    Args:
        checkpoints: the same place for every rank.
        publisher: of the same ranks, where versions are published; with `beside`, on a group of its own.
        beside: runs a publication beside what this rank does next; without it `publish` waits.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        learner: Learner,
        checkpoints: CheckpointStore,
        publisher: WeightPublisher | None = None,
        job: Job = SINGLE,
        beside: Executor | None = None,
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._job = job
        self.machine = learner.machine
        self.vocab_size = int(learner.model.config.vocab_size)
        """Token ids are below this."""
        self._parts: Parts = {}
        self._beside = beside
        self.publication: Future[float] | None = None
        """The publication that runs beside, until `published` has said how it ended."""
        self.publish_costs: dict[str, float] = {}
        """Metrics of the publication that ended last."""

    @property
    def routed(self) -> RoutedShape | None:
        """The shape of the model's expert ids, if tokens are routed by them."""
        return None if self._learner.replay is None else self._learner.replay.shape

    def do(self, name: str, work: Callable[[], T], args: Sequence[Any], options: Mapping[str, Any]) -> T:
        """Do `work`, the method `name` with these arguments, here, and if this is the first rank on the others too."""

        def begun() -> T:
            if self._job.ranks.is_first:
                self._job.tell((name, args, options))
            return work()

        return self._job.together(begun)

    def follow(self) -> None:
        """Do what the first rank does, until it lets go. Raises what that raises here, RanksLostError."""
        while (call := self._job.together(self._job.told)) is not None:
            name, args, options = call
            getattr(self, name)(*args, **options)

    def let_go(self) -> None:
        """End `follow` on the other ranks."""
        self._job.tell(None)

    @_on_every_rank
    def train(
        self,
        groups: Sequence[TrainableGroup],
        step: int,
        version: int,
        seed: int,
        online: TrainableBatch | None,
    ) -> StepOutcome:
        return self._learner.train(groups, step, version, seed, online)

    @_on_every_rank
    def snapshot(self) -> str:
        """Keep a copy of the serving weights as they are now; their fingerprint, hexadecimal, on the first rank."""
        ranks = self._job.ranks
        # The copy before is let go first; while it is published, the publisher holds it.
        self._parts = {}
        with self._learner.masters.as_served():
            on_device = self._settings.publish.on_device
            self._parts = local_parts(self._learner.model, first=ranks.is_first, on_device=on_device)
        reports = ranks.gather(lambda: RankReport({name: part_info(part) for name, part in self._parts.items()}))
        return total_fingerprint(merged_tensors(reports)).hex() if ranks.is_first else ""

    @_on_every_rank
    def restore(self, step: int) -> CheckpointState | None:
        """Hold the weights and moments of a checkpoint; for step 0, those that the run started from.

        Raises TrainerCheckpointError for one that is damaged.
        """
        if step == 0:
            stored = _open_stored(self._settings, self._learner.machine, self._job)
            if stored is None:
                self._learner.masters.restart(load_model(self._settings.model))
            else:
                rows = stored.rows(self._learner.model)
                self._learner.masters.load({f"master/{name}": own for name, own in rows.items()})
            return None
        state, tensors = self._checkpoints.read(step, self._learner.masters.rows)
        self._learner.masters.load(tensors)
        return state

    @_on_every_rank
    def save(self, state: CheckpointState, keep: Collection[int]) -> None:
        """Store the weights and moments; the checkpoints of the steps in `keep` are not dropped."""
        self._checkpoints.write(state, self._learner.masters.state(), keep, self._job.ranks)

    @_on_every_rank
    def publish(
        self,
        version: int,
        learning_rate: float = 0.0,
        step: int | None = None,
        parent: int | None = None,
        trained_at: int | None = None,
    ) -> None:
        """Publish the snapshot as `version`, as `WeightPublisher.publish`; where that runs beside, begin it."""
        if self._publisher is None:
            return
        self._wait()
        form = self._settings.serving_format
        publish = partial(
            self._publisher.publish,
            version,
            self._parts,
            learning_rate=learning_rate,
            step=step,
            parent=parent,
            trained_at=trained_at,
            serving_format="" if form is ServingFormat.BF16 else form.value,
        )
        if self._beside is None:
            seconds = _timed(publish)
            self.publish_costs = {PUBLISH_SECONDS: seconds, PUBLISH_LOOP_SECONDS: seconds}
        else:
            self.publication = self._beside.submit(_timed, publish)

    @_on_every_rank
    def published(self) -> None:
        """Wait for the publication that runs beside. Raises what `WeightPublisher.publish` raised there."""
        self._wait()

    @_on_every_rank
    def go_back(self, version: int) -> None:
        """Let the next version continue `version`, which the snapshot is; as `WeightPublisher.go_back`."""
        if self._publisher is not None:
            self._wait()
            self._publisher.go_back(version, self._parts)

    @_on_every_rank
    def whole(self) -> ServingView:
        """All serving weights as they are now, whatever each rank holds."""
        with self._learner.masters.as_served():
            return serving_view(self._learner.model)

    @_on_every_rank
    def change_settings(self, settings: TrainerSettings) -> None:
        """Train on from these weights and moments with other settings; not with another starting model."""
        state = self._learner.masters.state()
        self._learner = make_learner(settings, self._job)
        self._learner.masters.load(state)

    def _wait(self) -> None:
        publication, self.publication = self.publication, None
        if publication is not None:
            began = time.monotonic()
            seconds = publication.result()
            self.publish_costs = {PUBLISH_SECONDS: seconds, PUBLISH_LOOP_SECONDS: time.monotonic() - began}


def _timed(work: Callable[[], object]) -> float:
    """Do `work`; the seconds that it took."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def make_learner(settings: TrainerSettings, job: Job = SINGLE) -> Learner:
    """A learner at the starting checkpoint, on every rank of a job. Raises FileNotFoundError when there is none."""
    stored = _open_stored(settings, machine_of(settings, job.place, job.ranks.size), job)
    make = partial(load_model, settings.model, settings.experts) if stored is None else stored.outline
    reference = make() if settings.kl.coefficient else None
    return Learner(make(), settings, reference, job.ranks, job.place, stored)


def _open_stored(settings: TrainerSettings, machine: StepMachine, job: Job) -> StoredModel | None:
    """The starting checkpoint, for each rank to read its own rows from; None where each has to load it whole."""
    opened: list[StoredModel] = []
    try:
        if machine.is_sharded:
            # One rank that has to load it whole makes all of them do so: they check the model together.
            job.ranks.gather(lambda: opened.append(StoredModel(settings.model, settings.experts)))
    except NotByRowsError as error:
        _log.warning("each rank loads the whole of %s into its memory: %s", settings.model, error)
        return None
    return opened[0] if opened else None
