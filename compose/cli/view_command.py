"""`tidemill view`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from tidemill.compose.demo.plan import CONFIG_NAME
from tidemill.compose.options import ConfigOption, SetOption, given, settings_from


def view(
    data_dir: Annotated[
        Path | None,
        typer.Argument(help="Directory of a demonstration, or of a sink's tables, to look at when the run is over."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at; beyond loopback, set view.token.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0 takes a free one.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Show a run in a browser: learning, rollouts, users, weights and the log, while it runs or after it.

    Examples: `tidemill view data/demo/demo-0-20261101-120000` shows a run that is over · `tidemill view` reads from the
    running sink of the settings · `tidemill view --set sink.host=clickhouse` from a ClickHouse server.
    """
    from tidemill.consumers.view.app import run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    own = data_dir / CONFIG_NAME if data_dir is not None else None
    of_demo = own is not None and own.is_file()
    tables = None if data_dir is None or of_demo else str(data_dir)
    # The port in a demonstration's settings was chosen for the time of its run.
    asked = port if port is not None or not of_demo else 0
    settings = settings_from(
        {"config": own if of_demo and config is None else config, "assignments": assignments},
        given(sink__path=tables, view__host=host, view__port=asked),
    )
    run(settings.sink, settings.view, open_tables=data_dir is not None)
