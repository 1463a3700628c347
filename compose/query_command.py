"""`tidemill query`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.compose.options import ConfigOption, SetOption, given, settings_from


def query(
    sql: Annotated[str | None, typer.Argument(help="SQL, or the name of a query from --list.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the named queries.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the sink's tables.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Ask ClickHouse about a run, while it runs or after it.

    Examples: `tidemill query held_out_by_version` · `tidemill query "SELECT count() FROM rollouts"`
    """
    from tidemill.consumers.query import ask, named_queries

    if list_names or sql is None:
        _list(named_queries(), as_json)
        return
    flags = given(sink__path=None if data_dir is None else str(data_dir))
    settings = settings_from({"config": config, "assignments": assignments}, flags)
    answer = ask(settings.sink, sql)
    if as_json:
        typer.echo(json.dumps([dict(zip(answer.columns, row, strict=True)) for row in answer.rows], default=str))
        return
    table = Table(*answer.columns)
    for row in answer.rows:
        table.add_row(*(str(value) for value in row))
    Console().print(table)


def _list(names: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(names, indent=2))
        return
    table = Table("query", "answers")
    for name, question in names.items():
        table.add_row(name, question)
    Console().print(table)
