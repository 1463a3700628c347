"""The brokers of a test run: at most one of each kind, started by the first test that needs it.

The process that made the directory of the brokers stops them. With tests/workers.py this is the process that
distributes the tests, so that all workers use the same brokers.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.compose.processes import ChildGuard
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack

PLAIN, SECURED = "plain", "secured"
"""Folders of the directory: the local stacks of a broker without and with secured listeners."""
START_S = 600.0
"""Longest time for a broker to start beside several tests: minutes on a slow machine."""


@contextmanager
def directory_of_brokers() -> Iterator[Path]:
    """Yield a new directory; stop its brokers at the end, or when this process is killed."""
    with tempfile.TemporaryDirectory(prefix="tidemill-brokers-", ignore_cleanup_errors=True) as name:
        plain, secured = Path(name, PLAIN), Path(name, SECURED)
        with ChildGuard(plain), ChildGuard(secured):
            try:
                yield Path(name)
            finally:
                # A client that a test no longer uses lives until it is collected, and would log that its broker is
                # gone.
                gc.collect()
                for stack in (plain, secured):
                    LocalStack(StackSettings(data_dir=stack)).down(print)
