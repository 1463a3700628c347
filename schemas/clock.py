"""Wall-clock time in the unit of all records: microseconds since the Unix epoch, UTC."""

from __future__ import annotations

import time


def now_us() -> int:
    """Return the current time in microseconds since the Unix epoch."""
    return time.time_ns() // 1_000


def to_ms(microseconds: int) -> int:
    """Convert microseconds to milliseconds, the unit of Kafka's timestamps."""
    return microseconds // 1_000


def to_us(seconds: float) -> int:
    """Convert seconds to whole microseconds, rounded to nearest, ties to even."""
    return round(seconds * 1_000_000)


def to_s(microseconds: int) -> float:
    """Convert microseconds to seconds; `to_us` restores the same value for times within a century."""
    return microseconds / 1_000_000
