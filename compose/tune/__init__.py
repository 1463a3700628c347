"""`tidemill tune`: find settings by measuring."""

from __future__ import annotations

import typer

from tidemill.compose.tune.corrections import corrections
from tidemill.compose.tune.replica import replica

tune_app = typer.Typer(no_args_is_help=True, help="Find settings by measuring.")


tune_app.command()(replica)
tune_app.command()(corrections)

__all__ = ["tune_app"]
