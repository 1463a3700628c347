"""Plays the episodes that a worker is asked for, so many at once, each within its time; the result is always a record.

What holds: a rollout is completed, or failed with a reason, by its deadline; a defect of an environment fails its own
rollouts alone. An episode whose process was lost with no fault of its own begins again, and its sampled turns answer
their requests again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import Environment, EnvironmentFailed, EnvironmentHung, Score, TaskError
from tidemill.producers.environments.open import EnvironmentSet, ProcessLost
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.policy import GIVEN_UP, PolicyLimits, RolloutPolicy
from tidemill.producers.rollout.record import (
    RecordedTurn,
    completed_rollout,
    failed_rollout,
    recorded_turns,
    turn_record,
)
from tidemill.producers.sampling.completion import build_expert_ids
from tidemill.producers.sampling.replicas import ReplicaClient, ReplicaPool, ReplicaSession
from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.clock import now_us, to_s
from tidemill.schemas.records import Claim, Rollout, Task, Turn

LOG = logging.getLogger(__name__)
EXPIRED = "expired before start"
MOST_ATTEMPTS = 3
"""How often an episode is begun that comes no further: its process was lost, or its recorded turns are of another
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
        """`record` is called with each turn that is sampled live, `keep` in a thread with the expert ids of a rollout,
        to store them."""
        self._settings, self._worker_id = settings, worker_id
        self._environments, self._chat, self._client, self._endpoint = environments, chat, client, endpoint
        self._record, self._keep = record, keep
        self._pool = ReplicaPool(settings.replicas, settings.backoff_s, settings.backoff_limit_s)
        self._slots = asyncio.Semaphore(settings.max_concurrent_episodes)

    async def play(self, task: Task, index: int, recorded: Sequence[Turn] = ()) -> Rollout:
        """The rollout at place `index` of the task's group, going on from its recorded turns; waits for a free slot."""
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
            return self._without_result(task, index, str(failure), policy, started_at)
        metrics = {"resumed_turns": float(policy.resumed), "unused_turns": float(len(policy.unused))} if turns else {}
        base = self._without_result(task, index, "", policy, started_at)
        expert_ids = await self._kept(build_expert_ids(policy.contexts.all)) if self._settings.expert_ids else None
        temperature = self._settings.temperature
        return completed_rollout(base, policy.contexts.all, score, version, metrics, temperature, expert_ids)

    async def _kept(self, expert_ids: bytes) -> Claim | None:
        """Where expert ids were stored; None for none. Raises OSError when the store fails."""
        return await asyncio.to_thread(self._keep, expert_ids) if expert_ids and self._keep is not None else None

    def _without_result(self, task: Task, index: int, reason: str, policy: RolloutPolicy, started_at: int) -> Rollout:
        return failed_rollout(task, index, reason, self._worker_id, policy.identity, started_at)

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
        settings, record = self._settings, self._record

        def write(number: int, turn: RecordedTurn) -> None:
            if record is not None:
                record(turn_record(task, index, self._worker_id, number, turn))

        limits = PolicyLimits(
            settings.max_context_tokens,
            settings.max_turn_tokens,
            task.max_turns,
            settings.temperature,
            settings.expert_ids,
        )
        session = ReplicaSession(self._client, self._pool)
        return RolloutPolicy(self._chat, session, limits, recorded, write, self._endpoint.open)

    async def _attempt(self, task: Task, policy: RolloutPolicy) -> tuple[Score, str]:
        """The score of one attempt, and the version of the reward. Raises EnvironmentFailed, ProcessLost."""
        left_s = to_s(task.deadline_at - now_us())
        if left_s <= 0:
            raise EnvironmentFailed(EXPIRED)
        limit_s = min(left_s, self._settings.episode_timeout_s)
        limit = asyncio.timeout(limit_s)
        try:
            environment = await self._environments.get(task)
            async with limit, policy.session:
                score = await self._score(environment, task, policy)
        except (EnvironmentFailed, ProcessLost):
            raise
        except TaskError as error:
            raise EnvironmentFailed(f"task: {error}") from error
        except Exception as error:  # an environment's code raises any error, and the worker's other episodes go on
            if limit.expired() and policy.failure in ("", GIVEN_UP):
                reason = f"timeout: no result within {limit_s:.1f} s; {policy.session.trouble()}"
                raise EnvironmentFailed(reason) from error
            if policy.failure:
                raise EnvironmentFailed(policy.failure) from error
            LOG.exception("environment %s raised on task %s", task.environment, task.task_id)
            raise EnvironmentFailed(f"environment {task.environment} raised {error!r:.500}") from error
        finally:
            policy.close()
            self._endpoint.close(policy)
        reason = policy.failure or score.fault() or ("" if policy.contexts.all else "the policy was never called")
        if reason:
            raise EnvironmentFailed(policy.failure or f"environment {task.environment}: {reason}")
        return score, environment.version

    async def _score(self, environment: Environment, task: Task, policy: RolloutPolicy) -> Score:
        try:
            return await environment.play(task, policy)
        except (EnvironmentHung, ProcessLost):
            raise
        except Exception:  # a full context may surface as any error of the environment's, or of a program's
            if not policy.full or policy.failure:
                raise
            return await environment.cut_off(task, policy.full)
