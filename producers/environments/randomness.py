"""Random states of their own for libraries that draw from Python's global generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class OwnRandomness:
    """A state of the module `random` that belongs to one episode, so that episodes side by side do not mix."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the global generator go on from this state, and give it back after. Do not await within."""
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)
