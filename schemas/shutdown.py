"""Clean shutdown of a role: SIGINT and SIGTERM set an event that the role watches."""

from __future__ import annotations

import signal
import threading


def stop_on_signals() -> threading.Event:
    """An event that the first SIGINT or SIGTERM sets. Call it from the main thread."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
