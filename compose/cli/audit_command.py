"""`tidemill audit`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.options import SettingsOf, with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption, print_rows

if TYPE_CHECKING:
    from tidemill.consumers.operate.audit.audit import AuditReport

SECOND_US = 1_000_000


def audit(
    settings_of: SettingsOf,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The run is over: what is still open is a fault, but for groups left after step run.max_steps.",
        ),
    ] = False,
    ended: Annotated[
        bool,
        typer.Option(
            "--ended", help="No worker plays rollouts any more: a rollout without a result, or in no group, is lost."
        ),
    ] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Records that retention deleted are no fault.")
    ] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds of event time that something may be overdue.")
    ] = 600.0,
) -> None:
    """Audit the whole log of a run: was everything trained once or ended with a reason, and is every record true?

    Reads every topic except the bytes of the weights and derives the state of each rollout from them: queued,
    dispatched, running, scored, grouped, then trained, evaluated, excluded, failed, late, rejected or unused. Then it
    checks that

    - no record is gone, unreadable without a dead letter, or on an offset that nobody can read;
    - every rollout has one end, and none is trained twice; groups say what their rollouts say;
    - steps form one chain, were planned as they were taken, and count what they read;
    - versions are what the steps made, and were proved by a replica before it served them;
    - every answer to a user has one end, lies in one batch at most, and is not trained on after an erasure.

    Unfinished work is no fault: a rollout within its deadline, a group that waits for the trainer. Exit
    status 1 means a fault; the first one is named with its topic, partition and offset, and `tidemill trace`
    follows it. Nothing is written, and a log in use may be audited.

    To audit a run that was killed, give its last step: `--complete --set run.max_steps=N`.

    Examples: `tidemill audit --run-id tuesday` · `tidemill audit --complete --json`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.audit.audit import audit_log
    from tidemill.consumers.operate.audit.endings import AuditRules

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
        _print(report, as_csv)
    raise typer.Exit(0 if report.passed else 1)


def _print(report: AuditReport, as_csv: bool) -> None:
    """The checks as rows; what is said beside them goes to standard error."""
    checks = (
        (check.name, check.passed, check.offenders, None if check.first is None else str(check.first))
        for check in report.checks
    )
    print_rows(("check", "passed", "offenders", "first_offender"), checks, as_csv=as_csv, formats={"offenders": ","})
    for title, counts in (("rollouts", report.states), ("read", report.counts), ("done again", report.repeated)):
        told = ", ".join(f"{number:,} {what}" for what, number in counts.items())
        typer.echo(f"{title}: {told or 'nothing'}", err=True)
    typer.echo(f"run {report.run_id}: {report.verdict()}", err=True)
