"""Imports of large libraries in programs of the tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection, which takes a third of the time of imports, and leave what they made out of later
    collections: vLLM collects several times while an engine starts."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
