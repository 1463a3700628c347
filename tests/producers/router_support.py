"""Shared by the router's tests: a router over fake replicas with configurable answers, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from tokenizers import Tokenizer

from tests.producers.conftest import END, byte_tokenizer
from tests.producers.feedback_support import DEADLINE_S
from tests.records import build
from tidemill.producers.config import PoolAddresses, RouterSettings
from tidemill.producers.edge.request_handler import Recorder
from tidemill.producers.edge.router import Router
from tidemill.producers.edge.routing import Replicas
from tidemill.producers.product.settings import ProductSettings, key_hash
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.chat.format import ChatFormat, chatml, special_texts
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import ChatSettings, RunSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.records import GateDecision, GateVerdict, Interaction, Segment

KEY = "a-key-that-is-long-enough"
RUN = RunSettings(run_id="r")
PRODUCT = ProductSettings.with_random_keys()
BYTES = byte_tokenizer()
PROMPT = [7, 8, 9]
TOKENS = BYTES.encode("abc").ids
Told = Callable[["FakeReplica", web.Request, dict], Awaitable[web.StreamResponse]]


def chat_format(tokenizer: Tokenizer = BYTES, source: str | None = None, **settings: Any) -> ChatFormat:
    """Return the chat format of a tokenizer, with the built-in template unless `source` is given."""
    template = ChatTemplate(source or chatml(), {}, special_texts(tokenizer), ChatSettings(**settings))
    return ChatFormat(tokenizer, template, [tokenizer.token_to_id(END)])


def decision(verdict: str, version: int | None = 1, share: float | None = None) -> GateDecision:
    """Return a gate decision of the run's main branch."""
    numbers = {} if share is None else {"share": share}
    return build(
        GateDecision, run_id="r", verdict=GateVerdict(verdict), version=version, decided_by="gate", numbers=numbers
    )


def interaction_of(*segments: Segment) -> Interaction:
    """Return a served answer with these segments."""
    return build(Interaction, interaction_id="i1", run_id="r", segments=list(segments), version_min=-1, version_max=-1,
                 replica_id="r1", region="here", first_token_ms=1.0, latency_ms=2.0, served_at=3,
                 incarnation="life")  # fmt: skip


class MemoryOutbox:
    """Keeps written records; `hold` makes a write wait, `failing` makes it fail."""

    def __init__(self) -> None:
        self.written: list[Interaction] = []
        self.failing = False
        self.hold: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def write(self, key: str, record: Interaction) -> None:
        """Do as `Outbox.write`."""
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.failing:
            raise DeliveryError("no broker")
        assert key == record.interaction_id
        self.written.append(record)


@dataclass
class FakeReplica:
    """Answers with `TOKENS`, one per chunk, in vLLM's format with Tidemill's additions."""

    replica_id: str = "r1"
    address: str = ""
    requests: list[dict] = field(default_factory=list)
    told: Told | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a test clears it. While it is clear, no chunk after the second is sent."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go_on.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        if self.told is not None:
            return await self.told(self, request, body)
        return await self.stream(request, body) if body["stream"] else self.whole(body)

    def whole(self, body: dict) -> web.Response:
        choice = {"index": 0, "text": "abc", "logprobs": logprobs_of(TOKENS, body), "token_ids": TOKENS,
                  "finish_reason": "stop", "weight_versions": [[4, 0, 2], [5, 2, 3]], "weight_incarnation": "life",
                  "prompt_token_ids": prompt_of(body)}  # fmt: skip
        return self.json({"id": "x", "choices": [choice]})

    def json(self, body: Any, status: int = 200) -> web.Response:
        return web.json_response(body, status=status, headers={"x-tidemill-replica": self.replica_id})

    async def stream(self, request: web.Request, body: dict, ends: bool = True) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-tidemill-replica": self.replica_id})
        await response.prepare(request)
        try:
            for place, chunk in enumerate(chunks(body)):
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
                if place == 1:
                    await self.go_on.wait()
                    if not ends:
                        request.transport.abort()
                        return response
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.aborted.set()
            raise
        return response

    async def status(self, _request: web.Request) -> web.Response:
        return self.json({"replica_id": self.replica_id, "region": "here"})

    async def models(self, _request: web.Request) -> web.Response:
        return self.json({"data": [{"id": "tidemill", "object": "model", "root": "/secret/path"}]})


def prompt_of(body: dict) -> list[int]:
    """Return the token ids of a request's prompt: `PROMPT` for any text."""
    return body["prompt"] if isinstance(body["prompt"], list) else PROMPT


def logprobs_of(tokens: list[int], body: dict) -> dict:
    """Return logprobs in vLLM's format; the second most likely token is the byte before the sampled one."""
    likely = [{f"token_id:{token}": -0.5, f"token_id:{token - 1}": -1.5} for token in tokens]
    told = {"token_logprobs": [-0.5] * len(tokens), "tokens": [f"token_id:{token}" for token in tokens]}
    return {**told, "top_logprobs": likely} if body["logprobs"] else told


def chunks(body: dict) -> list[dict]:
    """Return the documents of a streamed answer: version 4 samples two tokens, version 5 the last."""
    spans = [[[4, 0, 1]], None, [[4, 0, 2], [5, 2, 3]]]
    found = []
    for place, token in enumerate(TOKENS):
        choice: dict = {"index": 0, "text": "abc"[place], "logprobs": logprobs_of([token], body), "token_ids": [token],
                        "finish_reason": "stop" if place == 2 else None}  # fmt: skip
        if place == 0:
            choice["prompt_token_ids"] = prompt_of(body)
        if spans[place]:
            choice |= {"weight_versions": spans[place], "weight_incarnation": "life"}
        found.append({"id": "x", "choices": [choice]})
    return found


def saying(turns: Sequence[Sequence[int]], size: int = 1, last: int | None = None) -> Told:
    """Return a replica that answers with these turns, streamed in chunks of `size` tokens.

    A turn ends with "length" if it does not end with the token `last`.
    """

    async def told(replica: FakeReplica, _request: web.Request, body: dict) -> web.StreamResponse:
        ids = list(turns[(len(replica.requests) - 1) % len(turns)])
        finish = "stop" if last in (None, ids[-1]) else "length"

        def document(start: int, end: int) -> dict:
            choice = {"index": 0, "text": "", "token_ids": ids[start:end], "prompt_token_ids": body["prompt"],
                      "logprobs": {"token_logprobs": [-0.5] * (end - start)}, "weight_versions": [[0, 0, end]],
                      "finish_reason": finish if end == len(ids) else None}  # fmt: skip
            return {"id": "cmpl-7", "created": 5, "model": "tidemill", "choices": [choice]}

        if not body["stream"]:
            return replica.json(document(0, len(ids)))
        documents = [document(start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
        if body.get("stream_options"):
            used = {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
            documents.append({**documents[0], "choices": [], "usage": used})
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in documents)
        return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")

    return told


@dataclass
class Rig:
    """A running router, its log and its replicas."""

    outbox: MemoryOutbox
    router: Router
    session: aiohttp.ClientSession
    replicas: list[FakeReplica]

    def post(self, body: dict | bytes, path: str = "/v1/completions", **headers: str) -> Any:
        """Send a request of the product; the names of `headers` have underscores for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(path, data=data, headers={"authorization": f"Bearer {KEY}", **named})

    async def asked(self, body: dict | bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """Return the status and JSON of an answer."""
        async with self.post(body, path, **headers) as response:
            return response.status, await response.json()

    async def streamed(self, body: dict, path: str = "/v1/completions", **headers: str) -> list[Any]:
        """Return the documents of a streamed answer, with its end mark."""
        async with self.post({**body, "stream": True}, path, **headers) as response:
            assert response.status == 200, await response.text()
            return events(await response.text())


def events(text: str) -> list[Any]:
    """Return the documents of server-sent events, and "[DONE]" as text."""
    found = [one.removeprefix("data: ") for one in text.split("\n\n") if one]
    return [json.loads(one) if one.startswith("{") else one for one in found]


@asynccontextmanager
async def rig(
    stable: int = 1, canary: int = 0, told: Told | None = None, chat: ChatFormat | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """Run a router over `stable` and `canary` replicas, with the given chat format or ChatML over bytes."""
    async with AsyncExitStack() as stack:
        replicas = [FakeReplica(f"{'s' if n < stable else 'c'}{n}", told=told) for n in range(stable + canary)]
        for replica in replicas:
            await stack.enter_async_context(served(replica))
        addresses = [replica.address for replica in replicas]
        chosen = RouterSettings(**{
            "api_keys": {"web": key_hash(KEY)}, "backoff_s": 0.05, "log_rest_s": 0.05,
            "pools": PoolAddresses(stable=addresses[:stable], canary=addresses[stable:]), **settings,
        })  # fmt: skip
        outbox = MemoryOutbox()
        replicas_of = Replicas(await stack.enter_async_context(open_replica_client(chosen)), chosen)
        router = Router(RUN, chosen, PRODUCT, replicas_of, Recorder(outbox, DEADLINE_S, chosen.log_rest_s))
        router.chat = ChatServer(chat or chat_format(), chosen.remembered_turns, chosen.max_prompt_tokens)
        base = await stack.enter_async_context(_routed(router, chosen))
        session = await stack.enter_async_context(aiohttp.ClientSession(base))
        yield Rig(outbox, router, session, replicas)


@asynccontextmanager
async def served(replica: FakeReplica) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_post("/v1/completions", replica.answer)
    app.router.add_get("/tidemill/status", replica.status)
    app.router.add_get("/v1/models", replica.models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    replica.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _routed(router: Router, settings: RouterSettings) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0, "router.port")
    listener.listen()
    config = BoundedConfig(router.build(), settings.http, lifespan="off", grace_s=settings.grace_s)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        await router.drain()
        listener.close()
