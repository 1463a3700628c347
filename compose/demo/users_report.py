"""What the users' process says of itself: JSON lines in its log, since only users know how satisfied they are."""

from __future__ import annotations

import json
from pathlib import Path

from tidemill.compose.demo.simulated_users.crowd import Seen
from tidemill.compose.demo.simulated_users.satisfaction import Satisfaction


def newest_report(log: Path) -> Seen | None:
    """The last whole report in a log of `tidemill users simulate --json`; None before the first."""
    if not log.exists():
        return None
    whole = [line for line in log.read_text("utf-8", errors="replace").splitlines(keepends=True) if line.endswith("\n")]
    newest = next((line for line in reversed(whole) if line.startswith("{")), None)
    return None if newest is None else _report(json.loads(newest))


def _report(document: dict[str, object]) -> Seen:
    satisfaction = document.pop("satisfaction")
    assert isinstance(satisfaction, list)
    return Seen(**document, satisfaction=[Satisfaction(**each) for each in satisfaction])  # type: ignore[arg-type]


def rate_of(seen: Seen | None, version: int | None) -> Satisfaction | None:
    """How satisfied held-out users were with a version; None where they were not asked about it."""
    found = seen.satisfaction if seen is not None else []
    return next((each for each in found if each.version == version), None)
