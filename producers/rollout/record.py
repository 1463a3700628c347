"""Records of the rollout worker: rollouts, and sampled turns of rollouts under way. Pure.

What holds: a rollout's id follows from its task and its place in the group, so that a repeated one is recognised; a
failed rollout has a reason, no segments and no reward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tidemill.producers.environments.base import Score
from tidemill.producers.sampling.completion import BadResponse, Completion, Sampling, build_segment, checked_completion
from tidemill.producers.sampling.replicas import ReplicaIdentity
from tidemill.schemas.chat.contexts import Context
from tidemill.schemas.clock import now_us
from tidemill.schemas.expert_ids import unpacked_ids
from tidemill.schemas.records import Claim, Rollout, RolloutStatus, SamplingParameters, Task, Turn, rollout_id
from tidemill.schemas.stored_object import digest

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn that was sampled already, and may answer a request whose context is the same."""

    context: str
    """Digest of the token ids that it was sampled behind."""
    completion: Completion
    sampled_by: ReplicaIdentity

    def expert_ids_from(self, context_tokens: int) -> int | None:
        """The first token of a context of so many tokens whose expert ids it says; None where it says none."""
        said = self.completion.expert_ids
        return context_tokens + len(self.completion.token_ids) - 1 - len(unpacked_ids(said)) if said else None


def context_digest(token_ids: Sequence[int], temperature: float = 1.0) -> str:
    """xxh3-128 of the token ids as u4, hexadecimal: names a context in `Turn.context`.

    A temperature other than 1 follows them as f8: a turn answers no request for another one.
    """
    sampled_at = b"" if temperature == 1.0 else np.float64(temperature).tobytes()
    return digest(np.asarray(token_ids, dtype="<u4").tobytes() + sampled_at)


def failed_rollout(
    task: Task, index: int, reason: str, worker_id: str, sampled_by: ReplicaIdentity, started_at: int
) -> Rollout:
    """The record of an episode that has no result, and why."""
    return Rollout(
        rollout_id=rollout_id(task.group_id, index),
        group_id=task.group_id,
        task_id=task.task_id,
        run_id=task.run_id,
        environment=task.environment,
        mode=task.mode,
        index=index,
        group_size=task.group_size,
        deadline_at=task.deadline_at,
        status=RolloutStatus.FAILED,
        failure=reason,
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
        replica_id=sampled_by.replica_id,
        region=sampled_by.region,
        worker_id=worker_id,
        started_at=started_at,
        finished_at=now_us(),
    )


def completed_rollout(
    without_result: Rollout,
    contexts: Iterable[Context[Completion]],
    score: Score,
    version: str,
    metrics: Mapping[str, float],
    temperature: float = 1.0,
    expert_ids: Claim | None = None,
) -> Rollout:
    """The record of a finished episode, one segment a context, from the record of one without a result.

    Args:
        version: of the reward.
        temperature: of all turns; replicas are asked for nothing else that changes the distribution.
        metrics: of the episode, beside those of the score.
        expert_ids: where those of the segments lie.
    """
    kept = list(contexts)
    turns = [turn.made for context in kept for turn in context.turns]
    segments = [build_segment(context.ids, context.turns) for context in kept]
    sampled = sum(len(made.token_ids) for made in turns)
    versions = [span.version for made in turns for span in made.spans]
    return replace(
        without_result,
        status=RolloutStatus.COMPLETED,
        failure="",
        segments=segments,
        rewards=list(score.rewards),
        reward=score.total,
        reward_version=version,
        success=score.success,
        turns=len(turns),
        prompt_tokens=sum(segment.n_tokens for segment in segments) - sampled,
        sampled_tokens=sampled,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        incarnation=turns[0].incarnation if turns else "",
        metrics={**metrics, **score.metrics},
        sampling=SamplingParameters(temperature=temperature),
        expert_ids=expert_ids,
    )


def turn_record(task: Task, index: int, worker_id: str, number: int, made: RecordedTurn) -> Turn:
    """The record of a turn that was sampled now, the `number`-th of its rollout."""
    completion = made.completion
    return Turn(
        rollout_id=rollout_id(task.group_id, index),
        group_id=task.group_id,
        task_id=task.task_id,
        run_id=task.run_id,
        worker_id=worker_id,
        replica_id=made.sampled_by.replica_id,
        region=made.sampled_by.region,
        incarnation=completion.incarnation,
        turn=number,
        n_tokens=len(completion.token_ids),
        token_ids=np.asarray(completion.token_ids, dtype="<u4").tobytes(),
        logprobs=np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        spans=list(completion.spans),
        finish_reason=completion.finish_reason,
        at=now_us(),
        context=made.context,
        expert_ids=completion.expert_ids,
    )


def recorded_turns(turns: Iterable[Turn]) -> list[RecordedTurn]:
    """The turns that can be used again, in order. Two workers may have recorded one turn each: the first one counts."""
    found: dict[tuple[str, int], RecordedTurn] = {}
    for turn in turns:
        try:
            completion = _completion(turn)
        except BadResponse as error:
            LOG.warning("recorded turn %d of rollout %s is not used: %s", turn.turn, turn.rollout_id, error)
            continue
        by = ReplicaIdentity(turn.replica_id, turn.region)
        found.setdefault((turn.context, turn.turn), RecordedTurn(turn.context, completion, by))
    return list(found.values())


def _completion(turn: Turn) -> Completion:
    try:
        ids, logprobs = np.frombuffer(turn.token_ids, dtype="<u4"), np.frombuffer(turn.logprobs, dtype="<f4")
    except ValueError as error:
        raise BadResponse(f"its arrays are cut short: {error}") from error
    if len(ids) != turn.n_tokens:
        raise BadResponse(f"it says {turn.n_tokens} tokens and holds {len(ids)}")
    choice = {
        "token_ids": ids.tolist(),
        "logprobs": {"token_logprobs": logprobs.tolist()},
        "weight_versions": [[span.version, span.start, span.end] for span in turn.spans],
        "finish_reason": turn.finish_reason,
        "weight_incarnation": turn.incarnation,
    }
    completion = checked_completion(choice, Sampling(max_tokens=len(ids), temperature=1.0))
    if not turn.expert_ids:
        return completion
    try:
        unpacked_ids(turn.expert_ids)
    except ValueError as error:
        raise BadResponse(str(error)) from error
    return replace(completion, expert_ids=turn.expert_ids)
