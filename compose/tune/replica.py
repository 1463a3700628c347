"""`tidemill tune replica`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Annotated

import typer

from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption, print_rows
from tidemill.compose.tune.load import Load, LoadFailed, LoadLevel, client, enough, measure, served_model

INTERRUPTED = 130


def replica(
    address: Annotated[str, typer.Option(help="Replica or router, http://host:port.")] = "http://127.0.0.1:8000",
    gain: Annotated[
        float, typer.Option(min=0.0, help="Least growth of tokens/s, as a share, for which twice the requests count.")
    ] = 0.1,
    first: Annotated[int, typer.Option(min=1, help="Requests at a time to begin with.")] = 1,
    most: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Requests one after the other in each place.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; no two prompts are alike.")] = 64,
    sampled_tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled in each answer.")] = 64,
    api_key: Annotated[
        str | None, typer.Option(envvar="TIDEMILL_API_KEY", help="API key, which a router needs.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for one answer.")] = 120.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Find how many requests at a time a replica is worth: from where on more requests stop helping.

    Sends real requests to a running replica or router, and doubles their number until tokens/s grow by less than
    `--gain`. The number before that is chosen. Nothing else should use the replica meanwhile. A router writes its
    answers to the log, as interactions without consent: nothing is learnt from them.

    Use the number for `rollout.max_concurrent_episodes`, times the replicas, over the workers.

    Example: `tidemill tune replica --address http://127.0.0.1:8000 --prompt-tokens 200 --sampled-tokens 100`
    """
    levels: list[LoadLevel] = []
    status = 0
    load = Load(address.rstrip("/"), "", prompt_tokens, sampled_tokens)

    async def climb() -> None:
        """Measure level after level into `levels`, until one of them is enough."""
        async with client(api_key, timeout_s) as session:
            asked = replace(load, model=await served_model(session, load.address))
            # The first answers of a replica are slower: they are not counted.
            await measure(session, asked, 1, 1, lambda _: None)
            concurrency = first
            while concurrency <= most and enough(levels, gain) is None:
                requests = concurrency * rounds
                with working(f"{concurrency} at a time", requests) as bar:
                    levels.append(await measure(session, asked, concurrency, requests, lambda n: bar(n, "")))
                concurrency *= 2

    try:
        asyncio.run(climb())
    except KeyboardInterrupt:
        typer.echo("stopped before the end: these are the numbers so far", err=True)
        status = INTERRUPTED
    except ExceptionGroup as errors:
        # Requests of one level fail together; one of them says why.
        raise next(error for error in errors.exceptions if isinstance(error, LoadFailed)) from None
    chosen = enough(levels, gain)
    if as_json:
        told = {"address": address, "gain": gain, "levels": [asdict(level) for level in levels],
                "chosen": None if chosen is None else chosen.concurrency, "load": asdict(load)}  # fmt: skip
        typer.echo(json.dumps(told, indent=2))
    else:
        rows = [list(asdict(level).values()) for level in levels]
        rounded = [[*row[:2], *(round(value, 1) for value in row[2:])] for row in rows]
        heads = ("concurrency", "requests", "tokens_per_s", "latency_ms_p50", "latency_ms_p95")
        print_rows(heads, rounded, as_csv=as_csv, formats=dict.fromkeys(heads[2:], ",.1f"))
    if chosen is not None:
        typer.echo(f"chosen: {chosen.concurrency} requests at a time ({chosen.tokens_per_s:,.0f} tokens/s)", err=True)
    elif not status:
        typer.echo(f"tokens/s still grew by {gain:.0%} or more at {most} requests: raise --most", err=True)
    raise typer.Exit(status)
