"""`tidemill tune`: find settings by measuring."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.options import SettingsOf, with_reachable_log, with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay.steps import open_replay, step_range
from tidemill.compose.rows import CsvOption, JsonOption, print_rows
from tidemill.compose.tune.load import Load, LoadFailed, LoadLevel, client, enough, measure, served_model

if TYPE_CHECKING:
    from tidemill.trainer.mismatch import TrainedTokens

tune_app = typer.Typer(no_args_is_help=True, help="Find settings by measuring.")


HEADS = ("name", "kind", "low", "high", "bias", "variance", "ess", "cut", "error")


@tune_app.command()
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


@tune_app.command()
@with_settings
def corrections(
    settings_of: SettingsOf,
    which: Annotated[str, typer.Argument(metavar="FROM..TO", help="Steps, both included; or one step.")],
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Find the correction between sampler and trainer that suits a run, by trying each on its recorded steps.

    Makes the steps again as `tidemill replay steps` does, with the run's own settings, and computes for each published
    correction, and for the run's own, what it would have done to the gradients of these tokens: `bias`, how far the
    bounded weights are from the ratios of trainer to sampler probability, as a share of the gradient; `variance`, the
    gradient's mean square, 1 with weights of 1; `ess`, the effective sample size of the weights; `cut`, the share of
    tokens whose weight is bounded or 0; `error`, bias and variance together for steps of this size. The smallest error
    is chosen. Nothing is published, and nothing is written to the log.

    The choice is right for the mismatch of these steps: take some from the beginning of a run and some from its end.

    Example: `tidemill tune corrections 10..19 --config run.toml`
    """
    first, last = step_range(which)
    settings = with_reachable_log(settings_of({}))
    own = settings.trainer.correction
    from tidemill.trainer.choices import CORRECT_THEMSELVES
    from tidemill.trainer.replay.correction_trials import PUBLISHED, PublishedCorrection, try_corrections

    if settings.trainer.objective in CORRECT_THEMSELVES:
        raise ValueError(
            f"{settings.trainer.objective} holds its own weight between sampler and trainer, trainer.behaviour_cap: "
            "there is no correction to choose"
        )
    tokens: list[TrainedTokens] = []
    with open_replay(settings, last - first + 1) as opened:
        if opened is None:
            return
        replay, progress = opened
        for made in replay.run(first, last):
            if made.trained is not None:
                tokens.append(made.trained)
            progress(len(tokens), f"step {made.record.step}")
            if not made.same:
                typer.echo(f"step {made.record.step} comes out with other weights than recorded", err=True)
    candidates = (*PUBLISHED, PublishedCorrection("this run", own.kind, own.low, own.high))
    trials = try_corrections(tokens, candidates)
    if as_json:
        typer.echo(json.dumps({"steps": [first, last], "trials": [asdict(trial) for trial in trials]}, indent=2))
    else:
        rows = [list(asdict(trial).values()) for trial in trials]
        print_rows(HEADS, rows, as_csv=as_csv, formats=dict.fromkeys(HEADS[4:], ".4g"))
    best = trials[0]
    typer.echo(
        f"chosen: {best.name}: trainer.correction.kind={best.kind}, trainer.correction.low={best.low:g}, "
        f"trainer.correction.high={best.high:g} (error {best.error:.4g})",
        err=True,
    )


INTERRUPTED = 130
