"""What `tidemill gate status` shows to a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from tidemill.compose.moments import utc
from tidemill.compose.rows import print_rows
from tidemill.schemas.records import Arm

if TYPE_CHECKING:
    from tidemill.schemas.records import GateDecision
    from tidemill.streams.gate.keeper import Snapshot


def print_status(found: Snapshot) -> None:
    """Print where a branch stands."""
    learns = "may learn from users" if found.admitted else "may not learn from users yet"
    watched = f"; version {found.watched} is watched" if found.watched is not None else ""
    typer.echo(
        f"{found.run_id}/{found.branch}: version {found.promoted} is served, the newest is {found.head}; "
        f"the served one {learns}{watched}\n{_stage(found)}"
    )
    if found.numbers:
        _print_numbers(found.numbers)
    if found.serving:
        typer.echo(", ".join(f"{replica} serves {version}" for replica, version in found.serving.items()))
    if found.decisions:
        print_decisions(found.decisions)


def print_decisions(decisions: Iterable[GateDecision], *, as_csv: bool = False) -> None:
    """Print decisions, one a row."""
    rows = ((utc(made.at), made.verdict.value, made.version, made.decided_by, made.reason) for made in decisions)
    print_rows(("decided_at", "verdict", "version", "by", "reason"), rows, as_csv=as_csv)


def _stage(found: Snapshot) -> str:
    if found.held_by is not None:
        hold = found.held_by
        return f"held by {hold.decided_by} ({hold.verdict.value} {hold.version}): {hold.reason}"
    if found.candidate is None:
        return "nothing is tried"
    doing = "is benched on held-out tasks" if found.stage == "bench" else "is compared among users"
    return f"version {found.candidate} {doing}"


def _print_numbers(numbers: dict[str, float]) -> None:
    """Measures that both arms have side by side, and the rest below."""
    arms = (Arm.CANARY.value, Arm.STABLE.value)
    prefixes = tuple(f"{arm}/" for arm in arms)
    shared = sorted({key.split("/", 1)[1] for key in numbers if key.startswith(prefixes)})
    rows = [(name, *(numbers.get(f"{arm}/{name}") for arm in arms)) for name in shared]
    rows += [(name, value, None) for name, value in numbers.items() if not name.startswith(prefixes)]
    print_rows(("measure", *arms), rows, formats=dict.fromkeys(arms, ".4g"))
