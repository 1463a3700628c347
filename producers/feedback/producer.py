"""`FeedbackProducer` and `AsyncFeedbackProducer`: write signals from a product's backend to the log."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from tidemill.producers.feedback.event import (
    EventFields,
    FailedEvent,
    FeedbackMaker,
    FeedbackNotDelivered,
    check_source,
)
from tidemill.producers.feedback.queue import FeedbackCounts, FeedbackQueue
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import SignalKind

log = logging.getLogger(__name__)

FLUSH_S = 30.0
MOST_S = 86_400
"""Longest deadline, in seconds: a lock cannot wait without a limit. 0 is refused: librdkafka takes it for no limit."""
Sent = TypeVar("Sent")
"""The result of `send`: an event id, or a coroutine that returns one."""


class QueueOptions(TypedDict, total=False):
    """Options of both producers."""

    source: str
    """The reporter, for instance the name of the backend; each record contains it. By default "sdk"."""
    max_queued: int
    """Most signals that wait for the log's acknowledgement. By default 100,000."""
    linger_ms: float
    """Milliseconds that a signal waits for others, to be written in one batch. By default 5."""
    delivery_timeout_s: float
    """Seconds after which an unacknowledged signal has failed. By default 120."""


class FeedbackMethods(ABC, Generic[Sent]):
    """Base of the producers: the queue; votes and withdrawals call `send`, with its arguments and errors."""

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        deadline_s: float,
        options: QueueOptions,
        confirms: bool,
    ) -> None:
        self._maker = FeedbackMaker(product)
        self._source = check_source(options.get("source", "sdk"))
        for name, seconds in (("deadline_s", deadline_s), ("delivery_timeout_s", options.get("delivery_timeout_s", 1))):
            if not 0 < seconds <= MOST_S:
                raise ValueError(f"{name} is {seconds}: give seconds above 0, and at most {MOST_S}")
        self._deadline_s = deadline_s
        self._queue = FeedbackQueue(kafka, **options, confirms=confirms)
        # A finalizer also runs at the end of the process, and references the queue, not this object.
        self._at_exit = weakref.finalize(self, close_at_exit, self._queue)

    @property
    def counts(self) -> FeedbackCounts:
        """Counts of the signals accepted, delivered and failed so far."""
        return self._queue.counts

    @abstractmethod
    def send(self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]) -> Sent:
        """Send one signal, and return its event id."""

    def thumbs_up(self, interaction: str, **event: Unpack[EventFields]) -> Sent:
        """Report that the user likes the answer."""
        return self.send(interaction, SignalKind.THUMB, 1.0, **event)

    def thumbs_down(self, interaction: str, **event: Unpack[EventFields]) -> Sent:
        """Report that the user dislikes the answer."""
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
        """Report that the user withdrew a signal: `withdrawn` is its event id, `kind` its kind."""
        return self.send(
            interaction, kind, None, user=user, event_id=event_id, corrects=withdrawn, observed_at=observed_at
        )


class FeedbackProducer(FeedbackMethods[str]):
    """Sends signals. Thread-safe; make one for each process, after any fork, and keep it.

    `send` checks the signal, queues it and returns; the log's acknowledgement comes later. A signal that is not
    acknowledged is passed to `on_failure` and raised by the next `flush`. The end of the context, `close`, and the end
    of the process flush.

    Args:
        kafka: the brokers, "host:port,host:port", or settings.
        product: the keys that the router signs with; `ProductSettings.from_environment()` reads them.
        deadline_s: longest time that `send` takes, also if the log does not answer. The first one takes longer if a
            schema registry is slow.
        on_failure: called for each failed signal, from another thread.
        options: see `QueueOptions`.

    Raises:
        KeysMissing: `product` has no keys.
        ValueError: no brokers are named, or `source` is not a valid name.
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
        super().__init__(kafka, product, deadline_s, options, confirms=False)
        # The queue does not keep `on_failure`, which may refer to this object: the finalizer would never run.
        self._on_end = partial(self._queue.end, on_failure)

    def send(self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]) -> str:
        """Queue one signal, and return its event id.

        Args:
            interaction: the interaction token that the router returned.
            kind: kind of the signal.
            value: as `SignalKind` defines it for the kind; None withdraws the event that `corrects` names.
            event: the fields in `EventFields` by name; `user` is required.

        Raises:
            BadFeedback: a ValueError that names the argument; `NotServed` for a token that is not this user's.
            FeedbackQueueFull, LogUnreachable: the log is too slow, or no broker, or no schema registry, answered; the
                signal was not accepted.
            LookupError: the topic does not exist.
            FeedbackNotDelivered: the connection cannot be used any more; make a new producer.
        """
        deadline = time.monotonic() + self._deadline_s
        record = self._maker.make(self._source, now_us(), interaction, kind, value, **event)
        self._queue.put(record, deadline, self._on_end)
        return record.event_id

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until the log has acknowledged every signal sent so far.

        Raises FeedbackNotDelivered if signals failed since the last call, or are not acknowledged in time.
        """
        self._queue.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and close; signals that are not acknowledged in time have failed. Raises like `flush`."""
        self._at_exit.detach()
        self._queue.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncFeedbackProducer(FeedbackMethods[Coroutine[Any, Any, str]]):
    """Sends signals and waits for the log without blocking the event loop. Make one for each process, after any fork.

    Signals that are awaited at the same time share batches: `asyncio.gather(*(producer.send(...) for ...))`.

    Arguments and errors as for `FeedbackProducer`; `deadline_s` includes the log's acknowledgement.
    """

    def __init__(
        self,
        kafka: str | KafkaSettings,
        product: ProductSettings,
        *,
        deadline_s: float = 10.0,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(kafka, product, deadline_s, options, confirms=True)

    async def send(
        self, interaction: str, kind: SignalKind | str, value: float | None, **event: Unpack[EventFields]
    ) -> str:
        """Send one signal, and return its event id when the log has it.

        Arguments and errors are those of `FeedbackProducer.send`. FeedbackNotDelivered is also raised if the log does
        not acknowledge the signal within the deadline; it may have been written.
        """
        record = self._maker.make(self._source, now_us(), interaction, kind, value, **event)
        reason = (await self._queue.deliver([record], self._deadline_s))[0]
        if reason:
            raise FeedbackNotDelivered(f"the signal was not acknowledged: {reason}", (FailedEvent(record, reason),))
        return record.event_id

    async def aclose(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and close; a signal not acknowledged by then has failed, and its awaited `send` raises."""
        self._at_exit.detach()
        with suppress(FeedbackNotDelivered):  # `send` has raised each failure
            await asyncio.to_thread(self._queue.close, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


def close_at_exit(queue: FeedbackQueue) -> None:
    """Flush the queue of a producer that its process did not close. Logs failures, since no caller can catch them."""
    try:
        queue.close(FLUSH_S)
    except FeedbackNotDelivered as error:
        log.error("at the end of the process: %s", error)
