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

from tidemill.producers.product.api_keys import require_some
from tidemill.producers.product.pseudonym import Pseudonyms
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Signer
from tidemill.producers.router.app import Application
from tidemill.producers.router.canary import CanaryShare
from tidemill.producers.router.config import RouterSettings
from tidemill.producers.router.exchange import Router
from tidemill.producers.router.metrics import Metrics
from tidemill.producers.router.recorder import APPLICATION, open_recorder
from tidemill.producers.router.replicas import open_replicas
from tidemill.schemas.address import bind
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.liveness import Liveness
from tidemill.schemas.located import Located
from tidemill.schemas.reader import LogReader
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
    stop: threading.Event | None = None,
) -> None:
    """Serve until `stop` is set; without one, until SIGTERM or SIGINT.

    Raises:
        KeysMissing: the product's keys are not configured.
        ApiKeysMissing: there is no API key.
        PortTaken: the address cannot be bound.
        LookupError: a topic does not exist.
    """
    require_some(router.api_keys, "router")
    asyncio.run(_serve(kafka, run, store, product, router, stop))


async def _serve(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    product: ProductSettings,
    settings: RouterSettings,
    stop: threading.Event | None,
) -> None:
    stop = stop or stop_on_signals()
    canary, metrics = CanaryShare(run.run_id, run.branch), Metrics()
    signer, pseudonyms = Signer(product), Pseudonyms(product)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(closing(bind(settings.host, settings.port, "router.port")))
        decisions = stack.enter_context(LogReader(kafka, [Topic.GATE], client_id=f"{APPLICATION}-gate"))
        _observe(canary, await asyncio.to_thread(lambda: list(decisions.read_to_end())), metrics)
        recorder = await stack.enter_async_context(open_recorder(kafka, run, store, settings))
        replicas = await stack.enter_async_context(open_replicas(settings))
        router = Router(run, settings, signer, pseudonyms, canary, replicas, recorder, metrics)
        LOG.info("serving run %s on http://%s:%d", run.run_id, *listener.getsockname()[:2])
        following = _follow(canary, decisions, metrics, stop, kafka.stall_timeout_s)
        await _until_stopped(Application(router), listener, following, stop)


async def _until_stopped(
    application: Application, listener: socket.socket, following: Coroutine[None, None, None], stop: threading.Event
) -> None:
    """Serve and follow until one ends, then record what is in hand. Raises what ended them."""
    server = _Server(uvicorn.Config(application.build(), log_level="warning", access_log=False, lifespan="off",
                                    timeout_graceful_shutdown=round(application.grace_s)))  # fmt: skip
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
    canary: CanaryShare, decisions: LogReader, metrics: Metrics, stop: threading.Event, stall_timeout_s: float
) -> None:
    with Liveness("the router", stall_timeout_s) as liveness:
        while not stop.is_set():
            liveness.beat("following the gate's decisions")
            _observe(canary, await asyncio.to_thread(decisions.poll, POLL_S), metrics)


def _observe(canary: CanaryShare, found: Iterable[Located], metrics: Metrics) -> None:
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
