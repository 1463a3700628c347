"""Wait for a condition: a test waits until its condition is true, not for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import httpx

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


def until_up(url: str, runs: Callable[[], bool], said: Callable[[], object] = str, deadline_s: float = 600.0) -> None:
    """Wait until a server answers a request with status 200.

    Args:
        runs: whether its process still runs.
        said: returns its last output, for the error.
    """

    def answers() -> bool:
        assert runs(), f"the process of {url} ended: {said()}"
        with suppress(httpx.TransportError):
            return httpx.get(url).status_code == httpx.codes.OK
        return False

    until(answers, lambda: f"{url} does not answer: {said()}", deadline_s)


async def until_async(
    condition: Callable[[], T], what: str | Callable[[], object] = "", deadline_s: float = 180.0
) -> T:
    """Do as `until`, and let other tasks run meanwhile."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what() if callable(what) else what}"
        await asyncio.sleep(0.005)
    return value
