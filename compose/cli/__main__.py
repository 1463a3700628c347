"""`python -m tidemill.compose.cli`: the command line, if it is not installed as `tidemill`."""

from __future__ import annotations

from tidemill.compose.cli import main

main()
