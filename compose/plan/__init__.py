"""`tidemill plan`: what of a model fits on which devices, and what a step and a delta will take."""

from __future__ import annotations

from tidemill.compose.plan.command import plan

__all__ = ["plan"]
