"""`tidemill trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.compose.cli.trace_text import path_lines, rollout_lines, user_lines
from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import JsonOption
from tidemill.compose.users.commands import pseudonym_of

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]


def trace(
    settings_of: SettingsOf,
    name: Annotated[
        str | None,
        typer.Argument(help="Id of an interaction (or its interaction token), of a feedback event, or of a rollout."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The product's id of a user: follow their data.")] = None,
    is_pseudonym: Annotated[bool, typer.Option("--pseudonym", help="--user is already the log's pseudonym.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow one event through the log: served, judged, batched, trained, decided and served again, with offsets.

    Says where the path ends and why: excluded, dropped, waiting, erased, or served now by which replicas. With --user
    lists the versions that learnt from a user's data, also after their erasure.

    Examples: `tidemill trace 3f2a…` · `tidemill trace --user 4711 --json`
    """
    if (name is None) == (user is None):
        raise typer.BadParameter("give the id of an interaction, event or rollout, or --user, and not both")
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.trace.reading import TraceReader
    from tidemill.consumers.operate.trace.rollout import RolloutPath

    with working("reading the log") as bar:
        reader = TraceReader(settings.kafka, lambda done, of: bar.say(f"{done:,} of {of:,} records"))
        if user is not None:
            of_user = reader.user(pseudonym_of(settings, user, is_pseudonym))
            document, lines = asdict(of_user), user_lines(of_user)
        else:
            path = reader.trace(name or "")
            document = asdict(path)
            lines = rollout_lines(path) if isinstance(path, RolloutPath) else path_lines(path)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)
