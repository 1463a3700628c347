"""Requests to a replica or a router, a fixed number at a time, and how fast they were answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Any

import aiohttp

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
TOKEN_IDS = 256
"""Prompts are drawn from the first ids: every tokenizer has so many."""
SEED = 0
MS = 1000


class LoadFailed(RuntimeError):
    """A request was not answered, or not with what was asked for; the text says by whom, and what to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """What each request asks for."""

    address: str
    """http://host:port."""
    model: str
    prompt_tokens: int
    sampled_tokens: int
    """Asked for whatever the model says: the end of an answer is ignored."""


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """What was measured with so many requests at a time."""

    concurrency: int
    requests: int
    tokens_per_s: float
    """Sampled tokens."""
    latency_ms_p50: float
    latency_ms_p95: float


def client(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A client that opens as many connections as there are requests, and waits `timeout_s` for an answer."""
    # Answers of a router would else be learnt from.
    headers = {"x-tidemill-consent": "no"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def served_model(session: aiohttp.ClientSession, address: str) -> str:
    """The name of the model that is served. Raises LoadFailed."""
    found = await _exchange(session, "GET", address + MODELS, None)
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise LoadFailed(f"{address}{MODELS} names no model: is this a replica or a router?") from error


async def measure(
    session: aiohttp.ClientSession, load: Load, concurrency: int, requests: int, done: Callable[[int], None]
) -> LoadLevel:
    """Send `requests` requests, `concurrency` at a time, each with a prompt of its own. Raises LoadFailed.

    `done` is told how many were answered.
    """
    draw = random.Random(f"{SEED}/{concurrency}")
    prompts = [[draw.randrange(TOKEN_IDS) for _ in range(load.prompt_tokens)] for _ in range(requests)]
    latencies: list[float] = []
    tokens = 0

    async def ask_on() -> None:
        nonlocal tokens
        while prompts:
            body = {
                "model": load.model,
                "prompt": prompts.pop(),
                "max_tokens": load.sampled_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
            }
            begun = time.perf_counter()
            answer = await _exchange(session, "POST", load.address + COMPLETIONS, body)
            latencies.append(time.perf_counter() - begun)
            tokens += _sampled(answer, load.address)
            done(len(latencies))

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(ask_on())
    seconds = time.perf_counter() - begun
    cuts = quantiles(latencies, n=20, method="inclusive") if len(latencies) > 1 else latencies * 19
    return LoadLevel(concurrency, requests, tokens / seconds, cuts[9] * MS, cuts[18] * MS)


def enough(levels: Sequence[LoadLevel], gain: float) -> LoadLevel | None:
    """The first level after which twice as many requests gave less than `gain` (a share) more tokens/s, else None."""
    for level, double in pairwise(levels):
        if double.tokens_per_s < (1 + gain) * level.tokens_per_s:
            return level
    return None


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    try:
        async with session.request(method, url, json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise LoadFailed(f"{url} answered {reply.status}: {text[:300]}{_ADVICE.get(reply.status, '')}")
            found: dict[str, Any] = json.loads(text)
    except (aiohttp.ClientError, ValueError) as error:
        raise LoadFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise LoadFailed(f"{url} did not answer within --timeout") from error
    return found


_ADVICE = {
    401: " (give --api-key)",
    429: " (it takes fewer requests: lower --most, or raise its limit)",
}


def _sampled(answer: Mapping[str, Any], address: str) -> int:
    try:
        return int(answer["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise LoadFailed(f"{address} does not say how many tokens it sampled (usage.completion_tokens)") from error
