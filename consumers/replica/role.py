"""The replica role: joins from the newest anchor, opens the HTTP server, follows the branch until it is told to stop.

One process serves HTTP and follows the log; its engine core is its child and dies with it. The port opens only
once the live tensors were proved to be the version that the status names.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from pathlib import Path

import uvloop

from tidemill.consumers.replica.assembly import Running, running_replica
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.follow import Follower
from tidemill.consumers.replica.join import FOLLOWED, Joined, join
from tidemill.consumers.replica.ledger import Write
from tidemill.consumers.replica.server import server_arguments
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import ReplicaFault
from tidemill.kernels.weights.delta_fetch import ShardSource, open_fetcher
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.http_room import bind
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Staleness, WeightAck

logger = logging.getLogger(__name__)
_APPLICATION = "tidemill-replica"
GRACE_S = 2.0
"""Seconds that requests in flight get to end, once the role is stopped."""


def serve(kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, chat: ChatSettings) -> None:
    """Run the role in this process, which has the engine's environment, until SIGTERM or SIGINT."""
    server_arguments("", settings)  # what vLLM does not take is refused now, not once an anchor has come
    with tempfile.TemporaryDirectory(prefix="tidemill-replica-") as private:
        uvloop.run(Replica(kafka, run, settings, chat, settings.staging_dir or Path(private)).run())


class Replica:
    """One replica from its start to its end."""

    def __init__(
        self, kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, chat: ChatSettings, directory: Path
    ) -> None:
        self._kafka, self._run, self._settings, self._chat, self._directory = kafka, run, settings, chat, directory
        self._state = ReplicaState(run.run_id, run.branch, settings.pool)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Join, serve and follow until stopped. Raises what ended it, when it was not a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        with closing(bind(self._settings.host, self._settings.port, "replica.port")) as listener:
            joined = await asyncio.to_thread(
                join, self._kafka, self._settings, self._state, self._directory, self._stop.is_set
            )
            if joined is not None:
                await self._serve(joined, listener)

    async def _serve(self, joined: Joined, listener: socket.socket) -> None:
        settings = self._settings
        with ExitStack() as stack:
            replica = running_replica(
                settings, self._run, self._chat, self._state, joined, self._directory,
                lambda: self._surroundings(stack),
            )  # fmt: skip
            async with replica as running:
                producer = stack.enter_context(RecordProducer(self._kafka, f"{settings.replica_id}-dead-letters"))
                client_id = f"{settings.replica_id}-{FOLLOWED[0].value}"
                log = LogReader(self._kafka, FOLLOWED, start=joined.offsets, client_id=client_id)
                records = stack.enter_context(log)
                host, port = listener.getsockname()[:2]
                form = joined.manifest.serving_format
                values = f" (values of {form}, dequantised)" if form else ""
                logger.warning("serving version %d%s on http://%s:%d", joined.manifest.version, values, host, port)
                following = self._follow(running, records, self._bury(producer))
                await self._until_stopped(running, listener, following)

    async def _follow(self, running: Running, records: LogReader, bury: Callable[[ConsumedRecord, str], None]) -> None:
        settings, timeout_s = self._settings, self._kafka.stall_timeout_s
        with (
            Liveness(f"replica {settings.replica_id}, following the log", timeout_s) as reading,
            Liveness(f"replica {settings.replica_id}, applying versions", timeout_s) as acting,
        ):
            follower = Follower(
                running.subscriber, records, bury, settings.poll_interval_s, acting, settings.move_timeout_s
            )

            def check() -> None:
                reading.beat("polling the log")
                if running.engine.errored:
                    raise ReplicaFault("the engine core died: see its log above; the replica must be started again")

            await follower.run(self._stop, check)

    def _surroundings(self, stack: ExitStack) -> tuple[ShardSource, Write]:
        producer = stack.enter_context(RecordProducer(self._kafka, self._settings.replica_id))

        def say(record: WeightAck | Staleness) -> None:
            topic = Topic.ACKS if isinstance(record, WeightAck) else Topic.STALENESS
            producer.send(topic, record, key=record.replica_id)

        settings = self._settings
        fetcher = open_fetcher(
            self._kafka,
            settings.fetch_timeout_s,
            settings.fetch_connections,
            settings.replica_id,
            settings.fetch_bytes,
        )
        return stack.enter_context(fetcher), say

    def _bury(self, producer: RecordProducer) -> Callable[[ConsumedRecord, str], None]:
        names = Names(self._kafka.topic_prefix)

        def bury(located: ConsumedRecord, reason: str) -> None:
            logger.error("record %d of %s cannot be used: %s", located.offset, located.topic, reason)
            send_dead_letter(producer, names, located, reason, _APPLICATION)

        return bury

    async def _until_stopped(
        self, running: Running, listener: socket.socket, following: Coroutine[None, None, None]
    ) -> None:
        """Run the server and the subscriber until one ends or the role is stopped; raises what ended them."""
        serving = asyncio.create_task(running.server.serve(sockets=[listener]))
        follower = asyncio.create_task(following)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, follower, stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._stop.set()
        running.server.should_exit = True
        await asyncio.wait({serving}, timeout=GRACE_S)
        # Requests that come to their own end leave nothing for the server to cancel, which vLLM's handlers take badly.
        while not serving.done() and not running.engine.errored:
            if ended := await running.engine.abort_all():
                logger.warning("stopping: %d requests were not answered within %g s and are aborted", ended, GRACE_S)
            await asyncio.wait({serving}, timeout=0.1)
        await asyncio.gather(serving, follower, stopped)
