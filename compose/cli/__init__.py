"""The command line: `tidemill`, with one command a role."""

from __future__ import annotations

import gc

# To look for garbage while modules are imported takes a third of the time, and there is none.
gc.disable()
from tidemill.compose.cli.commands import app, main  # noqa: E402

gc.enable()

__all__ = ["app", "main"]
