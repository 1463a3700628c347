"""Waiting for a condition: a test waits for what it needs, not for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str | Callable[[], object] = "", deadline_s: float = 180.0, pause_s: float = 0.02
) -> T:
    """The first true value of a condition. Raises AssertionError, with `what` was waited for, past the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what() if callable(what) else what}"
        time.sleep(pause_s)
    return value
