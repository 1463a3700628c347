"""One command at a time on a directory: an advisory lock on a file in it, freed by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.compose.stack.errors import StackBusy

POLL_S = 0.1


@contextmanager
def exclusive(path: Path, timeout_s: float, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`; StackBusy when another process keeps it longer than `timeout_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(descriptor, path, timeout_s, progress)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout_s: float, progress: Callable[[str], None]) -> None:
    if _try_lock(descriptor):
        return
    progress(f"another command is at work in {path.parent}; waiting for it")
    deadline = time.monotonic() + timeout_s
    while not _try_lock(descriptor):
        if time.monotonic() >= deadline:
            raise StackBusy(f"{path} is still held by another command after {timeout_s:.0f} s; wait for it or end it")
        time.sleep(POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
