"""A watchdog of a role's main loop: if the loop hangs, the process prints its stacks and exits, to be restarted.

The main loop sends heartbeats. If one is overdue, a second thread writes the stacks of all threads to stderr and ends
the process with status 70, without clean-up: after its restart, a role repeats the work that it has not written. Native
code that never releases the interpreter lock blocks that thread too; the interpreter's own timer then ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from typing import Self

STDERR = 2
EXIT_HUNG = 70
LOOKS_PER_TIMEOUT = 20
LONGEST_LOOK_S = 5.0
NATIVE_TIMEOUTS = 3
"""Number of timeouts after which the interpreter's own timer ends a process whose threads cannot run."""


class Deadline:
    """The deadline of the next heartbeat. Times are seconds of any monotonic clock.

    Args:
        timeout_s: maximum time between two heartbeats.
        look_s: interval of the calls of `overdue`. After a much longer one, the whole process was suspended: no hang.
    """

    def __init__(self, timeout_s: float, look_s: float, now_s: float) -> None:
        self._timeout_s, self._look_s = timeout_s, look_s
        self._beat_s = self._looked_s = now_s
        self._within_s = timeout_s

    def beat(self, now_s: float, within_s: float | None) -> None:
        """Record a heartbeat. The next one is due within `within_s`, or within the timeout if that is longer."""
        self._beat_s, self._within_s = now_s, max(self._timeout_s, within_s or 0.0)

    def overdue(self, now_s: float) -> float | None:
        """Return the time since the last heartbeat if it is overdue, otherwise None."""
        if now_s - self._looked_s > self._timeout_s / 2 + self._look_s:
            self._beat_s = now_s
        self._looked_s = now_s
        silent_s = now_s - self._beat_s
        return silent_s if silent_s >= self._within_s else None


class Liveness:
    """A context manager that watches the main loop of this process.

    Args:
        role: name of the role, for the message.
        timeout_s: maximum duration of one iteration of the loop; 0 disables the watchdog.
    """

    def __init__(self, role: str, timeout_s: float) -> None:
        self._role, self._timeout_s = role, timeout_s
        self._activity = "starting"
        self._look_s = min(LONGEST_LOOK_S, timeout_s / LOOKS_PER_TIMEOUT)
        self._deadline = Deadline(timeout_s, self._look_s, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)

    def beat(self, activity: str = "", within_s: float | None = None) -> None:
        """Record a heartbeat of the loop.

        Args:
            activity: the next activity of the loop, for the message.
            within_s: maximum time to the next heartbeat; for work that may take longer than the timeout.
        """
        self._activity = activity or self._activity
        self._deadline.beat(time.monotonic(), within_s)

    def _delay_timer(self) -> None:
        """Start the interpreter's own timer anew."""
        faulthandler.dump_traceback_later(NATIVE_TIMEOUTS * self._timeout_s, exit=True, file=STDERR)

    def _watch(self) -> None:
        while not self._ended.wait(self._look_s):
            self._delay_timer()
            silent_s = self._deadline.overdue(time.monotonic())
            if silent_s is None:
                continue
            message = (
                f"{self._role} hangs: no progress for {silent_s:.0f} s, its last activity: {self._activity}. "
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
            # Native code may keep the interpreter before the thread runs for the first time.
            self._delay_timer()
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
