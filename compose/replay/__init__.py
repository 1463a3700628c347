"""`tidemill replay`: topics of yesterday, run again beside the live ones."""

from __future__ import annotations

import typer

replay_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Replay the log: run recorded work again, without writing to the live topics.""",
)
