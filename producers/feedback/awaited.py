"""`AsyncFeedbackProducer`: for an asyncio backend; what is awaited has been acknowledged by the log."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from tidemill.producers.feedback.acknowledged import Acknowledged
from tidemill.producers.feedback.errors import FailedEvent, FeedbackNotDelivered
from tidemill.producers.feedback.event import FeedbackMaker, Report, check_source
from tidemill.producers.feedback.producer import FLUSH_S, close_at_exit, open_queue
from tidemill.producers.feedback.queue import FeedbackCounts
from tidemill.producers.feedback.shorthand import Shorthand
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import SignalKind


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
        self._maker = FeedbackMaker(product)
        self._source = check_source(source)
        self._deadline_s = deadline_s
        self._queue = open_queue(kafka, source, max_queued, linger_ms, delivery_timeout_s)
        self._acknowledged = Acknowledged(self._queue)
        self._at_exit = weakref.finalize(self, close_at_exit, self._queue)

    @property
    def counts(self) -> FeedbackCounts:
        """Signals accepted, delivered and failed so far."""
        return self._queue.counts

    async def send(
        self,
        interaction: str,
        kind: SignalKind | str,
        value: float | None,
        *,
        user: str | None,
        event_id: str | None = None,
        corrects: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> str:
        """Send one signal; its event id, when the log has it. Arguments as `FeedbackProducer.send`.

        Raises:
            BadFeedback: a ValueError that names the argument; `NotServed` for a token that is not this user's.
            FeedbackQueueFull, LogUnreachable: the log cannot keep up, or no broker answered; it was not taken.
            FeedbackNotDelivered: not acknowledged within the deadline; it may have been written.
            LookupError: the topic does not exist.
        """
        report = Report(interaction, kind, value, user, event_id, corrects, observed_at)
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
