"""`tidemill tune`: find settings by measuring."""

from __future__ import annotations

import typer

from tidemill.compose.tune.replica import replica

tune_app = typer.Typer(no_args_is_help=True, help="Find settings by measuring.")


@tune_app.callback()
def _group() -> None:
    """Keep the commands' names: typer leaves out the name of an only command."""


tune_app.command()(replica)

__all__ = ["tune_app"]
