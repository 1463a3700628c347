"""A training session: the weights, their position in the run, and the records of each step.

The order of a step is fixed, so that a trainer can continue from the log after a stop at any point: the plan is
acknowledged, the optimizer step is computed, its record is acknowledged, then the version's chunks and manifest are
written, then (if due) the checkpoint. A step that is planned but not recorded is taken on the planned inputs; a step
that is recorded but not published is computed again from its inputs and checked against the recorded fingerprint.

A version may be published at the same time as the next step is planned and computed (`trainer.publish_beside`). The
next record, a checkpoint and `go_back` wait for its manifest: only the newest recorded step can be without a version.

Steps are numbered without a gap, and each makes the version of its number. Its parent is the version before it, or an
older one that the session went back to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from tidemill.kernels.weights.graph import VersionError, VersionGraph
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.producer import AckedWriter, RecordProducer
from tidemill.schemas.records import StepPlan, TrainStep
from tidemill.trainer.batch import Trajectory
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.checkpoint import CheckpointState
from tidemill.trainer.choices import ObjectiveName, ServingActivations
from tidemill.trainer.history import RecordedInputs, RepeatableRun
from tidemill.trainer.metrics import staleness_records
from tidemill.trainer.mismatch import TrainedTokens, alarms, mismatch_record, warning
from tidemill.trainer.trainable import TopicProgress
from tidemill.trainer.trained_weights import TrainedWeights

DECISIONS = "online/decisions"
"""Metric of a step in online mode: the number of gate decisions that were known when it was planned."""
REMEDY = (
    "start once with the original settings, device and number of ranks, and change them after the next checkpoint (the "
    "step is in the log and has no checkpoint)"
)
"""For a step that must be repeated and was trained with other settings."""
_log = logging.getLogger(__name__)


def step_seed(run_seed: int, step: int) -> int:
    """Return the seed of a step, in [0, 2**63)."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{step}".encode()).digest()[:8], "big") >> 1


class Session(RepeatableRun):
    """Trains, records and publishes the steps after `step`, from its `weights` on. Used on the first rank only.

    Args:
        versions: the versions in the log, to which `weights` adds those that it publishes.
        producer: writes records that may be written twice.
        steps: writes `train.steps`; if another trainer has fenced it, no version is published.
    """

    def __init__(
        self,
        run: RunSettings,
        weights: TrainedWeights,
        producer: RecordProducer,
        versions: VersionGraph,
        *,
        steps: AckedWriter,
        step: int,
    ) -> None:
        super().__init__(weights, step, REMEDY)
        self._run, self._producer, self._steps, self._versions = run, producer, steps, versions
        self._trainer = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._incarnation = ""

    def require_start(self, fingerprint: str) -> None:
        """Raise VersionError unless `fingerprint`, of `trainer.model`, is that of the run's version 0.

        After a checkpoint these weights are only the reference, and the start of an older version or of a replay:
        others would make steps that cannot be repeated.
        """
        first = self._versions.manifests.get(0)
        if first is not None and first.fingerprint != fingerprint:
            raise VersionError(
                f"trainer.model {self.weights.settings.model} has weights {fingerprint}, and version 0 of run "
                f"{self._run.run_id} has {first.fingerprint}: start with the model that the run began with, or begin a "
                "new run (run.run_id)"
            )

    def publish_start(self) -> None:
        """Publish the weights that the run starts from as version 0, an anchor; compare later ones with the log.

        Raises VersionError if the log has other weights under their version, or the run's newest version is sampled
        with other activations.
        """
        newest, rounded = self._versions.newest, self.weights.settings.serving_activations.value
        if newest is not None and (held := newest.serving_activations or ServingActivations.NONE.value) != rounded:
            raise VersionError(
                f"version {newest.version} is sampled with trainer.serving_activations {held}, now it is {rounded}: "
                "start with the run's own, which cannot change"
            )
        if not self.place.step or self.place.version in self._versions.manifests:
            self.weights.publish(self.place.version, step=self.place.step)
            self.wait_published()
        self._incarnation = self._versions.incarnation

    def is_publishing(self) -> bool:
        """Return whether a version is being published in another thread. Raises the errors of the publication."""
        publication = self.weights.publication
        if publication is not None and not publication.done():
            return True
        self.wait_published()
        return False

    def wait_published(self) -> None:
        """Wait until the newest version is in the log. Raises the errors of its publication."""
        if self.weights.publication is not None:
            self.weights.published()

    def train(self, batch: StepBatch, decisions: int | None = None) -> TrainStep:
        """Train the next step on `batch`, record it, and publish its version or start to publish it.

        `decisions` is the number of known gate decisions; None if the trainer does not follow the gate.
        """
        return self.take(self.begin(batch, decisions), batch)

    def begin(self, batch: StepBatch, decisions: int | None = None) -> StepPlan:
        """Write the plan of the next step: `batch` is its input until a newer plan of the step replaces this one."""
        run, step = self._run, self.place.step + 1
        known = {} if decisions is None else {DECISIONS: float(decisions)}
        excluded = Counter(f"excluded/{exclusion.reason}" for exclusion in batch.exclusions)
        plan = StepPlan(
            run_id=run.run_id,
            step=step,
            parent_version=self.place.version,
            inputs=[*([batch.online.place] if batch.online else []), *(group.place for group in batch.groups)],
            exclusions=batch.exclusions,
            seed=step_seed(run.seed, step),
            config_hash=self.config_hash,
            metrics={
                **known,
                **{reason: float(number) for reason, number in excluded.items()},
                "policy_lag_bound": float(run.max_policy_lag),
            },
            incarnation=self._incarnation,
            trainer=self._trainer,
            at=now_us(),
        )
        self._steps.send_acked(Topic.STEPS, [(self._run.run_id, plan)])
        return plan

    def take(self, plan: StepPlan, batch: StepBatch) -> TrainStep:
        """Take a planned step, record it, and publish its version or start to; `batch` contains the plan's inputs.

        Raises also the errors of the previous version's publication; the step is not recorded then.
        """
        before = self.place
        if (before.step + 1, before.version) != (plan.step, plan.parent_version):
            raise ValueError(
                f"step {plan.step} follows step {plan.step - 1} from version {plan.parent_version}, not step "
                f"{before.step} from version {before.version}"
            )
        started, clock = now_us(), time.monotonic()
        outcome = self.weights.train(batch.groups, plan.step, plan.parent_version, plan.seed, batch.online)
        trained = time.monotonic()
        self.wait_published()
        waited = time.monotonic() - trained
        self.place = self._snapshot(plan.step)
        seconds = time.monotonic() - clock - waited
        objectives = [ObjectiveName.REINFORCE.value] if batch.online else []
        if batch.groups or not batch.online:
            objectives.append(self.weights.settings.objective.value)
        record = TrainStep(
            run_id=plan.run_id,
            step=plan.step,
            version=self.place.version,
            parent_version=plan.parent_version,
            inputs=plan.inputs,
            exclusions=plan.exclusions,
            seed=plan.seed,
            config_hash=plan.config_hash,
            objective="+".join(objectives),
            learning_rate=outcome.learning_rate,
            metrics={**outcome.metrics, **plan.metrics, **self.weights.publish_costs, "seconds": seconds},
            lag=outcome.lag,
            rollouts=outcome.rollouts,
            tokens=outcome.tokens,
            fingerprint=self.place.fingerprint,
            parent_fingerprint=before.fingerprint,
            started_at=started,
            finished_at=now_us(),
            incarnation=plan.incarnation,
        )
        self._steps.send_acked(Topic.STEPS, [(self._run.run_id, record)])
        self._finish(record, batch, outcome.trained)
        return record

    def repeat(self, record: TrainStep, batch: StepBatch) -> None:
        """Compute a recorded step again from its inputs, check it, and publish the missing parts.

        Raises NotRepeatableError if the settings have changed or the resulting weights differ.
        """
        self._finish(record, batch, self.make_again(record, batch))
        self.wait_published()

    def go_back(
        self,
        version: int,
        step: int,
        steps: Iterable[TrainStep],
        inputs: RecordedInputs,
        begins: Callable[[TrainStep], None],
    ) -> None:
        """Continue from `version`: the step after `step` is the next one, and its version continues this one's weights.

        Nothing is published: the version is in the log. `begins` is called before each step that is repeated.

        Raises as `go_to`, and VersionError if the log does not contain the weights under this version.
        """
        self.wait_published()
        self.go_to(version, steps, inputs, begins)
        self.place = replace(self.place, step=step)
        self.weights.go_back(version)

    def checkpoint(
        self, progress: TopicProgress, online: TopicProgress | None = None, keep: Collection[int] = ()
    ) -> None:
        """Store the weights and the progress in the log; the checkpoints of the steps in `keep` are not deleted.

        Raises also the errors of the newest version's publication; no checkpoint is written then.
        """
        # A run that resumes from a checkpoint does not publish the checkpoint's version.
        self.wait_published()
        state = CheckpointState(
            run_id=self._run.run_id,
            branch=self._run.branch,
            step=self.place.step,
            version=self.place.version,
            fingerprint=self.place.fingerprint,
            config_hash=self.config_hash,
            progress=progress,
            online=online or TopicProgress(),
        )
        self.weights.save(state, keep)

    def _finish(self, record: TrainStep, batch: StepBatch, trained: TrainedTokens | None) -> None:
        newest = self._versions.newest_version
        if newest is None or newest < record.version:
            sampled: list[Trajectory] = [*(batch.online.interactions if batch.online else ())]
            sampled += [rollout for group in batch.groups for rollout in group.rollouts]
            for staleness in staleness_records(record, sampled):
                self._producer.send(Topic.STALENESS, staleness, key=staleness.replica_id)
            if trained is not None:
                mismatch = mismatch_record(record, trained)
                self._producer.send(Topic.MISMATCH, mismatch, key=mismatch.run_id)
                if found := alarms(mismatch.slices):
                    _log.warning("step %d: %s", record.step, warning(found))
            # Once the version is published, the step is not computed again, so these records are flushed before.
            self._producer.flush()
        self.weights.publish(
            record.version,
            learning_rate=record.learning_rate,
            step=record.step,
            parent=record.parent_version,
            trained_at=record.finished_at,
        )
