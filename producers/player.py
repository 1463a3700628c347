"""Plays the episodes that a worker is asked for, so many at once, each within its time; the answer is always a record.

What holds: a rollout is completed, or failed with a reason, by its deadline; a defect of an environment fails its
rollout and not the worker, until more of them hang than the worker can carry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache

from tokenizers import Tokenizer

from tidemill.producers.completion import Completion
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environment import Environment, Harness
from tidemill.producers.environment_threads import EnvironmentThreads, TooManyStalled
from tidemill.producers.episode import Episode, EpisodeFailed, EpisodeLimits, EpisodeResult
from tidemill.producers.recording import OtherIncarnation, Record, RecordingSampler, recorded_turn
from tidemill.producers.replica_client import ReplicaClient, ReplicaSession, replica_pool
from tidemill.producers.rollout import Provenance, completed_rollout, failed_rollout
from tidemill.schemas.clock import now_us, to_s
from tidemill.schemas.records import Rollout, Task, Turn

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
        record: Callable[[Turn], None] | None = None,
    ) -> None:
        """`record` is called with each sampled turn."""
        self._settings = settings
        self._worker_id = worker_id
        self._known = known
        self._client = client
        self._record = record
        self._pool = replica_pool(settings)
        self._slots = asyncio.Semaphore(settings.max_concurrent_episodes)
        self._limits = EpisodeLimits(settings.max_context_tokens, settings.temperature)
        self._harness = cache(lambda name: known[name].harness(tokenizer))
        self._threads = EnvironmentThreads(settings.environment_timeout_s, settings.max_stalled_calls)

    async def play(self, task: Task, index: int, recorded: Sequence[Turn] = ()) -> Rollout:
        """The rollout at place `index` of the task's group, going on from what is recorded of it.

        Waits for a free slot first. Raises TooManyStalled.
        """
        started_at = now_us()
        session = ReplicaSession(self._client, self._pool)
        sampler = self._sampler(task, index, session, recorded)
        try:
            async with self._slot(task):
                started_at = now_us()
                try:
                    result = await self._attempt(task, sampler, session)
                except OtherIncarnation as error:
                    LOG.info("rollout %s/%d begins anew: %s", task.group_id, index, error)
                    sampler = self._sampler(task, index, session, ())
                    result = await self._attempt(task, sampler, session)
        except EpisodeFailed as failure:
            LOG.info("rollout %s/%d failed: %s", task.group_id, index, failure)
            return failed_rollout(task, index, str(failure), self._provenance(sampler, started_at))
        version = self._known[task.environment].reward.version
        return completed_rollout(task, index, result, version, self._provenance(sampler, started_at))

    def close(self) -> None:
        """Let the environments' threads end."""
        self._threads.close()

    @asynccontextmanager
    async def _slot(self, task: Task) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, to_s(task.deadline_at - now_us()))):
                await self._slots.acquire()
        except TimeoutError as error:
            raise EpisodeFailed(EXPIRED) from error
        try:
            yield
        finally:
            self._slots.release()

    def _sampler(self, task: Task, index: int, session: ReplicaSession, recorded: Sequence[Turn]) -> RecordingSampler:
        return RecordingSampler(session, recorded, self._recorder(task, index, session))

    def _recorder(self, task: Task, index: int, session: ReplicaSession) -> Record | None:
        record = self._record
        if record is None:
            return None

        def write(number: int, context: str, made: Completion) -> None:
            record(recorded_turn(task, index, self._worker_id, session.identity, number, context, made))

        return write

    async def _attempt(self, task: Task, sampler: RecordingSampler, session: ReplicaSession) -> EpisodeResult:
        left_s = to_s(task.deadline_at - now_us())
        if left_s <= 0:
            raise EpisodeFailed(EXPIRED)
        limit_s = min(left_s, self._settings.episode_timeout_s)
        environment, harness = self._environment(task)
        try:
            async with asyncio.timeout(limit_s) as limit, session:
                return await Episode(task, environment, harness, self._limits, self._threads).play(sampler)
        except (EpisodeFailed, OtherIncarnation, TooManyStalled):
            raise
        except Exception as error:  # whatever an environment's code raises, the worker's other episodes go on
            if limit.expired():
                raise EpisodeFailed(f"timeout: no result within {limit_s:.1f} s; {session.trouble()}") from error
            LOG.exception("environment %s raised on task %s", task.environment, task.task_id)
            raise EpisodeFailed(f"environment {task.environment} raised {error!r}") from error

    def _environment(self, task: Task) -> tuple[Environment, Harness]:
        if task.environment not in self._known:
            raise EpisodeFailed(f"task: unknown environment {task.environment!r}; known are {sorted(self._known)}")
        return self._known[task.environment], self._harness(task.environment)

    def _provenance(self, sampler: RecordingSampler, started_at: int) -> Provenance:
        who = sampler.identity
        return Provenance(self._worker_id, who.replica_id, who.region, started_at, now_us())
