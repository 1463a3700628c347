"""`FeedbackProducer`: signals from a product's backend into the log, without making the backend wait for the log."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

from tidemill.producers.feedback.event import (
    EventFields,
    FailedEvent,
    FeedbackMaker,
    FeedbackNotDelivered,
    Report,
    check_source,
)
from tidemill.producers.feedback.queue import Ended, FeedbackCounts, FeedbackQueue
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Feedback, SignalKind

log = logging.getLogger(__name__)

FLUSH_S = 30.0
Sent = TypeVar("Sent")
"""What `send` gives back: an event id, or something to await for one."""


class Shorthand(ABC, Generic[Sent]):
    """A producer's queue; thumbs and withdrawals in terms of `send`, whose arguments and errors they have."""

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        source: str,
        deadline_s: float,
        max_queued: int,
        linger_ms: float,
        delivery_timeout_s: float,
    ) -> None:
        self._maker = FeedbackMaker(product)
        self._source = check_source(source)
        self._deadline_s = deadline_s
        self._queue = open_queue(kafka, source, max_queued, linger_ms, delivery_timeout_s)
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


class FeedbackProducer(Shorthand[str]):
    """Sends signals. Thread-safe; make one a process, after any fork, and keep it.

    `send` checks the signal, queues it and returns; the log's acknowledgement comes later. A signal that is not
    acknowledged is told to `on_failure` and raised by the next `flush`. Leaving the context, `close`, and the end of
    the process flush.

    Args:
        kafka: the brokers, "host:port,host:port", or settings.
        product: the keys that the router signs with; `ProductSettings.from_environment()` reads them.
        source: who reports, for instance the name of the backend; it is written into each record.
        deadline_s: longest that `send` takes, also when the log does not answer.
        max_queued: signals that wait for the log's acknowledgement at most.
        linger_ms: milliseconds that a signal waits for others, to be written with them as one batch.
        delivery_timeout_s: seconds after which an unacknowledged signal has failed.
        on_failure: told each signal that failed, from another thread.

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
        deadline_s: float = 2.0,
        max_queued: int = 100_000,
        linger_ms: float = 5.0,
        delivery_timeout_s: float = 120.0,
        on_failure: Callable[[FailedEvent], None] | None = None,
    ) -> None:
        super().__init__(kafka, product, source, deadline_s, max_queued, linger_ms, delivery_timeout_s)
        self._ended = None if on_failure is None else _failures_to(on_failure)

    def send(
        self,
        interaction: str,
        kind: SignalKind | str,
        value: float | None,
        **event: Unpack[EventFields],
    ) -> str:
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
        report = Report(interaction, kind, value, **event)
        record = self._maker.make(report, self._source, now_us())
        self._queue.put(record, deadline, self._ended)
        return record.event_id

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until the log has acknowledged every signal sent so far.

        Raises:
            FeedbackNotDelivered: signals failed since the last call, or are not acknowledged in time.
        """
        self._queue.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and close; what is not acknowledged in time is given up and has failed. Raises as `flush`."""
        self._at_exit.detach()
        self._queue.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_queue(
    kafka: str | KafkaSettings, source: str, max_queued: int, linger_ms: float, delivery_timeout_s: float
) -> FeedbackQueue:
    """The queue of a feedback producer. Raises ValueError when no brokers are named."""
    settings = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
    return FeedbackQueue(
        settings,
        f"tidemill-feedback-{source}",
        max_queued=max_queued,
        linger_ms=linger_ms,
        delivery_timeout_s=delivery_timeout_s,
    )


def close_at_exit(queue: FeedbackQueue) -> None:
    """Flush what a process leaves behind that did not close its producer; nobody is there to raise to."""
    try:
        queue.close(FLUSH_S)
    except FeedbackNotDelivered as error:
        log.error("at the end of the process: %s", error)


def _failures_to(on_failure: Callable[[FailedEvent], None]) -> Ended:
    def ended(record: Feedback, reason: str) -> None:
        if reason:
            on_failure(FailedEvent(record, reason))

    return ended
