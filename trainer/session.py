"""A training session: the weights, where they are in the run, and the records of each step.

The order of a step is fixed, so that a stop anywhere can be made good from the log: the optimizer step, its record
acknowledged, then the version's chunks and its manifest, then (where one is due) the checkpoint. What is recorded and
not yet published is made again from the recorded inputs, and checked against the recorded fingerprint.

Steps are numbered without a gap and each makes the version of its number. Its parent is the version before it, or an
older one that the session was told to go back to.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import Staleness, TrainStep
from tidemill.trainer.batch import Trajectory
from tidemill.trainer.batch_builder import Batch
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.choices import ObjectiveName
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.endings import Progress
from tidemill.trainer.metrics import lag_counts
from tidemill.trainer.publish import WeightPublisher
from tidemill.trainer.serving_view import ServingView, serving_view, tensor_infos, total_fingerprint
from tidemill.trainer.step import Learner, StepOutcome

STAGE = "train"
DECISIONS = "online/decisions"
"""Metric of a step in online mode: how many decisions of the gate were known when it was taken."""


class NotRepeatableError(RuntimeError):
    """A recorded step, made again, cannot give the recorded weights; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the weights are in the run."""

    step: int
    """The last step taken, whether or not the weights are still those that it made."""
    version: int
    view: ServingView
    fingerprint: str
    """Of `view`, hexadecimal."""


class Session:
    """Trains, records and publishes steps from `learner`'s weights on, which are those of `step`."""

    def __init__(
        self,
        run: RunSettings,
        settings: TrainerSettings,
        learner: Learner,
        producer: RecordProducer,
        publisher: WeightPublisher,
        *,
        step: int,
    ) -> None:
        self._run = run
        self._settings = settings
        self._learner = learner
        self._producer = producer
        self._publisher = publisher
        self._config_hash = settings.arithmetic_hash()
        self.place = self._snapshot(step)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self._learner.model.config.vocab_size)

    def publish_start(self) -> None:
        """Publish the weights that the run starts from as version 0, an anchor; compare later ones with the log's.

        Raises ChainError when the log has other weights under their version.
        """
        if not self.place.step or self._publisher.has(self.place.version):
            self._publisher.publish(self.place.version, self.place.view, step=self.place.step)

    def train(self, batch: Batch, decisions: int | None = None) -> TrainStep:
        """Train one step on `batch`, record it and publish its version.

        `decisions` of the gate were known when it was taken; None where the gate is not followed.
        """
        started, clock = now_us(), time.monotonic()
        before, step = self.place, self.place.step + 1
        seed = step_seed(self._run.seed, step)
        outcome = self._learner.train(batch.groups, step, before.version, seed, batch.online)
        if decisions is not None:
            outcome.metrics[DECISIONS] = float(decisions)
        self.place = self._snapshot(step)
        record = self._record(batch, before, outcome, started, time.monotonic() - clock)
        self._producer.send_acked(Topic.STEPS, [(self._run.run_id, record)])
        self._finish(record, batch)
        return record

    def repeat(self, record: TrainStep, batch: Batch) -> None:
        """Make a recorded step again from its inputs, check it, and publish what of it is missing.

        Raises NotRepeatableError when the settings are others than then, or the weights come out different.
        """
        self.make_again(record, batch)
        self._finish(record, batch)

    def make_again(self, record: TrainStep, batch: Batch) -> None:
        """Like `repeat`, and publish nothing."""
        self._require_same_settings(record)
        if self.place.version != record.parent_version:
            raise ValueError(
                f"step {record.step} starts from version {record.parent_version}, not {self.place.version}"
            )
        self._learner.train(batch.groups, record.step, record.parent_version, record.seed, batch.online)
        self.place = self._snapshot(record.step)
        if self.place.fingerprint != record.fingerprint:
            raise NotRepeatableError(
                f"step {record.step} gave weights {self.place.fingerprint} and is recorded with {record.fingerprint}: "
                "run it on the machine type and library versions of then, or start a new run"
            )

    def go_back(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Hold the weights and moments of an older version from now on; `state` is what its checkpoint holds."""
        self._learner.masters.load(state)
        self.place = self._snapshot(version)

    def continue_from_here(self, step: int) -> None:
        """The next step is the one after `step`, and its version continues the weights held now.

        Raises ChainError when the log does not have them under their version.
        """
        self.place = replace(self.place, step=step)
        self._publisher.go_back(self.place.version, self.place.view)

    def checkpoint(
        self, store: CheckpointStore, progress: Progress, online: Progress | None = None, keep: Collection[int] = ()
    ) -> None:
        """Store the weights with how far the log is used up; the checkpoints of the steps in `keep` are not dropped."""
        state = CheckpointState(
            run_id=self._run.run_id,
            branch=self._run.branch,
            step=self.place.step,
            version=self.place.version,
            fingerprint=self.place.fingerprint,
            config_hash=self._config_hash,
            progress=progress,
            online=online or Progress(),
        )
        store.write(state, self._learner.masters.state(), keep)

    def _snapshot(self, step: int) -> Place:
        view = serving_view(self._learner.model)
        # Each step makes one version, and version 0 is what the run starts from.
        return Place(step=step, version=step, view=view, fingerprint=total_fingerprint(tensor_infos(view)).hex())

    def _finish(self, record: TrainStep, batch: Batch) -> None:
        newest = self._publisher.newest
        if newest is None or newest.version < record.version:
            for staleness in staleness_records(record, batch):
                self._producer.send(Topic.STALENESS, staleness, key=staleness.replica_id)
        self._publisher.publish(
            record.version,
            self.place.view,
            learning_rate=record.learning_rate,
            step=record.step,
            parent=record.parent_version,
            trained_at=record.finished_at,
        )

    def _record(self, batch: Batch, before: Place, outcome: StepOutcome, started: int, seconds: float) -> TrainStep:
        excluded = Counter(f"excluded/{exclusion.reason}" for exclusion in batch.exclusions)
        return TrainStep(
            run_id=self._run.run_id,
            step=self.place.step,
            version=self.place.version,
            parent_version=before.version,
            inputs=[*([batch.online.place] if batch.online else []), *(group.place for group in batch.groups)],
            exclusions=batch.exclusions,
            seed=step_seed(self._run.seed, self.place.step),
            config_hash=self._config_hash,
            objective="+".join(self._objectives(batch)),
            learning_rate=outcome.learning_rate,
            metrics={
                **outcome.metrics,
                **{k: float(n) for k, n in excluded.items()},
                "seconds": seconds,
                "policy_lag_bound": float(self._run.max_policy_lag),
            },
            lag=outcome.lag,
            rollouts=outcome.rollouts,
            tokens=outcome.tokens,
            fingerprint=self.place.fingerprint,
            parent_fingerprint=before.fingerprint,
            started_at=started,
            finished_at=now_us(),
        )

    def _objectives(self, batch: Batch) -> list[str]:
        online = [ObjectiveName.REINFORCE.value] if batch.online else []
        return online + ([self._settings.objective.value] if batch.groups or not online else [])

    def _require_same_settings(self, record: TrainStep) -> None:
        if record.config_hash != self._config_hash:
            raise NotRepeatableError(
                f"step {record.step} is in the log, has no checkpoint, and was trained with other settings (hash "
                f"{record.config_hash}, now {self._config_hash}): start once with the settings of then, and change "
                "them after the next checkpoint"
            )


def step_seed(run_seed: int, step: int) -> int:
    """The seed of a step, in [0, 2**63)."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{step}".encode()).digest()[:8], "big") >> 1


def staleness_records(record: TrainStep, batch: Batch) -> list[Staleness]:
    """Policy lag of the trained tokens of each replica of a step."""
    sampled: list[Trajectory] = [*(batch.online.interactions if batch.online else ())]
    sampled += [rollout for group in batch.groups for rollout in group.rollouts]
    return [
        Staleness(
            run_id=record.run_id,
            replica_id=replica_id,
            region=region,
            stage=STAGE,
            step=record.step,
            version=record.parent_version,
            lag=lag_counts(found, record.parent_version),
            at=record.finished_at,
        )
        for (replica_id, region), found in groupby(sorted(sampled, key=_source), _source)
    ]


def _source(trajectory: Trajectory) -> tuple[str, str]:
    return trajectory.replica_id, trajectory.region
