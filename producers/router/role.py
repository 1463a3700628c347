"""The router's process: follows the gate's decisions, serves until it is told to stop, records what is in hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, closing

import uvicorn

from tidemill.producers.product.settings import ProductSettings, require_some
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.producers.router.app import Application
from tidemill.producers.router.canary import CanaryShare
from tidemill.producers.router.config import RouterSettings
from tidemill.producers.router.exchange import Router
from tidemill.producers.router.metrics import RouterMetrics
from tidemill.producers.router.recorder import APPLICATION, open_recorder
from tidemill.producers.router.replicas import open_replicas
from tidemill.producers.sampling.anchor import anchor_of_run
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.http_room import bind
from tidemill.schemas.http_server import BoundedConfig
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
POLL_S = 0.2


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    product: ProductSettings,
    router: RouterSettings,
    chat: ChatSettings,
    stop: threading.Event | None = None,
) -> None:
    """Serve until `stop` is set; without one, until SIGTERM or SIGINT.

    Chat is served from the run's first anchor on, whose chat template it needs; completions are served at once.

    Raises:
        KeysMissing: the product's keys are not configured.
        ApiKeysMissing: there is no API key.
        PortTaken: the address cannot be bound.
        LookupError: a topic does not exist.
        OSError, ValueError: the tokenizer cannot be read.
    """
    require_some(router.api_keys, "router")
    asyncio.run(_serve(kafka, run, store, product, router, chat, stop or stop_on_signals()))


async def _serve(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    product: ProductSettings,
    settings: RouterSettings,
    chat: ChatSettings,
    stop: threading.Event,
) -> None:
    canary, metrics = CanaryShare(run.run_id, run.branch), RouterMetrics()
    signer, pseudonyms = Signer(product), Pseudonyms(product)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(closing(bind(settings.host, settings.port, "router.port")))
        decisions = stack.enter_context(LogReader(kafka, [Topic.GATE], client_id=f"{APPLICATION}-gate"))
        _observe(canary, await asyncio.to_thread(lambda: list(decisions.read_to_end())), metrics)
        recorder = await stack.enter_async_context(open_recorder(kafka, run, store, settings))
        replicas = await stack.enter_async_context(open_replicas(settings))
        router = Router(run, settings, signer, pseudonyms, canary, replicas, recorder, metrics)
        LOG.info("serving run %s on http://%s:%d", run.run_id, *listener.getsockname()[:2])

        async def load_chat() -> None:
            """Serve chat as soon as its format can be known."""
            uri = settings.tokenizer or await asyncio.to_thread(anchor_of_run, kafka, run, stop)
            if uri is not None:
                router.chat = await asyncio.to_thread(
                    ChatServer.load, uri, chat, settings.remembered_turns, settings.max_prompt_tokens
                )

        async def follow() -> None:
            await asyncio.gather(_follow(canary, decisions, metrics, stop, kafka.stall_timeout_s), load_chat())

        await _until_stopped(Application(router), settings, listener, follow(), stop)


async def _until_stopped(
    application: Application,
    settings: RouterSettings,
    listener: socket.socket,
    following: Coroutine[None, None, None],
    stop: threading.Event,
) -> None:
    """Serve and follow until one ends, then record what is in hand. Raises what ended them."""
    config = BoundedConfig(application.build(), settings.http, lifespan="off", grace_s=settings.grace_s)
    server = _Server(config)
    tasks = [asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(following)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        server.should_exit = True
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await application.drain()
    for result in ended:
        if isinstance(result, BaseException):
            raise result


async def _follow(
    canary: CanaryShare, decisions: LogReader, metrics: RouterMetrics, stop: threading.Event, stall_timeout_s: float
) -> None:
    with Liveness("the router", stall_timeout_s) as liveness:
        while not stop.is_set():
            liveness.beat("following the gate's decisions")
            _observe(canary, await asyncio.to_thread(decisions.poll, POLL_S), metrics)


def _observe(canary: CanaryShare, found: Iterable[ConsumedRecord], metrics: RouterMetrics) -> None:
    for located in found:
        objection = canary.observe(located.record) if isinstance(located.record, GateDecision) else located.error
        if objection:
            LOG.warning("decision at %s left out: %s", located.position, objection)
    metrics.share.set(canary.share)


class _Server(uvicorn.Server):
    """Leaves signals to the role."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
