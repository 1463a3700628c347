"""`tidemill gate`: which versions reach users, on the command line."""

from __future__ import annotations

from tidemill.compose.gate.commands import gate_app

__all__ = ["gate_app"]
