"""The progress watchdog: a stream worker that has records to read and reads none is of no use, and must end.

Faust and aiokafka are known to stall silently after a broker outage or a rebalance. The watchdog asks the broker for
the end of each assigned partition over its own connection, from its own thread, so that it sees a hung event loop too.
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
"""Longest that a worker takes to end."""
LOG = logging.getLogger("tidemill.streams")

Progress = tuple[bool, Mapping[Partition, int]]
"""Whether partitions are assigned and their state is recovered, and the next offset of each: then of the inputs, before
of the state topic."""


class Watchdog:
    """Looks at a worker's progress until stopped; ends the process where the worker does not end by itself.

    Args:
        timeout_s: without progress for this long the worker is stalled. 0: nobody looks.
        progress: asks the worker how far it is; called from the watchdog's thread.
        on_stall: takes the message of a stall; called once, from the watchdog's thread.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        timeout_s: float,
        progress: Callable[[], Progress],
        on_stall: Callable[[str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._still: IdleTimes[None] = IdleTimes(timeout_s)
        self._progress = progress
        self._on_stall = on_stall
        self._stopped = threading.Event()
        self._log = EndsClient(kafka, "tidemill-stream-watchdog")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._timeout_s:
            self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()
        if self._timeout_s:
            self._thread.join(REQUEST_TIMEOUT_S * 2)
        self._log.close()

    def stalled(self, now_s: float, progress: Progress, ends: Mapping[Partition, int]) -> str:
        """One look, with the log's end by input partition; why the worker is stalled, empty where it is not.

        A partition without an end counts as read. `now_s` is of any monotonic clock.
        """
        ready, positions = progress
        waiting = sum(max(0, ends[place] - position) for place, position in positions.items() if place in ends)
        still_s = self._still.observe(None, progress, bool(waiting) or not ready, now_s)
        if still_s is None:
            return ""
        what = f"while {waiting} records wait" if waiting else "towards being ready to read"
        return (
            f"no progress for {still_s:.0f} s {what}: the worker is stalled and must be started again "
            "(`stall_timeout_s` sets how long is too long)"
        )

    def _watch(self) -> None:
        self._still.observe(None, None, False, time.monotonic())
        while not self._stopped.wait(self._timeout_s / CHECKS_PER_TIMEOUT):
            progress = ready, positions = self._progress()
            ends: Mapping[Partition, int] = {}
            if ready:
                # Without a broker nobody can make progress, and a fresh worker could not either.
                with suppress(KafkaException):
                    ends = self._log.ends(positions, REQUEST_TIMEOUT_S)
            stall = self.stalled(time.monotonic(), progress, ends)
            if stall:
                LOG.error("%s", stall)
                self._on_stall(stall)
                # A loop that hangs in a call never gets there.
                timer = threading.Timer(STOP_TIMEOUT_S, os._exit, [EXIT_HUNG])
                timer.daemon = True
                timer.start()
                return
