"""Keeps a subscriber fed: one task reads the log as it grows, another acts on what was read.

They are apart so that a replica knows how far behind it is while it fetches a version, and so that a backlog is seen
whole and passed over the cheapest way instead of record by record. A record that cannot be used is put aside with its
bytes, and the log goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.consumers.replica.subscriber import Subscriber
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, Manifest, SkipDelta

IDLE_S = 0.25
"""How often what failed for want of time is looked at again while nothing new arrives."""

BATCH = 500


class Follower:
    """One subscriber and the log that it follows.

    Args:
        subscriber: acts on the records.
        log: manifests, skip-deltas and gate decisions; read by this object only.
        bury: puts a record aside that cannot be used, with the reason.
        poll_interval_s: how long one poll waits for a record.
        acting: is told when a move begins and ends.
        move_timeout_s: how long a move may take.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        log: LogReader,
        bury: Callable[[ConsumedRecord, str], None],
        poll_interval_s: float,
        acting: Liveness | None = None,
        move_timeout_s: float = 0.0,
    ) -> None:
        self._acting, self._move_timeout_s = acting or Liveness("", 0.0), move_timeout_s
        self._subscriber, self._log, self._bury = subscriber, log, bury
        self._poll_interval_s = poll_interval_s
        self._news = asyncio.Event()
        self._ended = False

    async def run(self, stop: asyncio.Event, check: Callable[[], None] = lambda: None) -> None:
        """Follow until stopped. `check` is called now and then and raises when there is nothing to serve any more."""
        tasks = [asyncio.create_task(self._read(stop, check)), asyncio.create_task(self._act(stop))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # The other task ends by itself: a poll or a move that is cut off would leave its thread behind.
            self._ended = True
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _read(self, stop: asyncio.Event, check: Callable[[], None]) -> None:
        while not (self._ended or stop.is_set()):
            check()
            for located in await asyncio.to_thread(self._log.poll, self._poll_interval_s, BATCH):
                if isinstance(located.record, Manifest | SkipDelta | GateDecision):
                    self._subscriber.receive(located.record)
                else:
                    kind = type(located.record).__name__
                    self._bury(located, located.error or f"a {kind} is not followed by a replica")
                self._news.set()

    async def _act(self, stop: asyncio.Event) -> None:
        while not (self._ended or stop.is_set()):
            self._news.clear()
            self._acting.beat("a move to another version", self._move_timeout_s)
            await self._subscriber.advance()
            self._acting.beat("waiting for records")
            try:
                await asyncio.wait_for(self._news.wait(), IDLE_S)
            except TimeoutError:
                continue
