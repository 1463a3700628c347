"""A fake replica over HTTP, with configurable answers, and shared fixtures. The replica samples nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from tests.producers.feedback_support import DEADLINE_S, StallingLog, stalling_log
from tests.producers.rollout import agents
from tidemill.producers import AsyncFeedbackProducer, FeedbackProducer
from tidemill.schemas.chat.format import ChatFormat, chatml, load_chat_format
from tidemill.schemas.config import CHATML_TOKENS, ChatSettings

END = CHATML_TOKENS[-1]


@pytest.fixture
def anyio_backend() -> str:
    """The backend of `async def` tests."""
    return "asyncio"


Answer = Callable[[dict, int], Awaitable[web.StreamResponse]]


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and one per special token of ChatML."""
    return agents.byte_tokenizer(CHATML_TOKENS)


def solution(context: str) -> str:
    """Return the correct next turn of a ledger episode."""
    prompt, *results = context.split("<|im_start|>tool\n")
    entries = [(kind, int(amount)) for kind, amount in re.findall(r"(credit|debit) (\d+)", prompt)]
    total = sum(amount if kind == "credit" else -amount for kind, amount in entries[: len(results)])
    if len(results) == len(entries):
        return f"answer {total}"
    kind, amount = entries[len(results)]
    call = {"name": "add" if kind == "credit" else "sub", "arguments": {"a": total, "b": amount}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def completion_body(token_ids, logprobs=None, versions=None, finish_reason="stop") -> dict:
    count = len(token_ids)
    choice = {
        "index": 0,
        "text": "",
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": [-0.5] * count if logprobs is None else logprobs},
        "finish_reason": finish_reason,
        "weight_versions": [[0, 0, count]] if versions is None else versions,
    }
    return {"object": "text_completion", "choices": [choice]}


class FakeReplica:
    """Serves on a loopback port from its own thread; `answer(request, number)` may be replaced at any time.

    Between `stop` and `start` no other process can take the port.
    """

    def __init__(self, tokenizer: Tokenizer, replica_id: str) -> None:
        self.tokenizer = tokenizer
        self.replica_id = replica_id
        self.version = 0
        self.requests: list[dict] = []
        self.answer: Answer = self.solve
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port = self._reserved.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def solve(self, request: dict, _number: int) -> web.StreamResponse:
        context = self.tokenizer.decode(request["prompt"], skip_special_tokens=False)
        ids = self.tokenizer.encode(solution(context) + END, add_special_tokens=False).ids[: request["max_tokens"]]
        return web.json_response(completion_body(ids, versions=[[self.version, 0, len(ids)]]))

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,))
        self._thread.start()
        assert ready.wait(60)

    def stop(self) -> None:
        """Close the port and cut requests in flight."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._loop = self._thread = None

    def close(self) -> None:
        """Stop, and give the port back."""
        self.stop()
        self._reserved.close()

    def _serve(self, ready: threading.Event) -> None:
        asyncio.run(self._main(ready))

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/tidemill/status", self._status)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port, reuse_port=True).start()
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        response = await self.answer(body, len(self.requests))
        response.headers["x-tidemill-replica"] = self.replica_id
        return response

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"replica_id": self.replica_id, "region": "here", "version": self.version})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A checkpoint directory with only the files of the chat format."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(chatml())
    return directory


@pytest.fixture(scope="session")
def chat(tokenizer_dir: Path) -> ChatFormat:
    return load_chat_format(str(tokenizer_dir), ChatSettings())


@pytest.fixture(scope="module")
def texts(chat, tokenizer):
    """The chat format, with a function that decodes ids to text."""
    chat.token_text = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    return chat


@pytest.fixture
def new_replica(tokenizer: Tokenizer) -> Iterator[Callable[[str], FakeReplica]]:
    """Start fake replicas; stop them after the test."""
    made: list[FakeReplica] = []

    def make(replica_id: str = "r1") -> FakeReplica:
        replica = FakeReplica(tokenizer, replica_id)
        replica.start()
        made.append(replica)
        return replica

    yield make
    for replica in made:
        replica.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give producers that are made without `deadline_s` more time: a slow machine may need seconds for a connection."""
    for producer in (FeedbackProducer, AsyncFeedbackProducer):
        monkeypatch.setitem(producer.__init__.__kwdefaults__, "deadline_s", DEADLINE_S)


@pytest.fixture(scope="session")
def stalling(tmp_path_factory: pytest.TempPathFactory, broker: None) -> Iterator[StallingLog]:
    """A broker that a test can stall."""
    with stalling_log(tmp_path_factory.mktemp("stalling")) as log:
        yield log
        # Collect the clients that tests dropped: a live one would log errors when the broker stops.
        gc.collect()
