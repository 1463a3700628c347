"""The rollout worker: reads tasks, plays their episodes against the replicas, writes their rollouts.

Invariants:

- a task's offset is committed after the log has acknowledged all its rollouts, and never past an unfinished task; work
  that a crash or a rebalance interrupts is continued under the same rollout ids by the next worker that gets the task:
  rollouts that are in the log are not played again, the others continue from their recorded turns;
- no episode of a task starts before the log has acknowledged its dispatch, so that each start has a record;
- every readable task ends in exactly `group_size` rollouts, completed or failed with a reason; an unreadable one is
  sent to the dead-letter topic, and the worker continues;
- no task is taken while `max_concurrent_episodes` episodes are unfinished.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.open import EnvironmentSet
from tidemill.producers.outbox import OVERHEAD_BYTES, SPAN_BYTES, Outbox, SegmentClaims, anchor_of_run
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.intake import POLL_S, OffsetTracker, Partition, TaskIntake, TaskProgress
from tidemill.producers.rollout.player import Player
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.chat.format import load_chat_format
from tidemill.schemas.clock import now_us, to_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.client_settings import LOG_WAIT_S
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Dispatch, RolloutStatus, Task, Turn
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
APPLICATION = "tidemill-rollout"


def refusal(located: ConsumedRecord, settings: RolloutSettings) -> str | None:
    """Return the reason why a record of `tasks` cannot be played; None if it can be played."""
    task = located.record
    if task is None:
        return located.error
    if not isinstance(task, Task):
        return f"a {type(task).__name__} is not a task"
    if not 1 <= task.group_size <= settings.max_group_size:
        return f"group_size is {task.group_size}, allowed are 1 to {settings.max_group_size}"
    if task.max_turns < 1:
        return f"max_turns is {task.max_turns}, at least 1 is needed"
    return None


@dataclass(slots=True)
class _RunningTask:
    task: Task
    partition: Partition
    offset: int
    progress: TaskProgress
    indexes: list[int]
    """Indexes in the group that are to be played."""
    remaining: int
    failed: int = 0


class Worker:
    """The unfinished tasks of the worker, on one event loop."""

    def __init__(
        self, run: RunSettings, settings: RolloutSettings, worker_id: str, names: Names, player: Player, outbox: Outbox
    ) -> None:
        self._run, self._settings, self._worker_id = run, settings, worker_id
        self._names, self._player, self._outbox = names, player, outbox
        self._tracker = OffsetTracker()
        self._jobs: dict[asyncio.Task[None], _RunningTask] = {}
        self._moved = asyncio.Event()

    async def serve(self, intake: TaskIntake, stop: threading.Event, liveness: Liveness) -> None:
        """Work until `stop` is set, then for at most the grace period. Raises the error that made a task fail."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="tidemill-intake")
        try:
            while not stop.is_set():
                liveness.beat(f"a round with {len(self._jobs)} unfinished tasks", LOG_WAIT_S)
                await self._round(intake, thread, self._in_hand() < self._settings.max_concurrent_episodes)
            liveness.beat("finishing the running episodes", self._settings.grace_s + LOG_WAIT_S)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._settings.grace_s
            if self._jobs:
                LOG.info(
                    "stopping: %d episodes get up to %g s to finish (rollout.grace_s); others are played again later",
                    self._in_hand(),
                    self._settings.grace_s,
                )
            while self._jobs and loop.time() < deadline:
                await self._round(intake, thread, wanted=False)
            await self._abandon(list(self._jobs))
            await self._outbox.drain()
            await loop.run_in_executor(thread, intake.round, False, self._tracker.committable())
        finally:
            await self._abandon(list(self._jobs))
            thread.shutdown(wait=True)

    async def _round(self, intake: TaskIntake, thread: ThreadPoolExecutor, wanted: bool) -> None:
        loop = asyncio.get_running_loop()
        if not wanted:
            self._moved.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), POLL_S)
        offsets = self._tracker.committable()
        delivered, owned, committed = await loop.run_in_executor(thread, intake.round, wanted, offsets)
        for job in [job for job in self._jobs if job.done()]:
            del self._jobs[job]
            # Raise the error that ended a task's work, if any; of several episodes, the first error
            error = job.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if error is not None:
                raise error
        self._tracker.committed.update(committed)
        lost = self._tracker.partitions() - owned
        for partition in lost:
            LOG.info("partition %s moved to another worker; that worker takes its unfinished tasks", partition)
            self._tracker.drop(partition)
        await self._abandon([job for job, running in self._jobs.items() if running.partition in lost])
        for located, progress in delivered:
            await self._accept(located, progress)

    async def _accept(self, located: ConsumedRecord, progress: TaskProgress) -> None:
        partition = (located.topic, located.partition)
        if not self._tracker.begin(partition, located.offset):
            return
        task = located.record
        if isinstance(task, Task) and task.run_id != self._run.run_id:  # its own run's workers play or refuse it
            self._tracker.finish(partition, located.offset)
            return
        reason = refusal(located, self._settings)
        if reason is not None:
            LOG.warning("refused the record at %s: %s", located.position, reason)
            await self._outbox.call(
                lambda producer: send_dead_letter(producer, self._names, located, reason, APPLICATION)
            )
        if reason is None and isinstance(task, Task):
            indexes = [index for index in range(task.group_size) if index not in progress.ended]
            running = _RunningTask(task, partition, located.offset, progress, indexes, len(indexes))
            self._jobs[asyncio.create_task(self._work(running))] = running
        else:
            self._tracker.finish(partition, located.offset)

    async def _work(self, running: _RunningTask) -> None:
        task, progress, indexes = running.task, running.progress, running.indexes

        async def play(index: int) -> None:
            rollout = await self._player.play(task, index, progress.turns.get(index, ()))
            running.remaining -= 1
            running.failed += rollout.status is RolloutStatus.FAILED
            self._moved.set()
            await self._outbox.write(rollout.group_id, rollout)

        if indexes:
            at = now_us()
            rounds = math.ceil(self._in_hand() / self._settings.max_concurrent_episodes)
            lease_until = min(task.deadline_at, at + to_us(rounds * self._settings.episode_timeout_s))
            turns = [progress.resumable(index) for index in indexes]
            dispatch = Dispatch(
                task.task_id, task.group_id, task.run_id, self._worker_id, indexes, turns, lease_until, at
            )
            await self._outbox.write(task.task_id, dispatch, Topic.PROGRESS)
        async with asyncio.TaskGroup() as episodes:
            for index in indexes:
                episodes.create_task(play(index))
        self._tracker.finish(running.partition, running.offset)
        LOG.info("task %s: %d rollouts, %d failed", task.task_id, len(indexes), running.failed)

    async def _abandon(self, jobs: list[asyncio.Task[None]]) -> None:
        for job in jobs:
            LOG.info("task %s abandoned, uncommitted", self._jobs.pop(job).task.task_id)
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def _in_hand(self) -> int:
        return sum(running.remaining for running in self._jobs.values())


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    settings: RolloutSettings,
    chat: ChatSettings,
    stop: threading.Event | None = None,
) -> None:
    """Work until `stop` is set; without `stop`, until SIGINT or SIGTERM.

    Raises DeliveryError, KafkaException; OSError or ValueError if the checkpoint has no tokenizer or usable template;
    UnknownEnvironment, TaskError or EnvironmentFailed if an environment cannot be opened; RuntimeError if another
    worker has the same name.
    """
    stop = stop or stop_on_signals()
    checkpoint = settings.tokenizer or anchor_of_run(kafka, run, stop)
    if checkpoint is None:
        return
    form = load_chat_format(checkpoint, chat)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            producer = stack.enter_context(RecordProducer(kafka, APPLICATION))
            claims = SegmentClaims(store.root, run.run_id, settings.claim_check_bytes, Codec(kafka.registry_url))
            outbox = Outbox(producer, Topic.ROLLOUTS, claims.checked)
            stack.callback(outbox.close)
            log = stack.enter_context(LogReader(kafka, client_id=APPLICATION))

            def record(turn: Turn) -> None:
                """Record a turn. A turn above the size limit is not recorded: the next worker samples it again."""
                arrays = len(turn.token_ids) + len(turn.logprobs) + len(turn.expert_ids)
                size = OVERHEAD_BYTES + arrays + SPAN_BYTES * len(turn.spans)
                if settings.record_turns and size <= settings.claim_check_bytes:
                    outbox.post(turn.task_id, turn, Topic.PROGRESS)

            environments = EnvironmentSet(run.environments, settings)
            stack.push_async_callback(environments.close)
            await environments.check(form)
            client = await stack.enter_async_context(open_replica_client(settings))
            endpoint = await stack.enter_async_context(AgentEndpoint())
            player = Player(settings, worker_id, environments, form, client, endpoint, record, claims.keep)
            worker = Worker(run, settings, worker_id, Names(kafka.topic_prefix), player, outbox)
            member_of = kafka
            if settings.worker_id is not None:  # a static member, which gets its own partitions again
                options = {**kafka.client_options, "group.instance.id": settings.worker_id}
                member_of = kafka.model_copy(update={"client_options": options})
            # Last: a member gets partitions at once, also before it polls, and no other worker plays their tasks.
            member = GroupConsumer(member_of, f"rollout.{run.run_id}", [Topic.TASKS], client_id=APPLICATION)
            stack.callback(member.close)
            LOG.info("rollout worker %s serves run %s from %s", worker_id, run.run_id, ", ".join(settings.replicas))
            with Liveness(f"rollout worker {worker_id}", kafka.stall_timeout_s) as liveness:
                await worker.serve(TaskIntake(member, log, run.run_id), stop, liveness)

    asyncio.run(serve())
