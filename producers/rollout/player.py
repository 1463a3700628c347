"""Plays the requested episodes, a limited number at a time, each within its time; the result is always a record.

Invariants: a rollout is completed, or failed with a reason, by its deadline; its id follows from its task and its index
in the group, so that a repeated one is recognised; a defect of an environment fails only its own rollouts. An episode
whose process was lost through no fault of its own starts again, and its sampled turns answer their requests again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import EnvironmentFailed, EnvironmentHung, Score, TaskError, checked_score
from tidemill.producers.environments.open import EnvironmentSet
from tidemill.producers.environments.process import ProcessLost
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.policy import CANCELLED, RecordedTurn, RolloutPolicy, recorded_turns, turn_record
from tidemill.producers.sampling.completion import Completion, build_expert_ids, build_segment
from tidemill.producers.sampling.replicas import ReplicaClient, ReplicaIdentity, ReplicaPool, ReplicaSession
from tidemill.schemas.chat.contexts import Context
from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.clock import now_us, to_s
from tidemill.schemas.records import Claim, Rollout, RolloutStatus, SamplingParameters, Task, Turn, rollout_id

LOG = logging.getLogger(__name__)
EXPIRED = "expired before start"
LONGEST_REASON = 4_000
"""Most characters of the reason of a failed rollout that are recorded."""
MOST_ATTEMPTS = 3
"""How often an episode is started without progress: its process was lost, or its recorded turns are of another
incarnation."""


class Player:
    """Plays episodes of the configured environments with one chat format."""

    def __init__(
        self,
        settings: RolloutSettings,
        worker_id: str,
        environments: EnvironmentSet,
        chat: ChatFormat,
        client: ReplicaClient,
        endpoint: AgentEndpoint,
        record: Callable[[Turn], None] | None = None,
        keep: Callable[[bytes], Claim] | None = None,
    ) -> None:
        """`record` is called with each turn that is sampled live; `keep` is called in a thread and stores the expert
        ids of a rollout."""
        self._settings, self._worker_id = settings, worker_id
        self._environments, self._chat, self._client, self._endpoint = environments, chat, client, endpoint
        self._record, self._keep = record, keep
        self._pool = ReplicaPool(settings.replicas, settings.backoff_s, settings.backoff_limit_s)
        self._slots = asyncio.Semaphore(settings.max_concurrent_episodes)

    async def play(self, task: Task, index: int, recorded: Sequence[Turn] = ()) -> Rollout:
        """Play the rollout at `index` of the task's group, from its recorded turns on; waits for a free slot."""
        started_at, turns = now_us(), recorded_turns(recorded)
        policy = self._policy(task, index, turns)
        try:
            async with self._slot(task):
                started_at = now_us()
                fruitless = 0
                while True:
                    try:
                        score, version = await self._attempt(task, policy)
                        break
                    except ProcessLost as error:
                        fruitless = fruitless + 1 if len(policy.turns) == policy.resumed else 1
                        if fruitless == MOST_ATTEMPTS:
                            raise EnvironmentFailed(f"lost {MOST_ATTEMPTS} times: {error}") from error
                        kept = [*policy.turns, *policy.unused]
                    except EnvironmentFailed:
                        fruitless += 1
                        if fruitless == MOST_ATTEMPTS or not policy.other_incarnation:
                            raise
                        kept = []
                    LOG.info("rollout %s/%d begins again", task.group_id, index)
                    policy = self._policy(task, index, kept)
        except EnvironmentFailed as failure:
            LOG.info("rollout %s/%d failed: %s", task.group_id, index, failure)
            return failed_rollout(task, index, str(failure), self._worker_id, policy.identity, started_at)
        metrics = {"resumed_turns": float(policy.resumed), "unused_turns": float(len(policy.unused))} if turns else {}
        base = failed_rollout(task, index, "", self._worker_id, policy.identity, started_at)
        contexts, temperature, kept_at = policy.contexts.all, self._settings.temperature, None
        if self._settings.expert_ids and self._keep is not None and (expert_ids := build_expert_ids(contexts)):
            kept_at = await asyncio.to_thread(self._keep, expert_ids)
        return completed_rollout(base, contexts, score, version, metrics, temperature, kept_at)

    @asynccontextmanager
    async def _slot(self, task: Task) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, to_s(task.deadline_at - now_us()))):
                await self._slots.acquire()
        except TimeoutError as error:
            raise EnvironmentFailed(EXPIRED) from error
        try:
            yield
        finally:
            self._slots.release()

    def _policy(self, task: Task, index: int, recorded: Sequence[RecordedTurn]) -> RolloutPolicy:
        record = self._record

        def write(number: int, turn: RecordedTurn) -> None:
            if record is not None:
                record(turn_record(task, index, self._worker_id, number, turn))

        session, offer = ReplicaSession(self._client, self._pool), self._endpoint.open
        return RolloutPolicy(self._chat, session, self._settings, task.max_turns, recorded, write, offer)

    async def _attempt(self, task: Task, policy: RolloutPolicy) -> tuple[Score, str]:
        """Return the score of one attempt and the version of the reward. Raises EnvironmentFailed, ProcessLost."""
        left_s = to_s(task.deadline_at - now_us())
        if left_s <= 0:
            raise EnvironmentFailed(EXPIRED)
        limit_s = min(left_s, self._settings.episode_timeout_s)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, policy.session:
                environment = await self._environments.get(task)
                try:
                    score = await environment.play(task, policy)
                except (EnvironmentHung, ProcessLost):
                    raise
                except Exception:  # a full context may appear as any error of the environment or of a program
                    if not policy.full or policy.failure:
                        raise
                    score = await environment.cut_off(task, policy.full)
        except (EnvironmentFailed, ProcessLost):
            raise
        except TaskError as error:
            raise EnvironmentFailed(f"task: {error}") from error
        except Exception as error:  # an environment may raise any error, and the worker's other episodes continue
            if limit.expired() and policy.failure in ("", CANCELLED):
                reason = f"timeout: no result within {limit_s:.1f} s; {policy.session.failures_so_far()}"
                raise EnvironmentFailed(reason) from error
            if policy.failure:
                raise EnvironmentFailed(policy.failure) from error
            LOG.exception("environment %s raised on task %s", task.environment, task.task_id)
            raise EnvironmentFailed(f"environment {task.environment} raised {error!r:.500}") from error
        finally:
            policy.closed = True
            self._endpoint.close(policy)
        if policy.failure:
            raise EnvironmentFailed(policy.failure)
        if not policy.contexts.all:
            raise EnvironmentFailed(f"environment {task.environment}: the policy was never called")
        return checked_score(score), environment.version


def failed_rollout(
    task: Task, index: int, reason: str, worker_id: str, sampled_by: ReplicaIdentity, started_at: int
) -> Rollout:
    """Return the record of an episode without a result, with the reason."""
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
        # The text may be foreign: one that the log refuses would end the worker, and the next one.
        failure=reason[:LONGEST_REASON].encode(errors="replace").decode(),
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
    """Return the record of a finished episode, with one segment per context, from a record without a result.

    `metrics` are added to those of the score. `temperature`, that of all turns, is the only setting of a request to a
    replica that changes the distribution.
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
