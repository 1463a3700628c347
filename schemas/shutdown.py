"""Clean shutdown of a role: SIGINT and SIGTERM set an event that the role watches, are deferred during a block, or end
the process within it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT or SIGTERM sets; a later SIGINT raises KeyboardInterrupt. For the main thread."""
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
    """Defer SIGINT and SIGTERM that arrive within the block to its end.

    For code that discards an exception of a signal handler: Python does so during a fork, and would lose the interrupt.
    """
    caught: dict[int, None] = {}
    try:
        with ExitStack() as restored:
            # Handlers run only in the main thread, and can be set only there.
            if threading.current_thread() is threading.main_thread():
                for number in STOPS:
                    before = signal.signal(number, lambda number, _frame: caught.setdefault(number))
                    restored.callback(signal.signal, number, before)
            yield
    finally:
        for came in caught:
            signal.raise_signal(came)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise SystemExit at SIGINT or SIGTERM within the block: for a long call that blocks an event loop, whose own
    handlers would run only after it. For the main thread."""

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    with ExitStack() as restored:
        for number in STOPS:
            restored.callback(signal.signal, number, signal.signal(number, end))
        yield
