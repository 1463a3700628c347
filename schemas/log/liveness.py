"""A process that does not come round any more is of no use: it says where it hangs and ends, to be started again.

The main loop of a role beats. When no beat came in time, a thread beside it writes every thread's stack to stderr and
ends the process with status 70, past all clean-up: what a role has not written it does again after its restart. Native
code that never lets go of the interpreter stops that thread too; the interpreter's own timer ends the process then.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from types import TracebackType
from typing import Self

STDERR = 2
EXIT_HUNG = 70
LOOKS_PER_TIMEOUT = 20
LONGEST_LOOK_S = 5.0
NATIVE_TIMEOUTS = 3
"""Time-outs after which the interpreter's own timer ends a process whose threads cannot run."""


class Deadline:
    """When a beat is overdue. Times are seconds of any monotonic clock.

    Args:
        timeout_s: how long a beat may take to come after the one before.
        look_s: how often `overdue` is asked; when it was not, the whole process slept, and nobody is to blame.
    """

    def __init__(self, timeout_s: float, look_s: float, now_s: float) -> None:
        self._timeout_s, self._look_s = timeout_s, look_s
        self._beat_s = self._looked_s = now_s
        self._within_s = timeout_s

    def beat(self, now_s: float, within_s: float | None) -> None:
        """The loop came round; the next beat comes within `within_s`, the time-out where that is longer."""
        self._beat_s, self._within_s = now_s, max(self._timeout_s, within_s or 0.0)

    def overdue(self, now_s: float) -> float | None:
        """How long ago the last beat was, when that is too long."""
        if now_s - self._looked_s > self._timeout_s / 2 + self._look_s:
            self._beat_s = now_s
        self._looked_s = now_s
        silent_s = now_s - self._beat_s
        return silent_s if silent_s >= self._within_s else None


class Liveness:
    """Watches this process's main loop while it is entered as a context.

    Args:
        role: what the process is, for the message.
        timeout_s: how long the loop may take to come round; 0 watches nothing.
    """

    def __init__(self, role: str, timeout_s: float) -> None:
        self._role, self._timeout_s = role, timeout_s
        self._activity = "starting"
        self._look_s = min(LONGEST_LOOK_S, timeout_s / LOOKS_PER_TIMEOUT)
        self._deadline = Deadline(timeout_s, self._look_s, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)

    def beat(self, activity: str = "", within_s: float | None = None) -> None:
        """The loop came round.

        Args:
            activity: what it does next, for the message.
            within_s: the next beat comes within this; for work that may take longer than the time-out.
        """
        self._activity = activity or self._activity
        self._deadline.beat(time.monotonic(), within_s)

    def _watch(self) -> None:
        while not self._ended.wait(self._look_s):
            faulthandler.dump_traceback_later(NATIVE_TIMEOUTS * self._timeout_s, exit=True, file=STDERR)
            silent_s = self._deadline.overdue(time.monotonic())
            if silent_s is None:
                continue
            message = (
                f"{self._role} hangs: no progress for {silent_s:.0f} s, the last thing it did was: {self._activity}. "
                f"The process ends with status {EXIT_HUNG}, to be started again (`kafka.stall_timeout_s` sets how long "
                "is too long). Its threads:\n"
            )
            os.write(STDERR, message.encode())
            faulthandler.dump_traceback(STDERR, all_threads=True)
            os._exit(EXIT_HUNG)
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> Self:
        if self._timeout_s:
            self.beat()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
