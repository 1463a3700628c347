"""`tidemill tune replica`: measures how many concurrent requests a replica should get."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.output import CsvOption, JsonOption, print_rows, working

if TYPE_CHECKING:
    import aiohttp

tune_app = typer.Typer(no_args_is_help=True, help="Find settings by measuring.")


@tune_app.command()
def replica(
    address: Annotated[str, typer.Option(help="Replica or router, http://host:port.")] = "http://127.0.0.1:8000",
    gain: Annotated[
        float, typer.Option(min=0.0, help="Least growth of tokens/s, as a share, for which twice the requests count.")
    ] = 0.1,
    first: Annotated[int, typer.Option(min=1, help="Requests at a time to begin with.")] = 1,
    most: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Requests one after another on each connection.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; no two prompts are alike.")] = 64,
    sampled_tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled in each answer.")] = 64,
    api_key: Annotated[
        str | None, typer.Option(envvar="TIDEMILL_API_KEY", help="API key, which a router needs.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for one answer.")] = 120.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Find the number of concurrent requests for a replica, beyond which more requests no longer help.

    Sends real requests to a running replica or router, and doubles their number until tokens/s grow by less than
    `--gain`. The number before that is chosen. Do not use the replica for anything else at the same time. A router
    writes its answers to the log, as interactions without consent: nothing is learnt from them.

    Set `rollout.max_concurrent_episodes` to this number, times the number of replicas, divided by that of workers.

    Example: `tidemill tune replica --address http://127.0.0.1:8000 --prompt-tokens 200 --sampled-tokens 100`
    """
    levels: list[LoadLevel] = []
    status = 0
    load = Load(address.rstrip("/"), "", prompt_tokens, sampled_tokens)

    async def climb() -> None:
        """Measure level after level into `levels`, until `enough`."""
        async with client(api_key, timeout_s) as session:
            named_load = replace(load, model=await served_model(session, load.address))
            # The first answers of a replica are slower, so they are not counted.
            await measure(session, named_load, 1, 1, lambda _: None)
            concurrency = first
            while concurrency <= most and enough(levels, gain) is None:
                requests = concurrency * rounds
                with working(f"{concurrency} at a time", requests) as bar:
                    levels.append(await measure(session, named_load, concurrency, requests, lambda n: bar(n, "")))
                concurrency *= 2

    try:
        asyncio.run(climb())
    except KeyboardInterrupt:
        typer.echo("stopped before the end: these are the numbers so far", err=True)
        status = INTERRUPTED
    except ExceptionGroup as errors:
        # Requests of one level fail together; report one of them.
        raise next(error for error in errors.exceptions if isinstance(error, RuntimeError)) from None
    chosen = enough(levels, gain)
    document = {"address": address, "gain": gain, "levels": levels,
            "chosen": None if chosen is None else chosen.concurrency, "load": load}  # fmt: skip
    rows = [list(asdict(level).values()) for level in levels]
    rounded = [[*row[:2], *(round(value, 1) for value in row[2:])] for row in rows]
    heads = ("concurrency", "requests", "tokens_per_s", "latency_ms_p50", "latency_ms_p95")
    formats = dict.fromkeys(heads[2:], ",.1f")
    print_rows(heads, rounded, as_json=as_json, as_csv=as_csv, formats=formats, document=document)
    if chosen is not None:
        typer.echo(f"chosen: {chosen.concurrency} requests at a time ({chosen.tokens_per_s:,.0f} tokens/s)", err=True)
    elif len(levels) > 1 and not status:
        highest = levels[-1].concurrency
        typer.echo(f"tokens/s still grew by {gain:.0%} or more at {highest} requests: raise --most", err=True)
    elif not status:
        typer.echo(f"two numbers of requests are compared: raise --most to {2 * first} or more", err=True)
    raise typer.Exit(status)


INTERRUPTED = 130
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
TOKEN_IDS = 256
"""Prompts are drawn from the first ids, which every tokenizer has."""
SEED = 0
MS = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """The content of each request."""

    address: str
    """http://host:port."""
    model: str
    prompt_tokens: int
    sampled_tokens: int
    """Always sampled in full: the end of an answer is ignored."""


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """The measurements with one number of concurrent requests."""

    concurrency: int
    requests: int
    tokens_per_s: float
    """Sampled tokens."""
    latency_ms_p50: float
    latency_ms_p95: float


def client(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """Return a client that opens one connection per request, and waits `timeout_s` for an answer."""
    import aiohttp

    # Otherwise the answers of a router would be learnt from.
    headers = {"x-tidemill-consent": "no"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def served_model(session: aiohttp.ClientSession, address: str) -> str:
    """Return the name of the served model. Raises RuntimeError."""
    found = await _exchange(session, "GET", address + MODELS, None)
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"{address}{MODELS} names no model: is this a replica or a router?") from error


async def measure(
    session: aiohttp.ClientSession, load: Load, concurrency: int, requests: int, done: Callable[[int], None]
) -> LoadLevel:
    """Send `requests` requests, `concurrency` at a time, each with its own prompt. Raises RuntimeError.

    `done` is called with the number of answers so far.
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
            started = time.perf_counter()
            answer = await _exchange(session, "POST", load.address + COMPLETIONS, body)
            latencies.append(time.perf_counter() - started)
            try:
                tokens += int(answer["usage"]["completion_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                what = "does not say how many tokens it sampled (usage.completion_tokens)"
                raise RuntimeError(f"{load.address} {what}") from error
            done(len(latencies))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(ask_on())
    seconds = time.perf_counter() - started
    cuts = quantiles(latencies, n=20, method="inclusive") if len(latencies) > 1 else latencies * 19
    return LoadLevel(concurrency, requests, tokens / seconds, cuts[9] * MS, cuts[18] * MS)


def enough(levels: Sequence[LoadLevel], gain: float) -> LoadLevel | None:
    """Return the first level after which twice the requests gave less than `gain` (a share) more tokens/s, or None."""
    for level, double in pairwise(levels):
        if double.tokens_per_s < (1 + gain) * level.tokens_per_s:
            return level
    return None


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    import aiohttp

    try:
        async with session.request(method, url, json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise RuntimeError(f"{url} answered {reply.status}: {text[:300]}{_ADVICE.get(reply.status, '')}")
            found: dict[str, Any] = json.loads(text)
    except (aiohttp.ClientError, ValueError) as error:
        raise RuntimeError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise RuntimeError(f"{url} did not answer within --timeout") from error
    return found


_ADVICE = {401: " (give --api-key)", 429: " (it takes fewer requests: lower --most, or raise its limit)"}
