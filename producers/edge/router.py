"""The router: answers product traffic with OpenAI's protocol, follows the gate's decisions, records its answers.

`POST /v1/completions`, `POST /v1/chat/completions` and `GET /v1/models` need an API key; `GET /healthz` and
`GET /metrics` do not. If a client disconnects, its request at the replica ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack, closing, nullcontext
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.producers.config import LogFailure, RouterSettings
from tidemill.producers.edge.completion_request import Refusal, RequestKind, parse
from tidemill.producers.edge.request_handler import APPLICATION, Recorder, RequestHandler, open_recorder
from tidemill.producers.edge.routing import CanaryShare, Replicas
from tidemill.producers.outbox import anchor_of_run
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import BadUserId, Pseudonyms, Signer
from tidemill.producers.sampling.completion import BadResponse, ReplicaUnavailable
from tidemill.producers.sampling.replicas import RequestRefused, open_replica_client
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
POLL_S = 0.2
CONSENT_HEADER = "x-tidemill-consent"
_CONSENT = {"yes": True, "no": False}


class RouterMetrics(CollectorRegistry):
    """The counts in Prometheus' format. Labels come from fixed sets, so that clients cannot create series."""

    def __init__(self) -> None:
        super().__init__()
        named: dict[str, Any] = {"namespace": "tidemill_router", "registry": self}
        timed = {**named, "buckets": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)}
        kinds = ["arm", "finish_reason"]
        self.responses = Counter("responses", "Responses started, by status.", ["status"], **named)
        self.interactions = Counter("interactions", "Interactions that the log acknowledged.", kinds, **named)
        self.unrecorded = Counter(
            "unrecorded", "Answers that the log did not acknowledge, by result.", ["end"], **named
        )
        self.retries = Counter("retries", "Requests that were sent to another replica.", **named)
        self.fallbacks = Counter("fallbacks", "Requests of the canary arm that the stable pool answered.", **named)
        self.in_flight = Gauge("in_flight", "Unfinished requests.", **named)
        self.share = Gauge("canary_share", "Share of the users in the canary arm.", **named)
        self.first_token = Histogram("first_token_seconds", "From the request to its first token.", ["arm"], **timed)
        self.acknowledgement = Histogram(
            "acknowledgement_seconds", "Wait for the log at the end of an answer.", **timed
        )


class Router:
    """The endpoints and unfinished requests of one run. A call answers one request of a `RequestKind`."""

    def __init__(
        self,
        run: RunSettings,
        settings: RouterSettings,
        product: ProductSettings,
        replicas: Replicas,
        recorder: Recorder,
    ) -> None:
        self.run, self.settings, self.replicas, self.recorder = run, settings, replicas, recorder
        self.signer, self.pseudonyms = Signer(product), Pseudonyms(product)
        self.canary, self.metrics = CanaryShare(run.run_id, run.branch), RouterMetrics()
        self.chat: ChatServer | None = None
        """None until the run's chat format is known."""
        self._places = asyncio.Semaphore(settings.max_concurrent_requests)
        self.unfinished: set[asyncio.Task[None]] = set()
        """Requests, and records of answers that wait for the log."""

    def build(self) -> Starlette:
        answers = [Route(kind.value, self, methods=["POST"]) for kind in RequestKind]
        others = [("/v1/models", self._models), ("/healthz", self._health), ("/metrics", self._metrics)]
        return Starlette(routes=[*answers, *(Route(path, endpoint) for path, endpoint in others)])

    def observe(self, decisions: Iterable[ConsumedRecord]) -> None:
        """Process the gate's decisions, in log order."""
        for located in decisions:
            made = located.record
            objection = self.canary.observe(made) if isinstance(made, GateDecision) else located.error
            if objection:
                LOG.warning("decision at %s ignored: %s", located.position, objection)
        self.metrics.share.set(self.canary.share)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; `drain` waits for it."""
        task = asyncio.create_task(work)
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return task

    async def drain(self) -> None:
        """Wait until every unfinished request has been recorded."""
        while self.unfinished:
            await asyncio.gather(*self.unfinished, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request completely; parts of the answer are sent as they arrive."""
        request = Request(scope, receive)
        try:
            self._check_key(request)
            if self._places.locked():
                raise Refusal(429, "too many unfinished requests: try again later", "rate_limit_error")
            async with self._places:
                with self.metrics.in_flight.track_inprogress():
                    exchange = await self._admit(request, send)
                    await self._run(exchange, receive)
            if exchange.started:
                await exchange.send("", more=False)
        except Refusal as refusal:
            self.metrics.responses.labels(str(refusal.status)).inc()
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
        except ClientDisconnect:
            LOG.info("a client disconnected before the end of its request")

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or self.settings.client_of(given.strip()) is None:
            raise Refusal(401, "no valid API key: send `Authorization: Bearer KEY`", "authentication_error")

    async def _admit(self, request: Request, send: Send) -> RequestHandler:
        arrived, settings = time.monotonic(), self.settings
        answer = request.headers.get(CONSENT_HEADER)
        if answer is not None and answer not in _CONSENT:
            raise Refusal.bad(f"the header {CONSENT_HEADER} is neither yes nor no", CONSENT_HEADER)
        body, most = bytearray(), settings.max_body_bytes
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise Refusal(413, f"the body is longer than {most} bytes", "invalid_request_error")
        ask = parse(RequestKind(request.scope["path"]), bytes(body))
        consent = settings.consent_default if answer is None else _CONSENT[answer]
        try:
            exchange = RequestHandler(self, ask, consent, send, arrived)
        except BadUserId as error:
            raise Refusal.bad(str(error), "user") from error
        if settings.on_log_failure is LogFailure.REFUSE and not self.recorder.may_try():
            raise Refusal.unavailable("answers cannot be recorded: try again later")
        return exchange

    async def _run(self, exchange: RequestHandler, receive: Receive) -> None:
        async def departure() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, gone = self.start(exchange.run()), asyncio.create_task(departure())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _models(self, request: Request) -> Response:
        try:
            self._check_key(request)
            return JSONResponse(await self.replicas.models())
        except Refusal as error:
            refusal = error
        except RequestRefused as error:
            refusal = Refusal.by_replica(error)
        except (ReplicaUnavailable, BadResponse) as error:
            LOG.warning("models: %s", error)
            refusal = Refusal.unavailable("no replica answers: try again later")
        return JSONResponse(refusal.body(), refusal.status)

    async def _health(self, _request: Request) -> Response:
        canary, failing = self.canary, self.recorder.failing
        body = {"log": "failing" if failing else "ok", "canary": {"version": canary.version, "share": canary.share}}
        # 503 only while requests are refused: the log is tried again by requests, which a load balancer must send.
        return JSONResponse(body, 503 if self.recorder.rests else 200)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.metrics), media_type="text/plain; version=0.0.4")


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    store: StoreSettings,
    product: ProductSettings,
    settings: RouterSettings,
    chat: ChatSettings,
    stop: threading.Event | None = None,
) -> None:
    """Serve until `stop` is set; without `stop`, until SIGTERM or SIGINT. Then record the unfinished requests.

    Chat is served as soon as the run has an anchor, because it needs its chat template; completions are served at once.

    Raises KeysMissing; LookupError for a missing topic; OSError for an address that cannot be bound, OSError or
    ValueError for an unreadable tokenizer.
    """
    settings.require_clients()
    product.require_keys()
    stop = stop or stop_on_signals()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(closing(bind(settings.host, settings.port, "router.port")))
            decisions = stack.enter_context(LogReader(kafka, [Topic.GATE], client_id=f"{APPLICATION}-gate"))
            recorder = await stack.enter_async_context(open_recorder(kafka, run, store, settings))
            replicas = Replicas(await stack.enter_async_context(open_replica_client(settings)), settings)
            router = Router(run, settings, product, replicas, recorder)
            router.observe(await asyncio.to_thread(lambda: list(decisions.read_to_end())))
            config = BoundedConfig(router.build(), settings.http, lifespan="off", grace_s=settings.grace_s)
            server = uvicorn.Server(config)
            server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # the role handles them
            LOG.info("serving run %s on http://%s:%d", run.run_id, *listener.getsockname()[:2])

            async def follow() -> None:
                with Liveness("the router", kafka.stall_timeout_s) as liveness:
                    while not stop.is_set():
                        liveness.beat("following the gate's decisions")
                        router.observe(await asyncio.to_thread(decisions.poll, POLL_S))

            async def load_chat() -> None:
                try:
                    uri = settings.tokenizer or await asyncio.to_thread(anchor_of_run, kafka, run, stop)
                    if uri is not None:
                        router.chat = await asyncio.to_thread(
                            ChatServer.load, uri, chat, settings.remembered_turns, settings.max_prompt_tokens
                        )
                except BaseException:  # of any type: it ends the router
                    stop.set()
                    raise

            tasks = [asyncio.create_task(each) for each in (server.serve(sockets=[listener]), follow(), load_chat())]
            # Serve and follow until one ends; then record the unfinished requests, and raise the error that ended them
            try:
                await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.set()
                server.should_exit = True
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                await router.drain()
            for result in ended:
                if isinstance(result, BaseException):
                    raise result

    asyncio.run(serve())
