"""The router's HTTP side: who may ask, how much, and where the answers go.

`POST /v1/completions`, `POST /v1/chat/completions` and `GET /v1/models` speak OpenAI's protocol and need an API key;
`GET /healthz` and `GET /metrics` do not. A client that goes away ends its request at the replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.producers.product.settings import ApiKeys
from tidemill.producers.product.signing import BadUserId
from tidemill.producers.router.ask import Refusal, RequestKind, bad_request, parse, unavailable
from tidemill.producers.router.config import LogFailure
from tidemill.producers.router.exchange import Client, Exchange, Router
from tidemill.producers.sampling.completion import BadResponse
from tidemill.producers.sampling.replicas import ReplicaUnavailable

LOG = logging.getLogger(__name__)
CONSENT_HEADER = "x-tidemill-consent"
_CONSENT = {"yes": True, "no": False}


def check_key(keys: ApiKeys, authorization: str) -> None:
    """Raise Refusal (401) unless an `Authorization` header holds a known API key."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or keys.name_of(given.strip()) is None:
        raise Refusal(401, "no valid API key: send `Authorization: Bearer KEY`", "authentication_error")


class Application:
    """The endpoints over one router, and the requests in hand."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._keys = ApiKeys(router.settings.api_keys)
        self._in_hand = 0
        self._running: set[asyncio.Task[None]] = set()

    def build(self) -> Starlette:
        """The ASGI application."""
        answers = [Route(kind.value, _Answering(self, kind), methods=["POST"]) for kind in RequestKind]
        return Starlette(
            routes=[
                *answers,
                Route("/v1/models", self._models),
                Route("/healthz", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def drain(self) -> None:
        """Wait until every request in hand has been recorded."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def answer(self, kind: RequestKind, scope: Scope, receive: Receive, send: Send) -> None:
        """One request from its first byte to its last."""
        client, request = Client(self._router.metrics, send), Request(scope, receive)
        try:
            check_key(self._keys, request.headers.get("authorization", ""))
            with self._place():
                await self._run(await self._admit(kind, request, client), receive)
            if client.begun:
                await client.send("", more=False)
        except Refusal as refusal:
            self._router.metrics.responses.labels(str(refusal.status)).inc()
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
        except ClientDisconnect:
            LOG.info("a client went away before its request was whole")

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._in_hand >= self._router.settings.max_concurrent_requests:
            raise Refusal(429, "too many requests in hand: try again later", "rate_limit_error")
        self._in_hand += 1
        try:
            with self._router.metrics.in_flight.track_inprogress():
                yield
        finally:
            self._in_hand -= 1

    async def _admit(self, kind: RequestKind, request: Request, client: Client) -> Exchange:
        arrived, router = time.monotonic(), self._router
        consent = _consent(request, router.settings.consent_default)
        body, most = bytearray(), router.settings.max_body_bytes
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise Refusal(413, f"the body is longer than {most} bytes", "invalid_request_error")
        ask = parse(kind, bytes(body))
        try:
            exchange = Exchange(router, ask, consent, client, arrived)
        except BadUserId as error:
            raise bad_request(str(error), "user") from error
        if router.settings.on_log_failure is LogFailure.REFUSE and not router.recorder.may_try():
            raise unavailable("answers cannot be recorded: try again later")
        return exchange

    async def _run(self, exchange: Exchange, receive: Receive) -> None:
        work = asyncio.create_task(exchange.run())
        gone = asyncio.create_task(_departure(receive))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
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
            check_key(self._keys, request.headers.get("authorization", ""))
            return JSONResponse(await self._router.replicas.models())
        except Refusal as refusal:
            return JSONResponse(refusal.body(), refusal.status)
        except (ReplicaUnavailable, BadResponse) as error:
            LOG.warning("models: %s", error)
            nobody = unavailable("no replica answers: try again later")
            return JSONResponse(nobody.body(), nobody.status)

    async def _health(self, _request: Request) -> Response:
        canary, failing = self._router.canary, self._router.recorder.failing
        said = {"log": "failing" if failing else "ok", "canary": {"version": canary.version, "share": canary.share}}
        return JSONResponse(said, 503 if failing else 200)

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(self._router.metrics.text(), media_type="text/plain; version=0.0.4")


@dataclass(frozen=True, slots=True)
class _Answering:
    """An endpoint as an ASGI application: an answer's parts are sent as they come."""

    application: Application
    kind: RequestKind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.application.answer(self.kind, scope, receive, send)


def _consent(request: Request, default: bool) -> bool:
    said = request.headers.get(CONSENT_HEADER)
    if said is None:
        return default
    if said not in _CONSENT:
        raise bad_request(f"the header {CONSENT_HEADER} is neither yes nor no", CONSENT_HEADER)
    return _CONSENT[said]


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
