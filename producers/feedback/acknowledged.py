"""Awaiting the log's acknowledgements from an event loop, without a wake-up of the loop for each of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from tidemill.producers.feedback.errors import FeedbackNotDelivered, FeedbackQueueFull
from tidemill.producers.feedback.queue import Ended, FeedbackQueue
from tidemill.schemas.records import Feedback

ROOM_POLL_S = 0.005
NO_ROOM = "the feedback queue stayed full until the deadline: the log takes records too slowly, or not at all"

Waiter = asyncio.Future[str]
"""Ends with the reason why a record failed; empty when the log has it."""


class Acknowledged:
    """The awaited side of a queue. Used from one event loop."""

    def __init__(self, queue: FeedbackQueue) -> None:
        self._queue = queue
        self._answers: _Answers | None = None

    async def deliver(self, records: Sequence[Feedback], deadline_s: float) -> list[str]:
        """Write records and wait for the log: why each failed, in order; empty for what the log has.

        Raises:
            FeedbackQueueFull: there was no room for the first of them within the deadline.
            LogUnreachable, LookupError, FeedbackNotDelivered, RuntimeError: as `FeedbackQueue.put`, for all of them.
        """
        deadline = time.monotonic() + deadline_s
        if not self._queue.ready:
            await asyncio.to_thread(self._queue.find_partitions, deadline)
        waiters: list[Waiter] = []
        for record in records:
            waiter = await self._offer(record, deadline)
            if waiter is None:
                break
            waiters.append(waiter)
        if records and not waiters:
            raise FeedbackQueueFull(NO_ROOM)
        if waiters:
            await asyncio.wait(waiters, timeout=max(0.0, deadline - time.monotonic()))
        late = f"not acknowledged within {deadline_s:g} s"
        reasons = [waiter.result() if waiter.done() else late for waiter in waiters]
        return reasons + [NO_ROOM] * (len(records) - len(waiters))

    async def aclose(self, timeout_s: float) -> None:
        """Flush and close the queue."""
        try:
            await asyncio.to_thread(self._queue.close, timeout_s)
        except FeedbackNotDelivered:
            # Each failure has been told to the caller of `deliver` that waited for it.
            return

    async def _offer(self, record: Feedback, deadline: float) -> Waiter | None:
        if self._answers is None:
            self._answers = _Answers(asyncio.get_running_loop())
        waiter, ended = self._answers.expect()
        while not self._queue.offer(record, ended):
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(ROOM_POLL_S)
        return waiter


class _Answers:
    """Carries ends from the queue's thread to the event loop, all that came together in one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._come: deque[tuple[Waiter, str]] = deque()
        self._woken = False

    def expect(self) -> tuple[Waiter, Ended]:
        """A waiter, and what to call from the queue's thread to end it."""
        waiter: Waiter = self._loop.create_future()

        def ended(_record: Feedback, reason: str) -> None:
            self._come.append((waiter, reason))
            # Set before the loop reads the deque and cleared before it does: no answer is left without a wake-up.
            if not self._woken and not self._loop.is_closed():
                self._woken = True
                self._loop.call_soon_threadsafe(self._settle)

        return waiter, ended

    def _settle(self) -> None:
        self._woken = False
        while self._come:
            waiter, reason = self._come.popleft()
            if not waiter.done():
                waiter.set_result(reason)
