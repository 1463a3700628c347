"""When a replayed record is due: at the pace of the original, a multiple of it, or at once. Arithmetic over a clock."""

from __future__ import annotations

from collections.abc import Callable

ORIGINAL = "original"
FULL = "max"

Clock = Callable[[], float]
"""Seconds, from any beginning; never goes back."""


def speed_of(text: str) -> float | None:
    """How many seconds of the log pass in one second: `original`, `max` (None) or a number above 0, `10` or `10x`.

    Raises ValueError.
    """
    if text == FULL:
        return None
    if text == ORIGINAL:
        return 1.0
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"--speed {text!r}: give `original`, `max`, or a multiple above 0 such as 10 or 0.5")
    return factor


class Pacer:
    """Says how long a record has to wait. The first record that it is asked of is due at once."""

    def __init__(self, speed: float | None, clock: Clock) -> None:
        self._speed, self._clock = speed, clock
        self._origin: tuple[float, int] | None = None

    def wait_s(self, reached_ms: int) -> float:
        """Seconds, at least 0, until a record written at `reached_ms` is due. Times must not go back."""
        if self._speed is None:
            return 0.0
        if self._origin is None:
            self._origin = (self._clock(), reached_ms)
        began, first_ms = self._origin
        due = began + (reached_ms - first_ms) / 1_000 / self._speed
        return max(0.0, due - self._clock())
