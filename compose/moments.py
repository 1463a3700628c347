"""Points in time as the commands show them to a person."""

from __future__ import annotations

from datetime import UTC, datetime

from tidemill.schemas.clock import to_s


def utc(microseconds: int) -> str:
    """A time since the Unix epoch as a date and a time of day in UTC, to the second."""
    return datetime.fromtimestamp(to_s(microseconds), UTC).strftime("%Y-%m-%d %H:%M:%S")
