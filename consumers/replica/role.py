"""The replica role: joins from the newest anchor, opens the HTTP server, and follows the branch until it is stopped.

One process serves HTTP and follows the log; its engine core is its child and ends with it. The port opens only after
the live tensors were proved to be the version that the status names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path

import uvicorn
import uvloop

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.ledger import Ledger, ReplicaStatus, Write
from tidemill.consumers.replica.server import build_replica_app, make_server, server_arguments
from tidemill.consumers.replica.staging import (
    FOLLOWED,
    StartVersion,
    UpdateStaging,
    interrupt_if,
    join,
    private_directory,
)
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import ReplicaFault, Subscriber, follow
from tidemill.kernels.weights.checkpoint import map_checkpoint, specs_of
from tidemill.kernels.weights.delta_fetch import Pieces, open_fetcher
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Staleness, WeightAck

logger = logging.getLogger(__name__)
_APPLICATION = "tidemill-replica"
GRACE_S = 2.0
"""Time for requests in flight to end after the role is stopped, in seconds."""


Running = tuple[ReplicaEngine, Subscriber, uvicorn.Server]
"""A replica with a proved version; its HTTP server is not started yet."""


@asynccontextmanager
async def running_replica(
    settings: ReplicaSettings,
    run: RunSettings,
    chat: ChatSettings,
    state: ReplicaState,
    joined: StartVersion,
    directory: Path,
    surroundings: Callable[[], tuple[Pieces, Write]],
    interrupt: Callable[[], None] = lambda: None,
) -> AsyncIterator[Running]:
    """Start the engine with the joined version, prove it, build subscriber and server; its core ends with the context.

    Args:
        directory: directory in which whole checkpoints are staged.
        surroundings: opens the log's clients; returns the source of deltas and the writer of the replica's records;
            called after the engine core, which is a fork, has been started.
        interrupt: called often while an anchor is read; an error that it raises ends the update.

    Raises:
        ReplicaFault: the live tensors are not the joined version.
        RuntimeError: the engine did not start.
        UnsupportedModelError: its answers depend on the batch, and `batch_invariant` is set.
        ValueError: an argument of `vllm_args`, or the tokenizer, cannot be read.
    """
    model = str(joined.directory)
    arguments, tensors = server_arguments(model, settings), specs_of(map_checkpoint(joined.directory))
    status = ReplicaStatus(
        settings.replica_id,
        settings.region,
        run.run_id,
        run.branch,
        incarnation=uuid.uuid4().hex,
        pid=os.getpid(),
        pool=settings.pool.value,
    )
    async with AsyncExitStack() as stack:
        version, expert_ids = joined.manifest.version, settings.expert_ids
        activations = joined.manifest.serving_activations
        engine = await ReplicaEngine.start(arguments, tensors, version, settings.kv_policy, expert_ids, activations)
        stack.callback(engine.shutdown)
        if settings.batch_invariant:
            await engine.require_invariance()
        shards, say = surroundings()
        ledger = Ledger(status, say, now_us, lambda: state.head)
        staging = UpdateStaging(shards, directory, settings.decode_threads, interrupt)
        subscriber = Subscriber(engine, state, joined.mirror, staging, ledger)
        stack.callback(subscriber.close)
        await subscriber.begin(joined.manifest, joined.reason)
        status.started_at = now_us()
        chats = ChatServer.load(model, chat, settings.remembered_turns, settings.max_model_len)
        app = await build_replica_app(
            engine, arguments, settings.replica_id, ledger.document, state.incarnation_of, chats
        )
        yield engine, subscriber, make_server(app, settings.http)


def serve(kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, chat: ChatSettings) -> None:
    """Run the role until SIGTERM or SIGINT, in a process with the engine's environment (`prepare_environment`).

    Raises RuntimeError without vLLM, ValueError if vLLM refuses an argument of `vllm_args`.
    """
    server_arguments("", settings)  # refuses invalid arguments now, not after the wait for an anchor
    with private_directory(settings.staging_dir) as private:
        uvloop.run(Replica(kafka, run, settings, chat, private).run())


class Replica:
    """One replica, from its start to its end."""

    def __init__(
        self, kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, chat: ChatSettings, directory: Path
    ) -> None:
        self._kafka, self._run, self._settings, self._chat, self._directory = kafka, run, settings, chat, directory
        self._state = ReplicaState(run.run_id, run.branch, settings.pool)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Join, serve and follow until stopped. Raises the error that ended it, unless it was a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        with closing(bind(self._settings.host, self._settings.port, "replica.port")) as listener:
            joined = await asyncio.to_thread(
                join, self._kafka, self._settings, self._state, self._directory, self._stop.is_set
            )
            if joined is not None:
                await self._serve(joined, listener)

    async def _serve(self, joined: StartVersion, listener: socket.socket) -> None:
        kafka, settings, name = self._kafka, self._settings, self._settings.replica_id
        interrupt = interrupt_if(self._stop.is_set)
        with ExitStack() as stack:

            def surroundings() -> tuple[Pieces, Write]:
                producer = stack.enter_context(RecordProducer(kafka, name))

                def say(record: WeightAck | Staleness) -> None:
                    topic = Topic.ACKS if isinstance(record, WeightAck) else Topic.STALENESS
                    producer.send(topic, record, key=record.replica_id)

                connections, n_bytes = settings.fetch_connections, settings.fetch_bytes
                fetcher = open_fetcher(kafka, settings.fetch_timeout_s, connections, name, n_bytes, interrupt)
                return stack.enter_context(fetcher), say

            replica = running_replica(
                settings, self._run, self._chat, self._state, joined, self._directory, surroundings, interrupt
            )
            async with replica as running:
                letters = stack.enter_context(RecordProducer(kafka, f"{name}-dead-letters"))
                client_id = f"{name}-{FOLLOWED[0].value}"
                records = stack.enter_context(LogReader(kafka, FOLLOWED, start=joined.offsets, client_id=client_id))
                host, port = listener.getsockname()[:2]
                form, inputs = joined.manifest.serving_format, joined.manifest.serving_activations
                values = f" (values of {form}, dequantised)" if form else ""
                values += f" (inputs rounded to {inputs})" if inputs else ""
                logger.warning("serving version %d%s on http://%s:%d", joined.manifest.version, values, host, port)
                await self._until_stopped(running, listener, records, letters)

    async def _follow(
        self, engine: ReplicaEngine, subscriber: Subscriber, records: LogReader, letters: RecordProducer
    ) -> None:
        settings, timeout_s = self._settings, self._kafka.stall_timeout_s
        names = Names(self._kafka.topic_prefix)
        with (
            Liveness(f"replica {settings.replica_id}, following the log", timeout_s) as reading,
            Liveness(f"replica {settings.replica_id}, applying versions", timeout_s) as acting,
        ):

            def check() -> None:
                reading.beat("polling the log")
                if engine.errored:
                    raise ReplicaFault("the engine core died: see its log above; the replica must be started again")

            def bury(located: ConsumedRecord, reason: str) -> None:
                logger.error("record %d of %s cannot be used: %s", located.offset, located.topic, reason)
                send_dead_letter(letters, names, located, reason, _APPLICATION)

            await follow(
                subscriber,
                records,
                bury,
                self._stop,
                check=check,
                poll_interval_s=settings.poll_interval_s,
                acting=acting,
                move_timeout_s=settings.move_timeout_s,
            )

    async def _until_stopped(
        self, running: Running, listener: socket.socket, records: LogReader, letters: RecordProducer
    ) -> None:
        """Run the server and the subscriber until one ends or the role is stopped; raise the error that ended them."""
        engine, subscriber, server = running
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        follower = asyncio.create_task(self._follow(engine, subscriber, records, letters))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, follower, stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._stop.set()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=GRACE_S)
        # Aborted requests end normally. Otherwise the server would cancel them, which vLLM's handlers do not support.
        while not serving.done() and not engine.errored:
            if ended := await engine.abort_all():
                logger.warning("stopping: %d requests were not answered within %g s and are aborted", ended, GRACE_S)
            await asyncio.wait({serving}, timeout=0.1)
        await asyncio.gather(serving, follower, stopped)
