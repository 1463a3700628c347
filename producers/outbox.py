"""Writes records from many coroutines to the log in batches, and tells each one when its record is acknowledged.

What holds: `write` returns only after the log's acknowledgement. A batch that the log refuses raises at every writer of
it: nothing is given up in silence. All calls to the producer run on one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import Record


@dataclass(frozen=True, slots=True)
class _Letter:
    key: str
    record: Record
    written: asyncio.Future[None]


class Outbox:
    """Batches for one topic. `prepare` may replace a record before it is written, on the producer's thread."""

    def __init__(self, producer: RecordProducer, topic: Topic, prepare: Callable[[Record], Record]) -> None:
        self._producer = producer
        self._topic = topic
        self._prepare = prepare
        self._waiting: list[_Letter] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidemill-outbox")
        self._sending: asyncio.Task[None] | None = None

    async def write(self, key: str, record: Record) -> None:
        """Write one record and wait for its acknowledgement. Raises DeliveryError."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(_Letter(key, record, written))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        await written

    async def call(self, function: Callable[[RecordProducer], None]) -> None:
        """Run something else with the producer, on its thread, and wait until the log has acknowledged it."""

        def flushed() -> None:
            function(self._producer)
            self._producer.flush()

        await asyncio.get_running_loop().run_in_executor(self._thread, flushed)

    def close(self) -> None:
        """Let the thread end when what it does is done."""
        self._thread.shutdown(wait=True)

    async def _send_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._send, batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at each writer
                _settle(batch, error)
            else:
                _settle(batch, None)

    def _send(self, batch: list[_Letter]) -> None:
        self._producer.send_acked(self._topic, [(letter.key, self._prepare(letter.record)) for letter in batch])


def _settle(batch: list[_Letter], error: Exception | None) -> None:
    for letter in batch:
        if letter.written.done():
            continue
        if error is None:
            letter.written.set_result(None)
        else:
            letter.written.set_exception(error)
