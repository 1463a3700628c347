"""The router's way to the replicas: which one is asked, and its answer as a stream of JSON documents.

What holds: of a pool the least loaded replica that is not being left alone after a failure is asked; closing an answer
before its end closes the connection, by which the replica gives the request up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tidemill.producers.router.ask import Refusal
from tidemill.producers.router.config import RouterSettings
from tidemill.producers.sampling.completion import BadResponse
from tidemill.producers.sampling.replicas import (
    COMPLETIONS_PATH,
    OVERLOADED,
    REPLICA_HEADER,
    STATUS_PATH,
    ReplicaIdentity,
    ReplicaPool,
    ReplicaUnavailable,
    connections,
)
from tidemill.schemas.records import Arm

LARGEST_EVENT = 64 * 2**20
"""Bytes of one event or body; a longer one is refused before it fills the memory."""
MODELS_PATH = "/v1/models"
_GAVE_UP = ("abort", "error")


class NoPlace(ReplicaUnavailable):
    """Every replica of a pool is being left alone after a failure."""


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """One answer as it comes: the whole body as one document, or a document a chunk."""

    arm: Arm
    identity: ReplicaIdentity
    documents: AsyncIterator[dict[str, Any]]


class Replicas:
    """The replicas of both pools over shared connections. Open with `open_replicas`."""

    def __init__(self, session: aiohttp.ClientSession, settings: RouterSettings) -> None:
        self._session = session
        self._identities: dict[str, ReplicaIdentity] = {}
        self._pools = {
            arm: ReplicaPool(addresses, settings.backoff_s, settings.backoff_limit_s)
            for arm, addresses in ((Arm.STABLE, settings.pools.stable), (Arm.CANARY, settings.pools.canary))
        }

    @asynccontextmanager
    async def place(self, arm: Arm, wait: bool) -> AsyncIterator[str]:
        """A place on a replica of a pool. Raises NoPlace when all are left alone, unless it is to `wait`."""
        pool, clock = self._pools[arm], asyncio.get_running_loop().time
        while (address := pool.pick(clock())) is None:
            if not wait:
                raise NoPlace(f"no replica of the {arm} pool answers")
            await asyncio.sleep(max(0.001, pool.next_wake() - clock()))
        try:
            yield address
        except ReplicaUnavailable:
            pool.failed(address, clock())
            raise
        else:
            pool.succeeded(address)
        finally:
            pool.release(address)

    @asynccontextmanager
    async def ask(self, address: str, arm: Arm, body: bytes, *, stream: bool) -> AsyncIterator[ReplicaAnswer]:
        """Have a request to `/v1/completions` answered. The answer has at least one document.

        Raises:
            ReplicaUnavailable: no connection, an error of the replica's, or an answer that is cut short.
            Refusal: the replica says that the request is wrong.
            BadResponse: the answer is empty, or not JSON.
        """
        headers = {"content-type": "application/json"}
        try:
            identity = await self._identity(address)
            async with self._session.post(address + COMPLETIONS_PATH, data=body, headers=headers) as response:
                await _check_status(response, address)
                if response.headers.get(REPLICA_HEADER, identity.replica_id) != identity.replica_id:
                    identity = await self._identity(address, anew=True)
                documents = _events(response) if stream else _whole(response)
                try:
                    first = await anext(documents)
                except StopAsyncIteration as error:
                    raise BadResponse("the answer is empty") from error
                yield ReplicaAnswer(arm, identity, _rejoined(first, documents))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaUnavailable(f"{address}: {type(error).__name__}: {error}") from error

    async def models(self) -> dict[str, Any]:
        """What the stable pool serves, as OpenAI lists models. Raises ReplicaUnavailable."""
        async with self.place(Arm.STABLE, wait=False) as address:
            try:
                async with self._session.get(address + MODELS_PATH) as response:
                    await _check_status(response, address)
                    listed = await response.json()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise ReplicaUnavailable(f"{address}: {type(error).__name__}: {error}") from error
        kept = ("id", "object", "created", "owned_by", "max_model_len")
        return {"object": "list", "data": [{name: model.get(name) for name in kept} for model in listed["data"]]}

    def has_canary(self) -> bool:
        """Whether there is a replica in the canary pool at all."""
        return not self._pools[Arm.CANARY].is_empty

    async def _identity(self, address: str, anew: bool = False) -> ReplicaIdentity:
        if anew or address not in self._identities:
            async with self._session.get(address + STATUS_PATH) as response:
                await _check_status(response, address)
                try:
                    status = await response.json()
                    self._identities[address] = ReplicaIdentity(str(status["replica_id"]), str(status["region"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise BadResponse(f"{address}{STATUS_PATH} is not a replica's status") from error
        return self._identities[address]


@asynccontextmanager
async def open_replicas(settings: RouterSettings) -> AsyncIterator[Replicas]:
    """The replicas, whose connections are closed at the end."""
    async with connections(settings.request_timeout_s, settings.connect_timeout_s) as session:
        yield Replicas(session, settings)


async def _rejoined(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    yield first
    async for document in rest:
        yield document


async def _check_status(response: aiohttp.ClientResponse, address: str) -> None:
    if response.status == 200:
        return
    text = (await response.content.read(4000)).decode("utf-8", "replace")
    if response.status >= 500 or response.status == OVERLOADED:
        raise ReplicaUnavailable(f"{address}: HTTP {response.status}")
    raise Refusal(response.status, *_said(text))


def _said(text: str) -> tuple[str, str, str | None]:
    """Message, type and field of a replica's refusal."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"]), str(error.get("type") or "invalid_request_error"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "the replica refused the request", "invalid_request_error", None


async def _whole(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > LARGEST_EVENT:
            raise BadResponse(f"the answer is longer than {LARGEST_EVENT} bytes")
    yield _document(bytes(body))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The documents of a stream of server-sent events, up to its end mark. Raises ReplicaUnavailable without one."""
    waiting, ended = b"", False
    async for piece in response.content.iter_any():
        *events, waiting = (waiting + piece).split(b"\n\n")
        for event in events:
            # What follows the end mark is read too: only a connection that was read to its end is used again.
            ended = ended or event == b"data: [DONE]"
            if not ended and event.startswith(b"data: "):
                yield _document(event[6:])
        if len(waiting) > LARGEST_EVENT:
            raise BadResponse(f"an event is longer than {LARGEST_EVENT} bytes")
    if not ended:
        raise ReplicaUnavailable("the stream ended without its end mark")


def _document(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise BadResponse("the answer is not JSON") from error
    if not isinstance(document, dict):
        raise BadResponse("the answer is not a JSON object")
    choices = document.get("choices")
    ended = isinstance(choices, list) and any(
        isinstance(one, dict) and one.get("finish_reason") in _GAVE_UP for one in choices
    )
    if "error" in document or ended:
        raise ReplicaUnavailable("the engine gave the request up")
    return document
