"""Wall-clock time in the unit of every record: microseconds since the Unix epoch, UTC."""

from __future__ import annotations

import time


def now_us() -> int:
    """Microseconds since the Unix epoch."""
    return time.time_ns() // 1_000


def to_ms(microseconds: int) -> int:
    """Kafka's record timestamps are milliseconds."""
    return microseconds // 1_000


def to_us(seconds: float) -> int:
    """Seconds in whole microseconds: the nearest, the even one of two that are as near."""
    return round(seconds * 1_000_000)


def to_s(microseconds: int) -> float:
    """Microseconds in seconds; `to_us` takes them back unchanged within a century."""
    return microseconds / 1_000_000
