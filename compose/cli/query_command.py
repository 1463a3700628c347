"""`tidemill query`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from tidemill.compose.options import ConfigOption, SetOption, given, key_values, settings_from
from tidemill.compose.rows import CsvOption, JsonOption, print_rows


def query(
    sql: Annotated[str | None, typer.Argument(help="SQL, or the name of a query from --list.")] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Value of a parameter, which stands as {NAME:Type} in the SQL; may be repeated. One of a named query "
            "that is not given is empty; for a name that a query does not take, the error lists those that it takes.",
        ),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the named queries.")] = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the sink's tables.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Ask ClickHouse about a run, while it runs or after it.

    Examples: `tidemill query held_out_by_version` · `tidemill query "SELECT count() FROM rollouts"` ·
    `tidemill query "SELECT reward FROM rollouts WHERE run_id = {run:String}" --param run=demo-0`
    """
    from tidemill.consumers.sink.query import ask, named_queries

    if list_names or sql is None:
        if as_json:
            typer.echo(json.dumps(named_queries(), indent=2))
        else:
            print_rows(("query", "answers"), named_queries().items(), as_csv=as_csv)
        return
    flags = given(sink__path=None if data_dir is None else str(data_dir))
    settings = settings_from({"config": config, "assignments": assignments}, flags)
    answer = ask(settings.sink, sql, key_values(parameters or [], "--param", "run=demo-0"))
    # With a FORMAT clause of its own the answer is one text in that format, named as the format.
    formatted = len(answer.columns) == 1 and re.search(
        rf"\bFORMAT\s+{re.escape(answer.columns[0])}\b", sql, re.IGNORECASE
    )
    if formatted and not (as_json or as_csv):
        typer.echo(answer.rows[0][0], nl=False)
    else:
        print_rows(answer.columns, answer.rows, as_json=as_json, as_csv=as_csv)
