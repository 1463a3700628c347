"""Times the engine's steps: the yardstick that a weight update's pause is read against.

Pure: fed with monotonic times, so that it can be tested without an engine.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW_S = 5.0
_KEPT = 1024


class StepClock:
    """Time from one finished engine step to the next while requests are running."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._previous_end: float | None = None

    def record(self, start: float, end: float, busy_after: bool) -> None:
        """Note a step over [start, end) seconds; `busy_after` tells whether requests remain to be decoded."""
        begin = start if self._previous_end is None else self._previous_end
        self._gaps.append((end, end - begin))
        self._previous_end = end if busy_after else None

    def median_ms(self, now: float) -> float:
        """Median milliseconds between steps over the last seconds; 0 when idle."""
        recent = [gap for end, gap in self._gaps if now - end <= _WINDOW_S]
        return 1e3 * median(recent) if recent else 0.0
