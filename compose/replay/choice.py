"""Options that say which records of the log are meant, shared by every command that takes some of them.

`with_selection` gives a command these options and hands it a function from settings to a `Selection` in their place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.rows import moment_us

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.selection import Selection

SelectionOf = Callable[[TidemillSettings], "Selection"]
PANEL = "Which records (each option narrows the choice)"

_Texts = list[str] | None
_OPTIONS: dict[str, Any] = {
    "topic": Annotated[
        _Texts,
        typer.Option(
            "--topic",
            help="A topic without its prefix, or its dead letters (rollouts.dlq); may be repeated.",
            rich_help_panel=PANEL,
        ),
    ],
    "since": Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="Written at or after, ISO 8601, UTC.", rich_help_panel=PANEL),
    ],
    "until": Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Written before, ISO 8601, UTC.", rich_help_panel=PANEL)
    ],
    "offsets": Annotated[
        _Texts,
        typer.Option(
            "--offsets",
            metavar="TOPIC[/PARTITION]=FROM:TO",
            help="Offsets from, up to and not including; either may be left out; may be repeated.",
            rich_help_panel=PANEL,
        ),
    ],
    "step": Annotated[
        _Texts,
        typer.Option(
            "--step",
            metavar="N[..M]",
            help="What optimizer steps read: groups and their rollouts, batches and their interactions.",
            rich_help_panel=PANEL,
        ),
    ],
    "version": Annotated[
        _Texts,
        typer.Option(
            "--version", metavar="V[..W]", help="The same, of the steps that made versions.", rich_help_panel=PANEL
        ),
    ],
    "group": Annotated[
        _Texts,
        typer.Option("--group", metavar="ID", help="A group and its rollouts; may be repeated.", rich_help_panel=PANEL),
    ],
    "where": Annotated[
        str,
        typer.Option(
            "--where",
            metavar="EXPRESSION",
            help="Of the decoded record, for instance 'record.reward > 0.5 and record.mode == \"train\"'; kind, topic, "
            "partition, offset, timestamp, key and headers[...] can be named too.",
            rich_help_panel=PANEL,
        ),
    ],
    "uncommitted": Annotated[
        bool,
        typer.Option(
            "--uncommitted", help="Also records of transactions that are open or aborted.", rich_help_panel=PANEL
        ),
    ],
}
_DEFAULTS: dict[str, Any] = {"where": "", "uncommitted": False}


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `selection_of` by the options that select records."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401 - typer's values
        options = {name: arguments.pop(name) for name in _OPTIONS}
        command(selection_of=functools.partial(_selection, options), **arguments)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "selection_of"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _selection(options: dict[str, Any], settings: TidemillSettings) -> Selection:
    from tidemill.consumers.operate.replay.records import RANK, READ_COMMITTED, READ_UNCOMMITTED
    from tidemill.consumers.operate.replay.selection import (
        Selection,
        offset_range,
        span,
    )

    since, until = moment_us(options["since"]), moment_us(options["until"])
    return Selection(
        topics=tuple(sorted(set(options["topic"] or ()), key=lambda name: RANK.get(name, -1))),
        from_ms=None if since is None else since // 1_000,
        to_ms=None if until is None else until // 1_000,
        offsets=tuple(offset_range(text) for text in options["offsets"] or ()),
        steps=tuple(span(text) for text in options["step"] or ()),
        versions=tuple(span(text) for text in options["version"] or ()),
        groups=tuple(options["group"] or ()),
        where=options["where"],
        run_id=settings.run.run_id,
        isolation=READ_UNCOMMITTED if options["uncommitted"] else READ_COMMITTED,
    )
