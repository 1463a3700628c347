"""Whether the log can be reached, asked of a broker at most once a second however often it is asked here."""

from __future__ import annotations

import asyncio
import time

from tidemill.producers.feedback.errors import LogUnreachable
from tidemill.producers.feedback.queue import FeedbackQueue

KEPT_S = 1.0
TIMEOUT_S = 2.0


class Health:
    """The log's health. Used from one event loop."""

    def __init__(self, queue: FeedbackQueue) -> None:
        self._queue = queue
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._wrong = ""

    async def wrong(self) -> str:
        """What is wrong; empty when the log answers and has the topic."""
        async with self._asking:
            if time.monotonic() - self._asked_at > KEPT_S:
                self._wrong = await self._ask()
                self._asked_at = time.monotonic()
            return self._wrong

    async def _ask(self) -> str:
        try:
            await asyncio.to_thread(self._queue.ask_partitions, TIMEOUT_S)
        except LogUnreachable:
            return "no broker of the log answers"
        except LookupError:
            return "the log has no feedback topic: create the topics with `tidemill topics --create`"
        return ""
