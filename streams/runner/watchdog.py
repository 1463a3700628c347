"""The progress watchdog: ends a stream worker that has records to read but reads none.

Faust and aiokafka are known to stall silently after a broker outage or a rebalance. The watchdog requests the end of
each assigned partition over its own connection, from its own thread, so that it also detects a hung event loop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from confluent_kafka import KafkaException

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import Partition
from tidemill.schemas.log.guard import IdleTimes
from tidemill.schemas.log.liveness import EXIT_HUNG
from tidemill.schemas.log.watermarks import EndsClient

CHECKS_PER_TIMEOUT = 10
REQUEST_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 20.0
"""Longest time that a worker may take to end."""
LOG = logging.getLogger("tidemill.streams")

Progress = tuple[bool, Mapping[Partition, int]]
"""Whether partitions are assigned and their state is recovered, and the next offset of each: of the inputs if so, of
the state topic before that."""


class Watchdog:
    """Checks a worker's progress until stopped; ends the process if the worker does not end by itself.

    Args:
        timeout_s: without progress for this long, the worker is stalled. 0: no checks.
        progress: returns the worker's progress; called from the watchdog's thread.
        on_stall: gets the message about a stall; called once, from the watchdog's thread.
    """

    def __init__(
        self, kafka: KafkaSettings, timeout_s: float, progress: Callable[[], Progress], on_stall: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._still: IdleTimes[None] = IdleTimes(timeout_s)
        self._progress = progress
        self._on_stall = on_stall
        self._stopped = threading.Event()
        self._log = EndsClient(kafka, "tidemill-stream-watchdog")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._timeout_s:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._timeout_s:
            self._thread.join(REQUEST_TIMEOUT_S * 2)
        self._log.close()

    def stalled(self, now_s: float, progress: Progress, ends: Mapping[Partition, int]) -> str:
        """Check once, with the log's end by input partition. Return why the worker is stalled; empty if it is not.

        A partition without an end counts as read. `now_s` is the time of any monotonic clock.
        """
        ready, positions = progress
        waiting = sum(max(0, ends[place] - position) for place, position in positions.items() if place in ends)
        still_s = self._still.observe(None, progress, bool(waiting) or not ready, now_s)
        if still_s is None:
            return ""
        during = f"while {waiting} records wait" if waiting else "in the recovery of the state"
        return (
            f"no progress for {still_s:.0f} s {during}: the worker is stalled and must be started again "
            "(`stall_timeout_s` sets how long is too long)"
        )

    def _watch(self) -> None:
        self._still.observe(None, None, False, time.monotonic())
        while not self._stopped.wait(self._timeout_s / CHECKS_PER_TIMEOUT):
            progress = ready, positions = self._progress()
            ends: Mapping[Partition, int] = {}
            if ready:
                # Without a broker no worker can make progress, and a new one could not either.
                with suppress(KafkaException):
                    ends = self._log.ends(positions, REQUEST_TIMEOUT_S)
            stall = self.stalled(time.monotonic(), progress, ends)
            if stall:
                LOG.error("%s", stall)
                self._on_stall(stall)
                # A hung event loop never handles `on_stall`: end the process.
                timer = threading.Timer(STOP_TIMEOUT_S, os._exit, [EXIT_HUNG])
                timer.daemon = True
                timer.start()
                return
