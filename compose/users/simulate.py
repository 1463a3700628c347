"""`tidemill users simulate`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_local_log
from tidemill.compose.options import given

if TYPE_CHECKING:
    from tidemill.compose.demo.simulated_users.crowd import Seen

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]


def simulate(
    settings_of: SettingsOf,
    router: Annotated[str | None, typer.Option(help="Address of the router, http://host:port.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of who the users are, what they ask, how they react.")] = None,
    shuffle_thumbs: Annotated[
        bool | None,
        typer.Option(
            "--shuffle-thumbs", help="Control: votes are exchanged between answers, so that they carry no information."
        ),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(metavar="QUESTIONS", min=1, help="Only measure the satisfaction of held-out users, then exit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each report as one JSON document.")] = False,
) -> None:
    """Let simulated users use the product as its backend does: only through the router and the feedback SDK.

    They ask ledger questions and prefer correct answers with a polite ending, which the simulated reward does not
    measure. Nothing is learnt from the held-out users: their satisfaction is printed by weight version.

    Example: `tidemill users simulate --router http://127.0.0.1:8200 --measure 200 --json`
    """
    flags = given(users__router=router, users__seed=seed, users__shuffle_thumbs=shuffle_thumbs)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = with_local_log(settings_of(flags))
    from tidemill.compose.demo.simulated_users.questions import questions
    from tidemill.compose.demo.simulated_users.role import run

    asked = questions(settings.users, held_out_only=measure is not None, one_in=settings.run.held_out_one_in)
    say = _print_json if as_json else _print_line
    run(settings.kafka, settings.product, settings.users, islice(asked, measure), say)


def _print_json(seen: Seen) -> None:
    print(json.dumps(asdict(seen)), flush=True)


def _print_line(seen: Seen) -> None:
    rates = "  ".join(f"v{s.version} {s.rate:.2f} (n={s.answers})" for s in seen.satisfaction) or "nothing yet"
    said = f"{seen.interactions} answers, {sum(seen.signals.values())} signals, {seen.failed} given up"
    print(f"satisfied by version: {rates}; {said}", flush=True)
