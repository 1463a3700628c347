"""How long to wait before what only time can help is tried again. Pure: fed with monotonic times."""

from __future__ import annotations

FIRST_S = 0.5
LONGEST_S = 30.0


class Patience:
    """Waits twice as long after each failure in a row."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._until = float("-inf")

    def failed(self, now: float) -> None:
        """A try failed at `now`."""
        self._until = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def succeeded(self) -> None:
        """A try succeeded."""
        self._wait_s, self._until = FIRST_S, float("-inf")

    def may_try(self, now: float) -> bool:
        """Whether it is time to try again."""
        return now >= self._until
