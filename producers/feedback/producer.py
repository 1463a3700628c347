"""`FeedbackProducer` and `AsyncFeedbackProducer`: signals from a product's backend into the log."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from tidemill.producers.feedback.event import (
    EventFields,
    FailedEvent,
    FeedbackMaker,
    FeedbackNotDelivered,
    check_source,
)
from tidemill.producers.feedback.queue import AwaitedDeliveries, FeedbackCounts, FeedbackQueue
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Feedback, SignalKind

log = logging.getLogger(__name__)

FLUSH_S = 30.0
Sent = TypeVar("Sent")
"""The result of `send`: an event id, or something to await for one."""


class QueueOptions(TypedDict, total=False):
    """Options of both producers."""

    source: str
    """The reporter, for instance the name of the backend; it is written into each record. By default "sdk"."""
    max_queued: int
    """Signals that wait for the log's acknowledgement at most: 100,000."""
    linger_ms: float
    """Milliseconds that a signal waits for others, to be written with them as one batch: 5."""
    delivery_timeout_s: float
    """Seconds after which an unacknowledged signal has failed: 120."""


class FeedbackMethods(ABC, Generic[Sent]):
    """A producer's queue; thumbs and withdrawals in terms of `send`, whose arguments and errors they have."""

    def __init__(
        self, kafka: str | KafkaSettings, product: ProductSettings, deadline_s: float, options: QueueOptions
    ) -> None:
        self._maker = FeedbackMaker(product)
        self._source = check_source(options.get("source", "sdk"))
        self._deadline_s = deadline_s
        self._queue = FeedbackQueue(kafka, **options)
        # A finalizer runs at the end of the process too, and holds the queue, not this object.
        self._at_exit = weakref.finalize(self, close_at_exit, self._queue)

    @property
    def counts(self) -> FeedbackCounts:
        """Signals accepted, delivered and failed so far."""
        return self._queue.counts

    @abstractmethod
    def send(self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]) -> Sent:
        """Send one signal; its event id."""

    def thumbs_up(self, interaction: str, **event: Unpack[EventFields]) -> Sent:
        """The user likes the answer."""
        return self.send(interaction, SignalKind.THUMB, 1.0, **event)

    def thumbs_down(self, interaction: str, **event: Unpack[EventFields]) -> Sent:
        """The user dislikes the answer."""
        return self.send(interaction, SignalKind.THUMB, -1.0, **event)

    def withdraw(
        self,
        interaction: str,
        withdrawn: str,
        *,
        user: str | None,
        kind: SignalKind | str = SignalKind.THUMB,
        event_id: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Sent:
        """The user takes a signal back: `withdrawn` is its event id, `kind` its kind."""
        return self.send(
            interaction, kind, None, user=user, event_id=event_id, corrects=withdrawn, observed_at=observed_at
        )


class FeedbackProducer(FeedbackMethods[str]):
    """Sends signals. Thread-safe; make one a process, after any fork, and keep it.

    `send` checks the signal, queues it and returns; the log's acknowledgement comes later. A signal that is not
    acknowledged is told to `on_failure` and raised by the next `flush`. Leaving the context, `close`, and the end of
    the process flush.

    Args:
        kafka: the brokers, "host:port,host:port", or settings.
        product: the keys that the router signs with; `ProductSettings.from_environment()` reads them.
        deadline_s: longest that `send` takes, also when the log does not answer.
        on_failure: told each signal that failed, from another thread.
        options: as `QueueOptions` says.

    Raises:
        KeysMissing: `product` has no keys.
        ValueError: no brokers are named, or `source` cannot be a name.
    """

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        *,
        deadline_s: float = 2.0,
        on_failure: Callable[[FailedEvent], None] | None = None,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(kafka, product, deadline_s, options)

        def tell(record: Feedback, reason: str) -> None:
            if reason and on_failure is not None:
                on_failure(FailedEvent(record, reason))

        self._ended = None if on_failure is None else tell

    def send(self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]) -> str:
        """Queue one signal; its event id.

        Args:
            interaction: the interaction token that the router returned.
            kind: what happened.
            value: as the kind reads it (`SignalKind`); None withdraws the event that `corrects` names.
            event: its fields by name, as `EventFields` says; `user` is needed.

        Raises:
            BadFeedback: a ValueError that names the argument; `NotServed` for a token that is not this user's.
            FeedbackQueueFull, LogUnreachable: the log cannot keep up, or no broker answered; it was not taken.
            LookupError: the topic does not exist.
            FeedbackNotDelivered: the connection is beyond repair; make a new producer.
        """
        deadline = time.monotonic() + self._deadline_s
        record = self._maker.make(self._source, now_us(), interaction, kind, value, **event)
        self._queue.put(record, deadline, self._ended)
        return record.event_id

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until the log has acknowledged every signal sent so far.

        Raises FeedbackNotDelivered when signals failed since the last call, or are not acknowledged in time.
        """
        self._queue.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and close; what is not acknowledged in time is given up and has failed. Raises as `flush`."""
        self._at_exit.detach()
        self._queue.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncFeedbackProducer(FeedbackMethods[Coroutine[Any, Any, str]]):
    """Sends signals and waits for the log without blocking the event loop. Make one a process, after any fork.

    Signals that are awaited at the same time share batches: `asyncio.gather(*(producer.send(...) for ...))`.

    Arguments and errors as of `FeedbackProducer`; `deadline_s` covers the log's acknowledgement.
    """

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        *,
        deadline_s: float = 10.0,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(kafka, product, deadline_s, options)
        self._acknowledged = AwaitedDeliveries(self._queue)

    async def send(
        self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]
    ) -> str:
        """Send one signal; its event id, when the log has it. Arguments as `FeedbackProducer.send`.

        Raises:
            BadFeedback: a ValueError that names the argument; `NotServed` for a token that is not this user's.
            FeedbackQueueFull, LogUnreachable: the log cannot keep up, or no broker answered; it was not taken.
            FeedbackNotDelivered: not acknowledged within the deadline; it may have been written.
            LookupError: the topic does not exist.
        """
        record = self._maker.make(self._source, now_us(), interaction, kind, value, **event)
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

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


def close_at_exit(queue: FeedbackQueue) -> None:
    """Flush what a process leaves behind that did not close its producer; nobody is there to raise to."""
    try:
        queue.close(FLUSH_S)
    except FeedbackNotDelivered as error:
        log.error("at the end of the process: %s", error)
