"""Wait for a condition: a test waits until its condition is true, not for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str | Callable[[], object] = "", deadline_s: float = 180.0, pause_s: float = 0.02
) -> T:
    """Return the first true value of a condition. After the deadline, raise AssertionError with `what` in its text."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what() if callable(what) else what}"
        time.sleep(pause_s)
    return value


async def until_async(
    condition: Callable[[], T], what: str | Callable[[], object] = "", deadline_s: float = 180.0
) -> T:
    """Do as `until`, and let other tasks run meanwhile."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what() if callable(what) else what}"
        await asyncio.sleep(0.005)
    return value
