"""`tidemill weights`: the weight chain on the command line."""

from __future__ import annotations

from tidemill.compose.weights.commands import weights_app

__all__ = ["weights_app"]
