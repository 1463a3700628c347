"""The typer app that every replay command is added to."""

from __future__ import annotations

import typer

replay_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Replay the log: run recorded work again, without writing to the live topics.""",
)
