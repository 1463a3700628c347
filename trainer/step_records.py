"""What a step says of itself in the log: its plan before it is taken, its record and its policy lag after. Pure."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from tidemill.schemas.clock import now_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import Mismatch, Staleness, StepPlan, TrainStep
from tidemill.trainer.batch import Trajectory
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.choices import ObjectiveName
from tidemill.trainer.metrics import lag_counts
from tidemill.trainer.mismatch import TrainedTokens, alarms, measure, routed_otherwise
from tidemill.trainer.step import StepOutcome

STAGE = "train"
DECISIONS = "online/decisions"
"""Metric of a step in online mode: how many decisions of the gate were known when it was begun."""


def step_seed(run_seed: int, step: int) -> int:
    """The seed of a step, in [0, 2**63)."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{step}".encode()).digest()[:8], "big") >> 1


def plan_of(
    run: RunSettings,
    batch: StepBatch,
    *,
    step: int,
    parent_version: int,
    decisions: int | None,
    config_hash: str,
    incarnation: str,
    trainer: str,
) -> StepPlan:
    """The plan of step `step` on `batch`; `decisions` of the gate are known, None where it is not followed."""
    known = {} if decisions is None else {DECISIONS: float(decisions)}
    excluded = Counter(f"excluded/{exclusion.reason}" for exclusion in batch.exclusions)
    return StepPlan(
        run_id=run.run_id,
        step=step,
        parent_version=parent_version,
        inputs=[*([batch.online.place] if batch.online else []), *(group.place for group in batch.groups)],
        exclusions=batch.exclusions,
        seed=step_seed(run.seed, step),
        config_hash=config_hash,
        metrics={
            **known,
            **{reason: float(number) for reason, number in excluded.items()},
            "policy_lag_bound": float(run.max_policy_lag),
        },
        incarnation=incarnation,
        trainer=trainer,
        at=now_us(),
    )


def record_of(
    plan: StepPlan,
    batch: StepBatch,
    outcome: StepOutcome,
    *,
    objective: ObjectiveName,
    fingerprint: str,
    parent_fingerprint: str,
    started_at: int,
    metrics: Mapping[str, float],
) -> TrainStep:
    """The record of a step that was taken as planned.

    Args:
        objective: of its simulated groups.
        fingerprint: of the weights that it made, hexadecimal; `parent_fingerprint`: of those that it started from.
        metrics: more than it reports of itself.
    """
    objectives = [ObjectiveName.REINFORCE.value] if batch.online else []
    if batch.groups or not batch.online:
        objectives.append(objective.value)
    return TrainStep(
        run_id=plan.run_id,
        step=plan.step,
        # Each step makes the version of its number.
        version=plan.step,
        parent_version=plan.parent_version,
        inputs=plan.inputs,
        exclusions=plan.exclusions,
        seed=plan.seed,
        config_hash=plan.config_hash,
        objective="+".join(objectives),
        learning_rate=outcome.learning_rate,
        metrics={**outcome.metrics, **plan.metrics, **metrics},
        lag=outcome.lag,
        rollouts=outcome.rollouts,
        tokens=outcome.tokens,
        fingerprint=fingerprint,
        parent_fingerprint=parent_fingerprint,
        started_at=started_at,
        finished_at=now_us(),
        incarnation=plan.incarnation,
    )


def staleness_records(record: TrainStep, batch: StepBatch) -> list[Staleness]:
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


def mismatch_record(record: TrainStep, trained: TrainedTokens) -> Mismatch:
    """How far apart sampler and trainer were on the tokens of a step."""
    begun = time.perf_counter()
    slices, worst = measure(trained, record.parent_version)
    tokens_otherwise, layers_otherwise = routed_otherwise(trained)
    return Mismatch(
        run_id=record.run_id,
        step=record.step,
        version=record.parent_version,
        tokens=record.tokens,
        slices=slices,
        worst=worst,
        alarms=sorted(alarms(slices)),
        tokens_routed_otherwise=tokens_otherwise,
        layers_routed_otherwise=layers_otherwise,
        seconds=time.perf_counter() - begun,
        at=record.finished_at,
        incarnation=record.incarnation,
    )


def _source(trajectory: Trajectory) -> tuple[str, str]:
    return trajectory.replica_id, trajectory.region
