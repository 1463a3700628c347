"""`tidemill users`: users of the product, and their rights over their data."""

from __future__ import annotations

import typer

from tidemill.compose.options import with_settings
from tidemill.compose.users.commands import erase, opt_in, opt_out, show
from tidemill.compose.users.simulate import simulate

users_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Users of the product: their records in the log, and their requests about them.

USER is the product's own id; the log knows them by a pseudonym, made with `product.pseudonym_key`. With `--pseudonym`
USER is that pseudonym.""",
)
for _command in (erase, opt_out, opt_in, show, simulate):
    users_app.command()(with_settings(_command))

__all__ = ["users_app"]
