"""`tidemill gate`: run the gate, see where it stands, and decide over its head.

A person's decision goes to the log as the gate's own do, through the checks of `tidemill weights`; the gate reads it
there, stops what it was doing, and decides nothing more while the branch is held.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from tidemill.compose.options import SettingsOf, given, with_local_log, with_reachable_log, with_settings
from tidemill.compose.rows import CsvOption, JsonOption, print_rows, utc
from tidemill.compose.weights.decisions import (
    NO_REASON,
    RECENT_S,
    BranchOption,
    ByOption,
    DryRunOption,
    ReasonOption,
    decide,
    on_version,
)
from tidemill.schemas.records import Arm, GateVerdict

if TYPE_CHECKING:
    from tidemill.schemas.records import GateDecision
    from tidemill.streams.gate.keeper import Snapshot


gate_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""The gate decides which version users get.

In the canary pool the newest version is tested on held-out tasks (the bench), then compared among a share of the users
with the promoted version. Then it is promoted, rejected or held for a person. A promoted version that fails later is
rolled back. Every decision is a record on `gate.decisions`, with its numbers. A person's decision overrides the gate's.

    tidemill gate run                                # run the gate of the run's branch
    tidemill gate status                             # the candidate, its numbers, the decisions
    tidemill gate hold 40 --reason "a launch today"  # no further than 40; the gate waits
    tidemill gate veto 41 --reason "it flatters"     # never serve 41
    tidemill gate rollback 39 --wait 60              # back to 39, for everyone; the gate waits
    tidemill gate release                            # the gate decides again""",
)


@gate_app.command()
@with_settings
def run(settings_of: SettingsOf, branch: BranchOption = None) -> None:
    """Run the gate of the run's branch, until Ctrl-C.

    Reads the log from its beginning and continues from its state: a gate may be killed at any time, and started on any
    machine. If a second gate starts for a branch, the first one stops.

    Example: `tidemill gate run --run-id tuesday --set gate.share=0.1`
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = with_local_log(settings_of(given(run__branch=branch)))
    from tidemill.streams.gate.role import run as run_gate

    run_gate(settings.kafka, settings.run, settings.gate)


@gate_app.command()
@with_settings
def status(
    settings_of: SettingsOf, branch: BranchOption = None, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    """Show the gate's state, from the log: no gate needs to run.

    The version served, the candidate with its stage and numbers, who holds the branch, what each replica serves, and
    the newest decisions. p_worse, p_not_worse and p_better are valid however often they are looked at. With --csv
    only the newest decisions.

    Example: `tidemill gate status --json`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.streams.gate.role import rebuild

    found = rebuild(settings.kafka, settings.run, settings.gate, 0).keeper.snapshot()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    elif as_csv:
        print_decisions(found.decisions, as_csv=True)
    else:
        print_status(found)


hold = on_version(
    "hold",
    GateVerdict.HOLD,
    """Go no further than a version (as `weights pin`). A trial ends, and the gate decides nothing until `release`.

    Example: `tidemill gate hold 40 --reason "a launch today" --by ada`
    """,
)

veto = on_version(
    "veto",
    GateVerdict.REJECT,
    """Never serve a version. Its trial ends; if everyone is served it, the gate goes back to the version before.

    Example: `tidemill gate veto 41 --reason "it flatters" --by ada`
    """,
)

rollback = on_version(
    "rollback",
    GateVerdict.ROLL_BACK,
    """Take every replica back to an older version (as `weights rollback`); the gate decides nothing until `release`.

    Example: `tidemill gate rollback 39 --reason "40 repeats itself" --wait 60`
    """,
)


def release(
    settings_of: SettingsOf,
    reason: ReasonOption = NO_REASON,
    decided_by: ByOption = None,
    branch: BranchOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """End a hold or a roll-back, by a person or by the gate: the gate then tries the newest version.

    Example: `tidemill gate release --reason "the launch is over" --by ada`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    decide(settings, GateVerdict.RELEASE, None, reason, decided_by, dry_run, None, RECENT_S, as_json)


for _command in (hold, veto, rollback, release):
    gate_app.command()(with_settings(_command))


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
