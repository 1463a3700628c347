"""The producers' access to the log: batches of records from many coroutines, the claim check, the run's first anchor.

Invariants: `Outbox.write` returns only after the log's acknowledgement. If the log refuses a batch, each writer of that
batch, and each that waits behind it, gets the error: no failure is silent, and nothing is written long after it. If the
object store refuses a record, only its own writer does. All calls to the producer run on one thread, and records with
equal keys stay in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Anchor, Claim, Interaction, Manifest, Record, Rollout, Segment
from tidemill.schemas.stored_object import digest, store_claim

LOG = logging.getLogger(__name__)
POST_S = 0.02
"""How long a posted record waits for others to share its batch, in seconds."""
ANCHOR_POLL_S = 0.2
OVERHEAD_BYTES = 4096
"""Upper bound for the fields of a rollout or an interaction without its segments, reward components and metrics."""
SPAN_BYTES = 30
"""Upper bound for one version span."""


class _OutgoingRecord(NamedTuple):
    topic: Topic
    key: str
    record: Record
    written: asyncio.Future[None] | None
    """None for a posted record, which no writer waits for."""


class Outbox:
    """Writes records in batches, to one topic if a call names no other.

    `prepare` may replace a record before it is written, on the producer's thread.
    """

    def __init__(self, producer: RecordProducer, topic: Topic, prepare: Callable[[Record], Record]) -> None:
        self._producer, self._topic, self._prepare = producer, topic, prepare
        self._waiting: list[_OutgoingRecord] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidemill-outbox")
        self._sending: asyncio.Task[None] | None = None
        self._posting: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    async def write(self, key: str, record: Record, topic: Topic | None = None) -> None:
        """Write one record and wait for its acknowledgement. If this is cancelled, the record may still be written.

        Raises DeliveryError, also the error of an earlier posted record.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(_OutgoingRecord(topic or self._topic, key, record, written))
        self._begin()
        await written

    def post(self, key: str, record: Record, topic: Topic | None = None) -> None:
        """Queue one record without waiting. If it fails, the next `write`, or `drain`, raises the error."""
        self._waiting.append(_OutgoingRecord(topic or self._topic, key, record, None))
        if self._posting is None:
            self._posting = asyncio.get_running_loop().call_later(POST_S, self._begin)

    async def drain(self) -> None:
        """Wait until all posted records are acknowledged. Raises DeliveryError."""
        self._begin()
        if self._sending is not None:
            await self._sending
        if self._failure is not None:
            raise self._failure

    async def call(self, function: Callable[[RecordProducer], None]) -> None:
        """Run a function with the producer, on its thread, and wait until the log has acknowledged its records."""

        def flushed() -> None:
            function(self._producer)
            self._producer.flush()

        await asyncio.get_running_loop().run_in_executor(self._thread, flushed)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _begin(self) -> None:
        if self._posting is not None:
            self._posting.cancel()
            self._posting = None
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                failures = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, batch)
            except Exception as error:  # noqa: BLE001 - any error is raised at each writer
                batch, self._waiting = batch + self._waiting, []
                failures = [error] * len(batch)
            for outgoing, failure in zip(batch, failures, strict=True):
                if outgoing.written is None:
                    self._failure = failure or self._failure
                elif outgoing.written.done():  # its writer was cancelled
                    continue
                elif failure is None:
                    outgoing.written.set_result(None)
                else:
                    outgoing.written.set_exception(failure)

    def _send(self, batch: list[_OutgoingRecord]) -> list[Exception | None]:
        """Write a batch; return the error of each record that could not be prepared. Raises DeliveryError."""
        failures: list[Exception | None] = [None] * len(batch)
        for place, outgoing in enumerate(batch):
            try:
                self._producer.send(outgoing.topic, self._prepare(outgoing.record), key=outgoing.key)
            except DeliveryError:
                raise
            except Exception as error:  # noqa: BLE001 - of the store, for instance, which the other records do not need
                failures[place] = error
        self._producer.flush()
        return failures


class SegmentClaims:
    """Stores the bytes of a record that is too large for the log in the object store.

    Invariants: the claimed bytes are the whole record, encoded as on the log, so that `schemas.stored_object` returns
    it unchanged; their name is their digest, so that storing them again writes the same object.
    """

    def __init__(self, root: str, run_id: str, limit_bytes: int, codec: Codec) -> None:
        self._root = f"{root.rstrip('/')}/{run_id}/claims"
        self._limit_bytes, self._codec = limit_bytes, codec

    def keep(self, payload: bytes) -> Claim:
        """Store bytes that a record refers to in addition to its segments."""
        return store_claim(self._root, digest(payload), payload)

    def checked(self, record: Record) -> Record:
        """Return the record to write to the log: unchanged, or with a claim in place of its segments."""
        if not isinstance(record, Rollout | Interaction):
            return record
        arrays = sum(len(s.token_ids) + len(s.loss_mask) + len(s.logprobs) for s in record.segments)
        spans = sum(len(segment.spans) for segment in record.segments)
        if OVERHEAD_BYTES + arrays + SPAN_BYTES * spans <= self._limit_bytes:
            return record
        no_segments: list[Segment] = []
        return replace(record, segments=no_segments, claim=self.keep(self._codec.encode(record)))


def anchor_of_run(kafka: KafkaSettings, run: RunSettings, stop: threading.Event) -> str | None:
    """Return the address of the run's first anchor, from which a role loads its tokenizer and chat template.

    Waits for it on `weights.manifests`; returns None if `stop` is set first.
    """
    LOG.info("waiting for the first anchor of run %s on %s, for its tokenizer", run.run_id, Topic.MANIFESTS)
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-first-anchor") as reader:
        while not stop.is_set():
            for located in reader.poll(ANCHOR_POLL_S):
                match located.record:
                    case Manifest(run_id=run.run_id, branch=run.branch, anchor=Anchor(uri=address)):
                        return address
    return None
