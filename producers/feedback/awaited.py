"""`AsyncFeedbackProducer`: for an asyncio backend; what is awaited has been acknowledged by the log."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from tidemill.producers.feedback.event import (
    EventFields,
    FailedEvent,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    Report,
)
from tidemill.producers.feedback.producer import FLUSH_S, Shorthand
from tidemill.producers.feedback.queue import FeedbackQueue
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Feedback, SignalKind

ROOM_POLL_S = 0.005
NO_ROOM = "the feedback queue stayed full until the deadline: the log takes records too slowly, or not at all"

Waiter = asyncio.Future[str]
"""Ends with the reason why a record failed; empty when the log has it."""


class Acknowledged:
    """The awaited side of a queue, used from one event loop. Ends that come together take one wake-up of the loop."""

    def __init__(self, queue: FeedbackQueue) -> None:
        self._queue = queue
        self._come: deque[tuple[Waiter, str]] = deque()
        """Ended records, from the queue's thread."""
        self._woken = False

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
        """Queue a record: what waits for its end; None when there was no room in time."""
        loop = asyncio.get_running_loop()
        waiter: Waiter = loop.create_future()

        def ended(_record: Feedback, reason: str) -> None:
            """Called from the queue's thread."""
            self._come.append((waiter, reason))
            # Set before the loop reads the deque and cleared before it does: no answer is left without a wake-up.
            if not self._woken and not loop.is_closed():
                self._woken = True
                loop.call_soon_threadsafe(self._settle)

        while not self._queue.offer(record, ended):
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(ROOM_POLL_S)
        return waiter

    def _settle(self) -> None:
        self._woken = False
        while self._come:
            waiter, reason = self._come.popleft()
            if not waiter.done():
                waiter.set_result(reason)


class AsyncFeedbackProducer(Shorthand[Coroutine[Any, Any, str]]):
    """Sends signals and waits for the log without blocking the event loop. Make one a process, after any fork.

    Signals that are awaited at the same time share batches: `asyncio.gather(*(producer.send(...) for ...))`.

    Args: as `FeedbackProducer`; `deadline_s` covers the log's acknowledgement.

    Raises:
        KeysMissing: `product` has no keys.
        ValueError: no brokers are named, or `source` cannot be a name.
    """

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        *,
        source: str = "sdk",
        deadline_s: float = 10.0,
        max_queued: int = 100_000,
        linger_ms: float = 5.0,
        delivery_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(kafka, product, source, deadline_s, max_queued, linger_ms, delivery_timeout_s)
        self._acknowledged = Acknowledged(self._queue)

    async def send(
        self,
        interaction: str,
        kind: SignalKind | str,
        value: float | None,
        **event: Unpack[EventFields],
    ) -> str:
        """Send one signal; its event id, when the log has it. Arguments as `FeedbackProducer.send`.

        Raises:
            BadFeedback: a ValueError that names the argument; `NotServed` for a token that is not this user's.
            FeedbackQueueFull, LogUnreachable: the log cannot keep up, or no broker answered; it was not taken.
            FeedbackNotDelivered: not acknowledged within the deadline; it may have been written.
            LookupError: the topic does not exist.
        """
        report = Report(interaction, kind, value, **event)
        record = self._maker.make(report, self._source, now_us())
        reason = (await self._acknowledged.deliver([record], self._deadline_s))[0]
        if reason:
            raise FeedbackNotDelivered(f"the signal was not acknowledged: {reason}", (FailedEvent(record, reason),))
        return record.event_id

    async def aclose(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and close; a signal that is then not acknowledged has failed, and is raised where it is awaited."""
        self._at_exit.detach()
        await self._acknowledged.aclose(timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
