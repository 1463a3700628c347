"""`python -m tidemill`: the command line, for programs that start a module, such as torchrun and the supervisor."""

from __future__ import annotations

from tidemill.compose.cli import main

main()
