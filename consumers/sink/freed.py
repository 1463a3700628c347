"""Gives freed memory back to the system: what a flush took must not stay with the process until the next larger one.

Arrow's pool and the C library keep what was freed for later use, the latter for each thread that ever allocated, so
that a process which reads, writes and answers in several threads holds several flushes' worth.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa


def give_back() -> None:
    """Give back what can be; where the C library is not GNU's, what Arrow holds alone."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
