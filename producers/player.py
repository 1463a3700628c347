"""Plays the episodes that a worker is asked for, so many at once, each within its time; the answer is always a record.

What holds: a rollout is completed, or failed with a reason; a defect of an environment fails its rollout and not the
worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import cache

from tokenizers import Tokenizer

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environment import Environment, Harness
from tidemill.producers.episode import Episode, EpisodeFailed, EpisodeLimits, EpisodeResult
from tidemill.producers.replica_client import ReplicaClient, ReplicaSession, replica_pool
from tidemill.producers.rollout import Provenance, completed_rollout, failed_rollout
from tidemill.schemas.clock import now_us, to_s
from tidemill.schemas.records import Rollout, Task

LOG = logging.getLogger(__name__)
EXPIRED = "expired before start"


class Player:
    """Plays episodes of any known environment with one tokenizer."""

    def __init__(
        self,
        settings: RolloutSettings,
        worker_id: str,
        known: Mapping[str, Environment],
        tokenizer: Tokenizer,
        client: ReplicaClient,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._known = known
        self._client = client
        self._pool = replica_pool(settings)
        self._slots = asyncio.Semaphore(settings.max_concurrent_episodes)
        self._limits = EpisodeLimits(settings.max_context_tokens, settings.temperature)
        self._harness = cache(lambda name: known[name].harness(tokenizer))

    async def play(self, task: Task, index: int) -> Rollout:
        """The rollout at place `index` of the task's group; waits for a free slot first."""
        async with self._slots:
            started_at = now_us()
            session = ReplicaSession(self._client, self._pool)
            try:
                result = await self._attempt(task, session, started_at)
            except EpisodeFailed as failure:
                LOG.info("rollout %s/%d failed: %s", task.group_id, index, failure)
                return failed_rollout(task, index, str(failure), self._provenance(session, started_at))
            version = self._known[task.environment].reward.version
            return completed_rollout(task, index, result, version, self._provenance(session, started_at))

    async def _attempt(self, task: Task, session: ReplicaSession, started_at: int) -> EpisodeResult:
        left_s = to_s(task.deadline_at - started_at)
        if left_s <= 0:
            raise EpisodeFailed(EXPIRED)
        limit_s = min(left_s, self._settings.episode_timeout_s)
        environment, harness = self._environment(task)
        try:
            async with asyncio.timeout(limit_s), session:
                return await Episode(task, environment, harness, self._limits).play(session)
        except TimeoutError as error:
            raise EpisodeFailed(f"timeout: no result within {limit_s:.1f} s; {session.trouble()}") from error
        except EpisodeFailed:
            raise
        except Exception as error:  # whatever an environment's code raises, the worker's other episodes go on
            LOG.exception("environment %s raised on task %s", task.environment, task.task_id)
            raise EpisodeFailed(f"environment {task.environment} raised {error!r}") from error

    def _environment(self, task: Task) -> tuple[Environment, Harness]:
        if task.environment not in self._known:
            raise EpisodeFailed(f"task: unknown environment {task.environment!r}; known are {sorted(self._known)}")
        return self._known[task.environment], self._harness(task.environment)

    def _provenance(self, session: ReplicaSession, started_at: int) -> Provenance:
        who = session.identity
        return Provenance(self._worker_id, who.replica_id, who.region, started_at, now_us())
