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
from dataclasses import dataclass

from confluent_kafka import KafkaException

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Partition
from tidemill.schemas.log.guard import Stillness
from tidemill.schemas.log.liveness import EXIT_HUNG
from tidemill.schemas.log.watermarks import EndsClient

CHECKS_PER_TIMEOUT = 10
REQUEST_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 20.0
"""Longest that a worker takes to end."""
WORKER = "worker"
LOG = logging.getLogger("tidemill.streams")


@dataclass(frozen=True, slots=True)
class Stall:
    """There was work and none was done for `seconds`."""

    seconds: float
    waiting: int
    """Records that wait; 0 when the worker never got to the point of reading."""

    def __str__(self) -> str:
        what = f"while {self.waiting} records wait" if self.waiting else "towards being ready to read"
        return (
            f"no progress for {self.seconds:.0f} s {what}: the worker is stalled and must be started again "
            "(`stall_timeout_s` sets how long is too long)"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a worker."""

    ready: bool
    """Partitions are assigned and their state is recovered."""
    positions: Mapping[Partition, int]
    """Next offset by input partition when ready; before, by partition of the state topic."""


class ProgressRule:
    """Decides from successive looks whether the worker is stalled. Times are seconds of any monotonic clock."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._still: Stillness[str] = Stillness(timeout_s)
        self._still.observe(WORKER, None, False, now_s)

    def observe(self, now_s: float, progress: Progress, ends: Mapping[Partition, int]) -> Stall | None:
        """One look, with the log's end by input partition; a partition without an end counts as read."""
        waiting = sum(max(0, ends[p] - position) for p, position in progress.positions.items() if p in ends)
        still_s = self._still.observe(WORKER, progress, bool(waiting) or not progress.ready, now_s)
        return None if still_s is None else Stall(still_s, waiting)


class Watchdog:
    """Looks at a worker's progress until stopped; ends the process where the worker does not end by itself.

    Args:
        timeout_s: without progress for this long the worker is stalled. 0: nobody looks.
        progress: asks the worker how far it is; called from the watchdog's thread.
        on_stall: called once, from the watchdog's thread.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        timeout_s: float,
        progress: Callable[[], Progress],
        on_stall: Callable[[Stall], None],
    ) -> None:
        self._timeout_s = timeout_s
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

    def _watch(self) -> None:
        rule = ProgressRule(self._timeout_s, time.monotonic())
        while not self._stopped.wait(self._timeout_s / CHECKS_PER_TIMEOUT):
            progress, ends = self._progress(), {}
            if progress.ready:
                # Without a broker nobody can make progress, and a fresh worker could not either.
                with suppress(KafkaException):
                    ends = self._log.ends(progress.positions, REQUEST_TIMEOUT_S)
            stall = rule.observe(time.monotonic(), progress, ends)
            if stall:
                LOG.error("%s", stall)
                self._on_stall(stall)
                # A loop that hangs in a call never gets there.
                timer = threading.Timer(STOP_TIMEOUT_S, os._exit, [EXIT_HUNG])
                timer.daemon = True
                timer.start()
                return
