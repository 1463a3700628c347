"""Builds the record of one rollout from how its episode ended. Pure.

What holds: a rollout's id follows from its task and its place in the group, so a repeated one is recognised; a failed
rollout has a reason, no segments and no reward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidemill.producers.episode import EpisodeResult
from tidemill.schemas.records import Claim, Rollout, RolloutStatus, Task


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where and when an episode was played."""

    worker_id: str
    replica_id: str
    region: str
    started_at: int
    finished_at: int


def rollout_id(task: Task, index: int) -> str:
    """The id of the rollout at a place of a task's group."""
    return f"{task.group_id}/{index}"


def completed_rollout(
    task: Task, index: int, result: EpisodeResult, reward_version: str, provenance: Provenance
) -> Rollout:
    """The record of a finished episode."""
    versions = [span.version for span in result.spans]
    return replace(
        _without_result(task, index, provenance),
        status=RolloutStatus.COMPLETED,
        segments=[result.segment],
        rewards=list(result.score.components),
        reward=result.score.total,
        reward_version=reward_version,
        success=result.score.success,
        turns=result.turns,
        prompt_tokens=result.segment.n_tokens - result.sampled_tokens,
        sampled_tokens=result.sampled_tokens,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        incarnation=result.incarnation,
    )


def failed_rollout(task: Task, index: int, reason: str, provenance: Provenance) -> Rollout:
    """The record of an episode that has no result, and why."""
    return replace(_without_result(task, index, provenance), failure=reason)


def _without_result(task: Task, index: int, provenance: Provenance) -> Rollout:
    return Rollout(
        rollout_id=rollout_id(task, index),
        group_id=task.group_id,
        task_id=task.task_id,
        run_id=task.run_id,
        environment=task.environment,
        mode=task.mode,
        index=index,
        group_size=task.group_size,
        deadline_at=task.deadline_at,
        status=RolloutStatus.FAILED,
        failure="",
        segments=[],
        claim=None,
        rewards=[],
        reward=None,
        reward_version="",
        success=None,
        turns=0,
        prompt_tokens=0,
        sampled_tokens=0,
        version_min=-1,
        version_max=-1,
        replica_id=provenance.replica_id,
        region=provenance.region,
        worker_id=provenance.worker_id,
        started_at=provenance.started_at,
        finished_at=provenance.finished_at,
    )


def with_claim(rollout: Rollout, claim: Claim) -> Rollout:
    """The record that leaves its segments in the object store."""
    return replace(rollout, segments=[], claim=claim)
