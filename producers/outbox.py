"""Writes records from many coroutines to the log in batches, and tells each one when its record is acknowledged.

What holds: `write` returns only after the log's acknowledgement. A batch that the log refuses raises at every writer of
it: nothing is given up in silence. All calls to the producer run on one thread, and records of one key stay in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Record

POST_S = 0.02
"""How long a posted record waits for others to go with it."""


@dataclass(frozen=True, slots=True)
class _Letter:
    topic: Topic
    key: str
    record: Record
    written: asyncio.Future[None] | None
    """None for a record that nobody waits for."""


class Outbox:
    """Batches, for one topic where no other is named.

    `prepare` may replace a record before it is written, on the producer's thread.
    """

    def __init__(self, producer: RecordProducer, topic: Topic, prepare: Callable[[Record], Record]) -> None:
        self._producer = producer
        self._topic = topic
        self._prepare = prepare
        self._waiting: list[_Letter] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidemill-outbox")
        self._sending: asyncio.Task[None] | None = None
        self._posting: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    async def write(self, key: str, record: Record, topic: Topic | None = None) -> None:
        """Write one record and wait for its acknowledgement. Raises DeliveryError."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(_Letter(topic or self._topic, key, record, written))
        self._begin()
        await written

    def post(self, key: str, record: Record, topic: Topic | None = None) -> None:
        """Write one record soon, and wait for nothing.

        Raises what was raised by a batch of posted records alone, at the next call.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._waiting.append(_Letter(topic or self._topic, key, record, None))
        if self._posting is None:
            self._posting = asyncio.get_running_loop().call_later(POST_S, self._begin)

    async def drain(self) -> None:
        """Wait until everything that was posted is acknowledged. Raises DeliveryError."""
        self._begin()
        if self._sending is not None:
            await self._sending
        if self._failure is not None:
            raise self._failure

    async def call(self, function: Callable[[RecordProducer], None]) -> None:
        """Run something else with the producer, on its thread, and wait until the log has acknowledged it."""

        def flushed() -> None:
            function(self._producer)
            self._producer.flush()

        await asyncio.get_running_loop().run_in_executor(self._thread, flushed)

    def close(self) -> None:
        """Let the thread end when what it does is done."""
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
                await asyncio.get_running_loop().run_in_executor(self._thread, self._send, batch)
            except Exception as error:  # noqa: BLE001 - any error is raised at each writer
                if not _settle(batch, error):
                    self._failure = error
            else:
                _settle(batch, None)

    def _send(self, batch: list[_Letter]) -> None:
        for letter in batch:
            self._producer.send(letter.topic, self._prepare(letter.record), key=letter.key)
        self._producer.flush()


def _settle(batch: list[_Letter], error: Exception | None) -> bool:
    """Tell the writers; whether there was one."""
    waiting = [letter.written for letter in batch if letter.written is not None and not letter.written.done()]
    for written in waiting:
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)
    return bool(waiting)
