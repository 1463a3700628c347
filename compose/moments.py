"""Points in time as a person reads and writes them."""

from __future__ import annotations

from datetime import UTC, datetime

from tidemill.schemas.clock import to_s


def utc(microseconds: int) -> str:
    """A time since the Unix epoch as a date and a time of day in UTC, to the second."""
    return datetime.fromtimestamp(to_s(microseconds), UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment_us(text: str | None) -> int | None:
    """Microseconds since the Unix epoch of an ISO 8601 moment, UTC where it names no zone; None stays None.

    Raises ValueError for anything else.
    """
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no moment: write it like 2026-01-31T14:05:00 or 2026-01-31T14:05+02:00"
        ) from error
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = aware - datetime.fromtimestamp(0, UTC)
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds
