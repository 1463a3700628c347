"""`tidemill replay`: topics of yesterday, run again beside the live ones."""

from __future__ import annotations

from tidemill.compose.replay import archive, copy, diff, stage, steps
from tidemill.compose.replay.app import replay_app

__all__ = ["archive", "copy", "diff", "replay_app", "stage", "steps"]
