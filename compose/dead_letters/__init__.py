"""`tidemill dead-letters`: what could not be used, why, and sending it back."""

from __future__ import annotations

from tidemill.compose.dead_letters.commands import dead_letters_app

__all__ = ["dead_letters_app"]
