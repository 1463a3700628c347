"""`tidemill topics`: create and check the topics of the catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.compose.local_log import with_local_log
from tidemill.compose.options import BootstrapOption, ConfigOption, PrefixOption, SetOption, settings_from
from tidemill.schemas.admin import TopicState, check_topics, create_topics


def topics(
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
    bootstrap: BootstrapOption = None,
    topic_prefix: PrefixOption = None,
) -> None:
    """List the topics beside what the catalogue declares; status 1 when one is missing or differs.

    Example: `tidemill topics --create --bootstrap kafka:9092`
    """
    options = {
        "config": config, "assignments": assignments, "bootstrap": bootstrap, "topic_prefix": topic_prefix
    }  # fmt: skip
    kafka = with_local_log(settings_from(options)).kafka
    created = create_topics(kafka) if create else []
    states = check_topics(kafka)
    if as_json:
        typer.echo(json.dumps({"created": created, "topics": [asdict(state) for state in states]}, indent=2))
    else:
        Console().print(_table(states, created))
    if any(state.drift for state in states):
        raise typer.Exit(1)


def _table(states: list[TopicState], created: list[str]) -> Table:
    table = Table("topic", "partitions", "state")
    for state in states:
        fine = "created" if state.name in created else "as declared"
        table.add_row(state.name, str(state.partitions), "; ".join(state.drift) or fine)
    return table
