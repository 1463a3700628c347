"""`tidemill topics`: create and check the topics of the catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tidemill.compose.options import (
    BootstrapOption,
    ConfigOption,
    PrefixOption,
    SetOption,
    settings_from,
    with_local_log,
)
from tidemill.compose.rows import CsvOption, JsonOption, print_rows
from tidemill.schemas.log.admin import check_topics, create_topics


def topics(
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
    bootstrap: BootstrapOption = None,
    topic_prefix: PrefixOption = None,
) -> None:
    """Compare the topics with the catalogue; status 1 when a topic is missing or differs.

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
        fine = {name: "created" for name in created}
        rows = (
            (state.name, state.partitions, "; ".join(state.drift) or fine.get(state.name, "as declared"))
            for state in states
        )
        print_rows(("topic", "partitions", "state"), rows, as_csv=as_csv)
    if any(state.drift for state in states):
        raise typer.Exit(1)
