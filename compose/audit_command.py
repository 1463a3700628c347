"""`tidemill audit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.compose.config import TidemillSettings
from tidemill.compose.weights.connect import with_reachable_log
from tidemill.compose.weights.progress import working

if TYPE_CHECKING:
    from tidemill.consumers.ledger.report import AuditReport

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]
SECOND_US = 1_000_000


def audit(
    settings_of: SettingsOf,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The run is over: whatever is still open is a fault, but for groups left after step run.max_steps.",
        ),
    ] = False,
    ended: Annotated[
        bool,
        typer.Option("--ended", help="Nobody plays rollouts any more: one without a result, or in no group, is lost."),
    ] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="What is past a topic's retention is no fault.")
    ] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds of event time that something may be overdue.")
    ] = 600.0,
) -> None:
    """Audit the whole log of a run: was everything trained once or ended with a reason, and is every record true?

    Reads every topic but the weights' bytes and derives the life of each rollout from them alone: queued, dispatched,
    running, scored, grouped, then trained, evaluated, excluded, failed, late, rejected or unused. Then it checks that

    - no record is gone, unreadable without a dead letter, or on an offset that nobody can read;
    - every rollout has one end, and none is trained twice; groups say what their rollouts say;
    - steps form one chain, were planned as they were taken, and count what they read;
    - versions are what the steps made, and were proved by a replica before it served them;
    - every answer to a user has one end, lies in one batch at most, and is not trained on after an erasure.

    What is merely under way is no fault: a rollout within its deadline, a group that waits for the trainer. Exit
    status 1 means a fault; the first offender is named with its topic, partition and offset, and `tidemill trace`
    follows it. Nothing is written, and a log in use may be audited.

    Examples: `tidemill audit --run-id tuesday` · `tidemill audit --complete --json`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.ledger.reading import audit_log
    from tidemill.consumers.ledger.rules import AuditRules

    rules = AuditRules(
        run_id=settings.run.run_id,
        ended=ended,
        complete=complete,
        last_step=settings.run.max_steps,
        allow_truncated=allow_truncated,
        grace_us=round(grace_s * SECOND_US),
        horizon_us=round((settings.join.map.wait_s + settings.join.grace_s) * SECOND_US),
    )
    with working("auditing") as bar:
        report = audit_log(settings.kafka, rules, lambda topic, n, of: bar.say(f"{topic}: {n:,} of {of:,} records"))
    if as_json:
        typer.echo(json.dumps(report.document(), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.passed else 1)


def _print(report: AuditReport) -> None:
    console = Console(highlight=False)
    console.print(_checks(report), _rollouts(report))
    console.print("read: " + _told(report.counts))
    console.print("done again: " + (_told(report.repeated) or "nothing"))
    if report.passed:
        console.print(f"run {report.run_id}: sound, {len(report.checks)} checks over {report.records:,} records")
        return
    first = report.failed[0]
    console.print(
        f"run {report.run_id}: NOT SOUND, {len(report.failed)} of {len(report.checks)} checks failed. "
        f"First offender ({first.name}): {first.first}",
        markup=False,
        soft_wrap=True,
    )


def _checks(report: AuditReport) -> Table:
    table = Table("check", "passed", "offenders", "first offender")
    for check in report.checks:
        told = "" if check.first is None else str(check.first).replace("[", r"\[")
        table.add_row(check.name, "yes" if check.passed else "NO", f"{check.offenders:,}" if told else "", told)
    return table


def _rollouts(report: AuditReport) -> Table:
    table = Table("rollouts", "number")
    for state, number in report.states.items():
        table.add_row(state, f"{number:,}")
    return table


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items())
