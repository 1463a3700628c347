"""Queue of feedback records: bounded, in memory; librdkafka writes its records to the log in batches.

Invariants: a record is accepted or an error is raised, within the caller's deadline; each accepted record ends once, as
delivered or as failed; librdkafka's own retries write no record twice (the producer is idempotent).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemill.producers.feedback.event import FailedEvent, FeedbackNotDelivered, FeedbackQueueFull, LogUnreachable
from tidemill.schemas.catalogue import Names, Topic, feedback_key
from tidemill.schemas.codec import Codec, RegistryError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import CREATE_TOPICS, producer_settings
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.records import Feedback

log = logging.getLogger(__name__)

POLL_S = 0.1
ROOM_POLL_S = 0.005
GIVE_UP_S = 5.0
FAILURES_KEPT = 1000
NO_ROOM = "the feedback queue stayed full until the deadline: the log takes records too slowly, or not at all"
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})

OnFailure = Callable[[FailedEvent], None]
"""Callback with a record that failed; runs on the queue's own thread, or on one that sends or flushes."""

OnEnd = Callable[[KafkaError | None, Message], None]
"""librdkafka's callback for the end of a record, with the same threads."""

Waiter = asyncio.Future[str]
"""Future for the reason why a record failed; empty if the log has it."""


@dataclass(frozen=True, slots=True)
class FeedbackCounts:
    accepted: int
    delivered: int
    failed: int

    @property
    def pending(self) -> int:
        """The number of accepted records that are neither delivered nor failed."""
        return self.accepted - self.delivered - self.failed


class FeedbackQueue:
    """Queues feedback records and reports the end of each. Thread-safe; one per process, not usable after a fork.

    Args:
        kafka: the brokers, "host:port,host:port", or settings.
        confirms: whether `deliver` can be used. If not, only failures are reported, which takes less time.

    The others are described in `producer.QueueOptions`. Raises ValueError if no brokers are named.
    """

    def __init__(
        self,
        kafka: str | KafkaSettings,
        source: str = "sdk",
        max_queued: int = 100_000,
        linger_ms: float = 5.0,
        delivery_timeout_s: float = 120.0,
        *,
        confirms: bool = True,
    ) -> None:
        kafka = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
        self._topic = Names(kafka.topic_prefix).of(Topic.FEEDBACK)
        self._codec = Codec(kafka.registry_url)
        own = {
            "queue.buffering.max.messages": max_queued,
            "linger.ms": linger_ms,
            "delivery.timeout.ms": round(delivery_timeout_s * 1000),
        }
        settings = producer_settings(kafka, f"tidemill-feedback-{source}")
        settings |= {**own, **kafka.client_options, "delivery.report.only.error": not confirms}
        self._producer = Producer(settings)
        self._process = os.getpid()
        self._lock = threading.Lock()
        """Held while the counts and failures below are read or changed."""
        self._accepted = self._failed = 0
        self._failures: deque[FailedEvent] = deque(maxlen=FAILURES_KEPT)
        self._unreported = 0
        self._partitions = 0
        """The topic's partition count; 0 until a broker, and the schema registry if there is one, have answered."""
        self._asking = threading.Lock()
        self._come: deque[tuple[Waiter, str]] = deque()
        """Ended records of `deliver` with their reasons, from the poller's thread."""
        self._woken = False
        self._closed = threading.Event()

        def poll() -> None:
            while not self._closed.is_set():
                self._producer.poll(POLL_S)

        self._poller = threading.Thread(target=poll, name="feedback-delivery", daemon=True)
        self._poller.start()

    @property
    def counts(self) -> FeedbackCounts:
        """Counts of the records so far, by their end."""
        with self._lock:
            # librdkafka's count contains each record until its callback has returned, and batches of ended ones.
            delivered = self._accepted - len(self._producer) - self._failed
            return FeedbackCounts(self._accepted, max(0, delivered), self._failed)

    def put(self, record: Feedback, deadline: float, on_end: OnEnd) -> None:
        """Queue one record; wait until `deadline`, of `time.monotonic()`, for a broker's first answer and for room.

        `on_end` is `end` with its first argument. One callback for all records is much faster than one for each.

        Raises:
            FeedbackQueueFull, LogUnreachable: not within the deadline; the record was not accepted.
            LookupError: the topic does not exist.
            FeedbackNotDelivered: the producer cannot write any more.
            RuntimeError: the queue is closed, or was made before a fork.
        """
        if not self._partitions:
            self._begin(record, deadline)
        while not self.offer(record, on_end):
            left = deadline - time.monotonic()
            if left <= 0:
                raise FeedbackQueueFull(NO_ROOM)
            self._producer.poll(min(ROOM_POLL_S, left))

    def offer(self, record: Feedback, on_end: OnEnd) -> bool:
        """Queue one record without waiting, after the queue's first requests; return whether there was room.

        Raises like `put`.
        """
        self._check_usable()
        try:
            self._producer.produce(
                self._topic,
                self._codec.encode(record),
                feedback_key(record.interaction_id, record.event_id).encode(),
                partition_of(record.interaction_id, self._partitions),
                on_end,
            )
        except BufferError:
            return False
        except KafkaException as error:
            reason = f"the producer can write no more ({error}): make a new one"
            raise FeedbackNotDelivered(reason, (FailedEvent(record, str(error)),)) from error
        with self._lock:
            self._accepted += 1
        return True

    async def deliver(self, records: Sequence[Feedback], deadline_s: float) -> list[str]:
        """Write records (at least one), wait for the log, and return why each failed, in order; empty if it did not.

        For asyncio, from one event loop; records that end together wake it up once. Raises like `put`, for all records;
        FeedbackQueueFull if there was no room for the first one.
        """
        deadline = time.monotonic() + deadline_s
        if not self._partitions:
            await asyncio.to_thread(self._begin, records[0], deadline)
        waiters: list[Waiter] = []
        for record in records:
            waiter: Waiter = asyncio.get_running_loop().create_future()
            on_end = partial(self._confirm, waiter)
            while not (taken := self.offer(record, on_end)) and time.monotonic() < deadline:
                await asyncio.sleep(ROOM_POLL_S)
            if not taken:
                break
            waiters.append(waiter)
        if not waiters:
            raise FeedbackQueueFull(NO_ROOM)
        await asyncio.wait(waiters, timeout=max(0.0, deadline - time.monotonic()))
        late = f"not acknowledged within {deadline_s:g} s"
        reasons = [waiter.result() if waiter.done() else late for waiter in waiters]
        return reasons + [NO_ROOM] * (len(records) - len(waiters))

    def _begin(self, record: Feedback, deadline: float) -> None:
        """Request what all records need, once: the topic's partition count, and their schema's id from a registry.

        Raises LogUnreachable, LookupError.
        """
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LogUnreachable("no Kafka broker answered within the deadline")
        try:
            if not self._partitions:
                partitions = self.ask_partitions(deadline - time.monotonic())
                self._codec.encode(record)
                self._partitions = partitions
        except RegistryError as error:
            raise LogUnreachable(str(error)) from error
        finally:
            self._asking.release()

    def ask_partitions(self, timeout_s: float) -> int:
        """Return the topic's partition count, from a broker. Raises LogUnreachable, LookupError."""
        self._check_usable()
        try:
            # A request for one topic by name would create it on a broker that creates topics automatically.
            topics = self._producer.list_topics(timeout=max(0.001, timeout_s)).topics
        except KafkaException as error:
            raise LogUnreachable(f"no Kafka broker answered within the deadline: {error.args[0].str()}") from error
        if self._topic not in topics:
            raise LookupError(f"topic {self._topic} does not exist: {CREATE_TOPICS}")
        if not (partitions := topics[self._topic].partitions):
            raise LogUnreachable(
                f"the brokers do not name the partitions of {self._topic}: {topics[self._topic].error}"
            )
        return len(partitions)

    def flush(self, timeout_s: float) -> None:
        """Wait until every record accepted so far has ended.

        Raises FeedbackNotDelivered if records failed since the last call, or have not ended in time.
        """
        self._check_usable()
        pending = self._producer.flush(timeout_s)
        self._raise_failures()
        if pending:
            raise FeedbackNotDelivered(f"{pending} signals not acknowledged within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """Flush, drop the records that have not ended, and end the thread. A second call does nothing.

        Raises FeedbackNotDelivered if records failed since the last `flush`, dropped records included.
        """
        if self._closed.is_set() or self._process != os.getpid():
            return
        self._producer.flush(timeout_s)
        self._closed.set()
        self._poller.join()
        deadline = time.monotonic() + GIVE_UP_S
        while len(self._producer) and time.monotonic() < deadline:
            self._producer.purge()
            self._producer.flush(POLL_S)
        self._raise_failures()

    def _confirm(self, waiter: Waiter, error: KafkaError | None, message: Message) -> None:
        """Pass the end of a record to the event loop. Runs on the queue's thread."""
        self.end(None, error, message)
        self._come.append((waiter, _reason(error)))
        loop = waiter.get_loop()
        # Appended before `_woken` is read, which `_settle` clears before it reads the deque: no result is missed.
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._woken = False
        while self._come:
            waiter, reason = self._come.popleft()
            if not waiter.done():
                waiter.set_result(reason)

    def _raise_failures(self) -> None:
        with self._lock:
            failed, count = tuple(self._failures), self._unreported
            self._failures.clear()
            self._unreported = 0
        if count:
            raise FeedbackNotDelivered(f"{count} signals not delivered; the last: {failed[-1].reason}", failed)

    def end(self, on_failure: OnFailure | None, error: KafkaError | None, message: Message) -> None:
        """Count a record if it failed, and pass it to `on_failure`. librdkafka counts the others."""
        if error is None:
            return
        record = self._codec.decode(message.value())
        assert isinstance(record, Feedback)
        failed = FailedEvent(record, _reason(error))
        with self._lock:
            self._failed += 1
            self._unreported += 1
            self._failures.append(failed)
        if on_failure is None:
            return
        try:
            on_failure(failed)
        except Exception:  # the caller's own code: its error must not end the thread of the other callbacks
            log.exception("the callback for feedback event %s raised", record.event_id)

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this feedback producer was made before a fork: make one in each process")
        if self._closed.is_set():
            raise RuntimeError("this feedback producer is closed")


def _reason(error: KafkaError | None) -> str:
    if error is None:
        return ""
    return "not acknowledged before the producer was closed" if error.code() in PURGED else error.str()
