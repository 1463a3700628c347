"""What `tidemill gate status` shows to a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from tidemill.compose.moments import utc

if TYPE_CHECKING:
    from tidemill.consumers.gate.keeper import Snapshot
    from tidemill.schemas.records import GateDecision


def status_lines(found: Snapshot) -> list[str | Table]:
    """The parts of the page, in order."""
    learns = "may learn from users" if found.admitted else "may not learn from users yet"
    watched = f"; version {found.watched} is watched" if found.watched is not None else ""
    parts: list[str | Table] = [
        f"{found.run_id}/{found.branch}: version {found.promoted} is served, the newest is {found.head}; "
        f"the served one {learns}{watched}",
        _stage(found),
    ]
    if found.numbers:
        parts.append(_numbers(found.numbers))
    if found.serving:
        parts.append(", ".join(f"{replica} serves {version}" for replica, version in found.serving.items()))
    if found.decisions:
        parts.append(_decisions(found.decisions))
    return parts


def _stage(found: Snapshot) -> str:
    if found.held_by is not None:
        hold = found.held_by
        return f"held by {hold.decided_by} ({hold.verdict.value} {hold.version}): {hold.reason}"
    if found.candidate is None:
        return "nothing is tried"
    doing = "is benched on held-out tasks" if found.stage == "bench" else "is compared among users"
    return f"version {found.candidate} {doing}"


def _numbers(numbers: dict[str, float]) -> Table:
    """Measures that both arms have side by side, and the rest below."""
    table = Table("", "canary", "stable")
    for name in sorted({key.split("/", 1)[1] for key in numbers if key.startswith(("canary/", "stable/"))}):
        table.add_row(name, *(_cell(numbers.get(f"{arm}/{name}")) for arm in ("canary", "stable")))
    for name, value in numbers.items():
        if not name.startswith(("canary/", "stable/")):
            table.add_row(name, _cell(value), "")
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _decisions(decisions: list[GateDecision]) -> Table:
    table = Table("decided at (UTC)", "verdict", "version", "by", "reason")
    for made in decisions:
        table.add_row(utc(made.at), made.verdict.value, _version(made.version), made.decided_by, made.reason)
    return table


def _version(version: int | None) -> str:
    return "" if version is None else str(version)
