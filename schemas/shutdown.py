"""Clean shutdown of a role: SIGINT and SIGTERM set an event that the role watches, or wait until they can be heeded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> threading.Event:
    """An event that the first SIGINT or SIGTERM sets; a later SIGINT raises KeyboardInterrupt. For the main thread."""
    stop = threading.Event()

    def heed(number: int, _frame: object) -> None:
        if number == signal.SIGINT and stop.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT and os.isatty(2):
            os.write(2, b"\nstopping; Ctrl-C again ends at once\n")  # a handler must not enter a buffered stream
        stop.set()

    for number in STOPS:
        signal.signal(number, heed)
    return stop


@contextmanager
def signals_deferred() -> Iterator[None]:
    """SIGINT and SIGTERM that come within the block take effect at its end.

    For code that swallows what a handler raises: Python does while it forks, and the interrupt would be lost.
    """
    caught: dict[int, None] = {}
    try:
        with ExitStack() as restored:
            # Handlers run in the main thread alone, and only there can they be set.
            if threading.current_thread() is threading.main_thread():
                for number in STOPS:
                    before = signal.signal(number, lambda number, _frame: caught.setdefault(number))
                    restored.callback(signal.signal, number, before)
            yield
    finally:
        for came in caught:
            signal.raise_signal(came)
