"""`tidemill tune replica`, against a server that answers like a replica."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.cli.tune_command import LoadLevel, enough

ANSWER_S = 0.05


class FakeReplica:
    """Answers each request in `ANSWER_S`; if `answered` is not 0, only so many, and no other one."""

    def __init__(self, status: int = 200, usage: bool = True, answered: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._at_once = 0
        self._status, self._usage, self._answered = status, usage, answered

    async def complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(ANSWER_S)
        if self._answered and len(self.bodies) > self._answered:
            await self._end.wait()
        self._at_once -= 1
        answer = {"choices": [{}]} | ({"usage": {"completion_tokens": 8}} if self._usage else {})
        return web.json_response(answer, status=self._status)

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tidemill"}]})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve; yield the address."""
        ready, addresses = threading.Event(), list[str]()

        async def serve() -> None:
            self._end = asyncio.Event()
            application = web.Application()
            application.router.add_post("/v1/completions", self.complete)
            application.router.add_get("/v1/models", self.models)
            runner = web.AppRunner(application, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            self._loop = asyncio.get_running_loop()
            ready.set()
            await self._end.wait()
            await runner.cleanup()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert ready.wait(180)
        try:
            yield addresses[0]
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            thread.join(60)


def tuned(address: str, *options: str):
    return CliRunner().invoke(app, ["tune", "replica", "--address", address, "--json", *options])


def test_requests_are_doubled_until_the_gain_is_too_small():
    replica = FakeReplica()
    with replica.serving() as address:
        # No machine becomes a hundred times as fast with twice as many requests.
        options = ("--first", "2", "--gain", "100", "--prompt-tokens", "5", "--sampled-tokens", "8", "--api-key", "k")
        result = tuned(address, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["chosen"] == 2
    assert [(level["concurrency"], level["requests"]) for level in found["levels"]] == [(2, 6), (4, 12)]
    assert all(level["latency_ms_p95"] >= level["latency_ms_p50"] >= 1000 * ANSWER_S for level in found["levels"])
    assert replica.most_at_once <= 4
    prompts = [tuple(body["prompt"]) for body in replica.bodies]
    assert {len(prompt) for prompt in prompts} == {5} and len(set(prompts)) == len(prompts) == 1 + 6 + 12
    asked = {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in replica.bodies}
    assert asked == {("tidemill", 8, True)}
    assert replica.headers[0]["Authorization"] == "Bearer k"
    assert replica.headers[0]["x-tidemill-consent"] == "no"


def test_if_more_requests_than_allowed_would_help_none_is_chosen():
    with FakeReplica().serving() as address:
        result = tuned(address, "--most", "1")
    assert json.loads(result.stdout)["chosen"] is None
    assert "raise --most to 2 or more" in result.stderr
    assert "still grew" not in result.stderr, "one level says nothing about growth"


@pytest.mark.parametrize(
    ("replica", "told"),
    [
        (FakeReplica(status=401), "--api-key"),
        (FakeReplica(status=429), "--most"),
        (FakeReplica(status=500), "answered 500"),
        (FakeReplica(usage=False), "usage.completion_tokens"),
    ],
)
def test_a_faulty_server_is_a_clear_error(replica, told):
    with replica.serving() as address:
        result = tuned(address)
    assert result.exit_code == 1
    assert told in str(result.exception)


def test_an_address_without_a_server_is_a_clear_error():
    result = tuned("http://127.0.0.1:9")
    assert "127.0.0.1:9" in str(result.exception) and "did not answer" in str(result.exception)


def test_an_interrupt_ends_it_with_the_numbers_so_far():
    # A request before the first level, and its three: the second level is still running at the interrupt.
    replica = FakeReplica(answered=4)
    with replica.serving() as address:
        command = [sys.executable, "-m", "tidemill", "tune", "replica", "--address", address, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(replica.bodies) < 6 and process.poll() is None:
                signal.sigtimedwait([], 0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "so far" in err
    assert json.loads(out)["levels"][0]["concurrency"] == 1


def test_the_first_level_whose_double_adds_too_little_is_enough():
    levels = [LoadLevel(2**n, 1, speed, 1.0, 1.0) for n, speed in enumerate((100.0, 190.0, 205.0, 300.0))]
    assert enough(levels, 0.1) is levels[1]
    assert enough(levels[:2], 0.1) is None
    assert enough([], 0.1) is None
