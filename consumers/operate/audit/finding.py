"""What a check found wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.trace.place import Place


@dataclass(frozen=True, slots=True)
class Finding:
    """One offender."""

    place: Place | None
    """The record that shows it; None for what is not in the log at all."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what
