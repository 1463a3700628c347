"""The replica role: joins from the newest anchor, opens the HTTP server, follows the branch until it is told to stop.

One process serves HTTP and follows the log; its engine core is a child of it and dies with it. The port opens only
once the live tensors were proved to be the version that the status names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from tidemill.consumers.replica.anchor import AnchorReader
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.fetch import ChunkFetcher
from tidemill.consumers.replica.join import Joined, join
from tidemill.consumers.replica.ledger import Identity, Ledger
from tidemill.consumers.replica.server import bind, build_replica_app, make_server, server_arguments
from tidemill.consumers.replica.staging import Staging
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.status import ReplicaStatus
from tidemill.consumers.replica.subscriber import ReplicaFault, Subscriber
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clients import Located, LogReader, RecordProducer
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.dead_letter import send_dead_letter
from tidemill.schemas.records import Manifest, WeightAck

logger = logging.getLogger(__name__)
_APPLICATION = "tidemill-replica"


def serve(kafka: KafkaSettings, run: RunSettings, replica: ReplicaSettings) -> None:
    """Run the role in this process, which has the engine's environment, until SIGTERM or SIGINT."""
    with ExitStack() as stack:
        private = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-replica-"))
        staging = replica.staging_dir or Path(private)
        uvloop.run(Replica(kafka, run, replica, staging).run())


class Replica:
    """One replica from its start to its end."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, directory: Path) -> None:
        self._kafka, self._run, self._settings, self._directory = kafka, run, settings, directory
        self._state = ReplicaState(run.run_id, run.branch)
        self._stop = asyncio.Event()
        self._started_at = now_us()
        self._names = Names(kafka.topic_prefix)

    async def run(self) -> None:
        """Join, serve and follow until stopped. Raises what ended it, when it was not a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        with closing(bind(self._settings.host, self._settings.port)) as listener:
            joined = await asyncio.to_thread(self._join)
            if joined is not None:
                await self._serve(joined, listener)

    def _join(self) -> Joined | None:
        return join(self._kafka, self._settings, self._state, self._directory, self._stop.is_set)

    async def _serve(self, joined: Joined, listener: socket.socket) -> None:
        arguments = server_arguments(str(joined.directory), self._settings)
        tensors = AnchorReader(joined.directory).specs()
        async with AsyncExitStack() as stack:
            engine = await ReplicaEngine.start(arguments, tensors, joined.manifest.version, self._settings.kv_policy)
            stack.callback(engine.shutdown)
            producer = stack.enter_context(RecordProducer(self._kafka, self._settings.replica_id))
            ledger = Ledger(self._identity(), partial(_acknowledge, producer), now_us)
            chunks = stack.enter_context(self._reader(Topic.DELTAS, "end"))
            staging = Staging(ChunkFetcher(chunks, self._settings.fetch_timeout_s), self._directory)
            subscriber = Subscriber(engine, self._state, joined.mirror, staging, ledger)
            stack.callback(subscriber.close)
            await subscriber.begin(joined.manifest)
            status = partial(self._status, ledger)
            server = make_server(await build_replica_app(engine, arguments, self._settings.replica_id, status))
            manifests = stack.enter_context(self._reader(Topic.MANIFESTS, joined.offsets))
            _say_ready(listener, joined.manifest.version)
            await self._until_stopped(server, listener, self._follow(engine, subscriber, manifests, producer))

    async def _until_stopped(
        self, server: uvicorn.Server, listener: socket.socket, following: Coroutine[None, None, None]
    ) -> None:
        """Run the server and the subscriber until one ends or the role is stopped; raises what ended them."""
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        follower = asyncio.create_task(following)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, follower, stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._stop.set()
        server.should_exit = True
        stopped.cancel()
        await asyncio.gather(serving, follower)

    async def _follow(
        self, engine: ReplicaEngine, subscriber: Subscriber, manifests: LogReader, producer: RecordProducer
    ) -> None:
        await subscriber.retry()
        while not self._stop.is_set():
            if engine.errored:
                raise ReplicaFault("the engine core died: see its log above; the replica must be started again")
            found = await asyncio.to_thread(manifests.poll, self._settings.poll_interval_s, 1)
            for located in found:
                await self._take(located, subscriber, producer)
            if not found:
                await subscriber.retry()

    async def _take(self, located: Located, subscriber: Subscriber, producer: RecordProducer) -> None:
        if isinstance(located.record, Manifest):
            await subscriber.observe(located.record)
            return
        reason = located.error or f"a {type(located.record).__name__} is no manifest"
        logger.error("record %d of %s cannot be used: %s", located.offset, located.topic, reason)
        send_dead_letter(producer, self._names, located, reason, _APPLICATION)

    def _reader(self, topic: Topic, start: str | dict[tuple[Topic, int], int]) -> LogReader:
        return LogReader(self._kafka, [topic], start=start, client_id=f"{self._settings.replica_id}-{topic.value}")

    def _identity(self) -> Identity:
        settings, run = self._settings, self._run
        return Identity(settings.replica_id, settings.region, run.run_id, run.branch, uuid.uuid4().hex, os.getpid())

    def _status(self, ledger: Ledger) -> ReplicaStatus:
        return ReplicaStatus(
            **asdict(ledger.identity),
            started_at=self._started_at,
            version=ledger.version,
            fingerprint=ledger.fingerprint,
            head=self._state.head,
            applied=ledger.applied,
            refused=ledger.refused,
            last_pause_ms=ledger.last_pause_ms,
            last_reason=ledger.last_reason,
        )


def _acknowledge(producer: RecordProducer, ack: WeightAck) -> None:
    producer.send(Topic.ACKS, ack, key=ack.replica_id)


def _say_ready(listener: socket.socket, version: int) -> None:
    host, port = listener.getsockname()[:2]
    logger.warning("serving version %d on http://%s:%d", version, host, port)
