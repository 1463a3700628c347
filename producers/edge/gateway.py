r"""The feedback gateway: the functions of the feedback SDK over HTTP, for backends in any language.

Make the keys and start it:

    export KEY=$(openssl rand -hex 32)
    export TIDEMILL_PRODUCT__SIGNING_KEYS="[\"$(openssl rand -hex 32)\"]"
    export TIDEMILL_PRODUCT__PSEUDONYM_KEY=$(openssl rand -hex 32)
    export TIDEMILL_GATEWAY__API_KEYS="{\"shop\": \"$(printf %s "$KEY" | sha256sum | cut -d ' ' -f 1)\"}"
    tidemill gateway --bootstrap kafka:9092 --port 8090

Send an event; `TOKEN` is the interaction token that the router, started with the same keys, returned with an answer:

    curl --fail-with-body http://127.0.0.1:8090/v1/feedback \
      -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \
      -d '{"interaction": "'"$TOKEN"'", "kind": "thumb", "value": 1, "user": "ann@example.com", "event_id": "click-1"}'

`/docs` shows the rest: batches, withdrawals, and the meaning of each refusal.

An event answered with 202 is in the log; an event answered with 503 may be, and if it is sent again it counts once. To
stop, the server accepts no new requests, finishes those in progress, and flushes what the log has not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge import events
from tidemill.producers.feedback.event import FeedbackMaker, FeedbackNotDelivered, LogUnreachable
from tidemill.producers.feedback.producer import FLUSH_S
from tidemill.producers.feedback.queue import FeedbackQueue
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig, ThreadServer
from tidemill.schemas.log.client_settings import CREATE_TOPICS
from tidemill.schemas.shutdown import stop_on_signals

log = logging.getLogger(__name__)

KEPT_S = 1.0
TIMEOUT_S = 2.0
GRACE_S = 5
BACKLOG = 512
OTHER_ROUTE = "other"
DESCRIPTION = """Takes the signals of a product's users about the answers that they were served.

Each event names the answer, by the interaction token that the router returned with it, and its user. Give `event_id` or
`observed_at`: an event sent twice then counts once, so that a request answered with 429 or 503, or not at all, may
be sent again."""


def _described(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": events.ProblemOut, "description": text} for status, text in descriptions.items()}


REFUSALS = _described(
    {
        400: "The body is not JSON.",
        401: "The API key is not known.",
        408: "The body arrived too slowly.",
        413: "The body is too long.",
        415: "The body is not declared as JSON.",
        422: "The event is not valid; `detail` names the field.",
        429: "Too many events; send them again after `Retry-After` seconds.",
        503: "The log did not acknowledge the event in time; send it again.",
    }
)
NOT_SERVED = _described({403: "The interaction was not served to this user."})
SOME_REFUSED: dict[int | str, dict[str, Any]] = {
    207: {"model": events.BatchOut, "description": "Some events were refused: each result has the reason."}
}


class HealthOut(BaseModel):
    """Whether the log can be reached."""

    status: str = Field(examples=["ok"])
    detail: str = Field(examples=["the log answers"])


class Health:
    """Whether the log can be reached, checked with a broker at most once in `KEPT_S`. Used from one event loop."""

    def __init__(self, queue: FeedbackQueue) -> None:
        self._queue = queue
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._wrong = ""

    async def wrong(self) -> str:
        """Return the fault of the log; an empty string if it answers and has the topic."""
        async with self._asking:
            if time.monotonic() - self._asked_at > KEPT_S:
                try:
                    await asyncio.to_thread(self._queue.ask_partitions, TIMEOUT_S)
                    self._wrong = ""
                except LogUnreachable:
                    self._wrong = "no broker of the log answers"
                except LookupError:
                    self._wrong = f"the log has no feedback topic: {CREATE_TOPICS}"
                self._asked_at = time.monotonic()
            return self._wrong


_bearer = HTTPBearer(auto_error=False, description="An API key of the gateway.")
_routes = APIRouter()


def _body_of(model: str, **examples: object) -> dict[str, Any]:
    named = {name.replace("_", " "): {"value": value} for name, value in examples.items()}
    content = {"schema": {"$ref": f"#/components/schemas/{model}"}, "examples": named}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _caller(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str:
    settings: GatewaySettings = request.app.state.settings
    name = settings.client_of(given.credentials if given else "")
    if name is None:
        raise events.Problem(401, "send a known API key: Authorization: Bearer KEY", close=True)
    return name


Caller = Annotated[str, Depends(_caller)]


async def _tree(request: Request, caller: str) -> Any:  # noqa: ANN401 - a JSON tree
    settings: GatewaySettings = request.app.state.settings
    intake: events.EventIntake = request.app.state.intake
    body = await events.read_body(request, settings.max_body_bytes)
    intake.charge(caller, 1)
    return events.parse_json(body)


@_routes.post(
    "/v1/feedback",
    status_code=202,
    summary="Send one event",
    responses=REFUSALS | NOT_SERVED,
    openapi_extra=_body_of("FeedbackIn", a_thumb_up=events.THUMB_EXAMPLE, a_thumb_taken_back=events.WITHDRAWAL_EXAMPLE),
)
async def one(request: Request, caller: Caller) -> events.AcceptedOut:
    """Take one event and answer after the log has it."""
    intake: events.EventIntake = request.app.state.intake
    result = (await intake.take([await _tree(request, caller)], caller))[0]
    if result.status == 202 and result.event_id is not None:
        return events.AcceptedOut(event_id=result.event_id)
    raise events.Problem(result.status, result.detail or "", retry_after_s=result.retry_after_s)


@_routes.post(
    "/v1/feedback/batch",
    status_code=202,
    summary="Send several events",
    response_model_exclude_none=True,
    responses=REFUSALS | SOME_REFUSED,
    openapi_extra=_body_of("BatchIn", two_events={"events": [events.THUMB_EXAMPLE, events.WITHDRAWAL_EXAMPLE]}),
)
async def batch(request: Request, response: Response, caller: Caller) -> events.BatchOut:
    """Accept or refuse each event on its own, and answer after the log has the accepted ones."""
    intake: events.EventIntake = request.app.state.intake
    sent, most = await _tree(request, caller), request.app.state.settings.max_batch
    sent = events.checked(events.BatchIn, sent).events
    if len(sent) > most:
        raise events.Problem(422, f"events: {len(sent)} of them, and a batch has at most {most}")
    intake.charge(caller, len(sent) - 1)
    results = await intake.take(sent, caller)
    accepted = sum(result.status == 202 for result in results)
    if accepted < len(results):
        response.status_code = 503 if all(result.status == 503 for result in results) else 207
    if response.status_code == 503:
        response.headers["Retry-After"] = str(events.RETRY_AFTER_S)
    return events.BatchOut(accepted=accepted, results=results)


@_routes.get("/healthz", summary="Whether the log can be reached", responses={503: {"model": HealthOut}})
async def healthz(request: Request, response: Response) -> HealthOut:
    """Return 200 if the log answers and has the topic, otherwise 503."""
    health: Health = request.app.state.health
    if wrong := await health.wrong():
        response.status_code = 503
    return HealthOut(status="unavailable" if wrong else "ok", detail=wrong or "the log answers")


@_routes.get("/metrics", summary="Counts in Prometheus' format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return counts of requests and events, seconds until the log's acknowledgement, and events that wait for it."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)


def counted_requests(app: ASGIApp) -> ASGIApp:
    """Return an ASGI application that counts each answer of `app`."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's own path, not the path of the request, which the client chooses.
                route = getattr(scope.get("route"), "path", OTHER_ROUTE)
                metrics: events.GatewayMetrics = scope["app"].state.metrics
                metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, counted if scope["type"] == "http" else send)

    return counting


def application(kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings) -> FastAPI:
    """Return the gateway as an ASGI application; its connection to the log lasts as long as its lifespan.

    Raises KeysMissing without the product's keys or API keys, ValueError if no brokers are configured.
    """
    settings.require_clients()
    kafka.address()
    maker = FeedbackMaker(product)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The client is told to send unacknowledged events again after this time, so they are not kept for longer.
        kept_s = settings.acknowledge_timeout_s
        queue = FeedbackQueue(kafka, "gateway", settings.max_queued, settings.linger_ms, kept_s)
        app.state.metrics = events.GatewayMetrics(lambda: queue.counts.pending)
        app.state.health = Health(queue)
        app.state.intake = events.EventIntake(maker, queue, settings, app.state.metrics)
        yield
        with suppress(FeedbackNotDelivered):  # each failure was answered
            await asyncio.to_thread(queue.close, FLUSH_S)

    app = FastAPI(
        title="Tidemill feedback gateway",
        version="1",
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
        lifespan=lifespan,
    )

    def openapi() -> dict[str, Any]:
        """Return FastAPI's schema, plus the request bodies, which FastAPI does not parse here."""
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema(
                [(events.FeedbackIn, "validation"), (events.BatchIn, "validation")],
                ref_template="#/components/schemas/{model}",
            )
            schema["components"]["schemas"].update(bodies["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    app.state.settings = settings
    app.include_router(_routes)
    app.add_middleware(counted_requests)
    for kind in (events.Problem, HTTPException, Exception):
        app.add_exception_handler(kind, events.answer)
    return app


def gateway_server(kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings) -> ThreadServer:
    """Return the gateway, to be entered. Raises as `application`; OSError if the address cannot be bound."""
    app = application(kafka, product, settings)
    listener = bind(settings.host, settings.port, "gateway.port", BACKLOG)
    grace_s = settings.acknowledge_timeout_s + GRACE_S
    return ThreadServer("gateway-http", listener, BoundedConfig(app, settings.http, lifespan="on", grace_s=grace_s))


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings, stop: threading.Event | None = None
) -> None:
    """Take feedback until `stop` is set (without `stop`: until SIGTERM or SIGINT); then finish the answers, and flush.

    Raises as `gateway_server`; RuntimeError if the server ended on its own: its log has the reason.
    """
    stop = stop or stop_on_signals()
    with gateway_server(kafka, product, settings) as server:
        log.info("gateway at %s (API page /docs), for %s", server.url, ", ".join(sorted(settings.api_keys)))
        server.watch(stop)
