"""`tidemill topics`, `audit`, `trace` and `query`: commands that read the log and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.cli.users_command import pseudonym_of
from tidemill.compose.options import (
    ConfigOption,
    SetOption,
    SettingsOf,
    given,
    key_values,
    settings_from,
    with_reachable_log,
    with_settings,
)
from tidemill.compose.output import (
    CsvOption,
    JsonOption,
    harmless,
    print_document,
    print_json,
    print_rows,
    utc,
    working,
)
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.admin import check_topics, create_topics
from tidemill.schemas.records import Mode

if TYPE_CHECKING:
    from tidemill.consumers.operate.trace.versions import Ended, TracedVersion


@with_settings
def topics(
    settings_of: SettingsOf,
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Compare the topics with the catalogue; status 1 if a topic is missing or differs.

    Example: `tidemill topics --create --bootstrap kafka:9092`
    """
    kafka = with_reachable_log(settings_of({})).kafka
    created = create_topics(kafka) if create else []
    states = check_topics(kafka)
    fine = {name: "created" for name in created}
    rows = (
        (state.name, state.partitions, "; ".join(state.drift) or fine.get(state.name, "as declared"))
        for state in states
    )
    document = {"created": created, "topics": states}
    print_rows(("topic", "partitions", "state"), rows, as_json=as_json, as_csv=as_csv, document=document)
    if any(state.drift for state in states):
        raise typer.Exit(1)


@with_settings
def audit(
    settings_of: SettingsOf,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The run is over: all open work is a fault, except groups that remain after step run.max_steps.",
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
        float, typer.Option("--grace", min=0.0, help="Seconds of event time by which a record may be late.")
    ] = 600.0,
) -> None:
    """Audit the whole log of a run: was everything trained once or ended with a reason, and are all records correct?

    Reads every topic except the bytes of the weights and derives the state of each rollout from them: queued,
    dispatched, running, scored, grouped, then trained, evaluated, excluded, failed, late, rejected or unused. Then it
    checks that

    - no record is missing, unreadable without a dead letter, or at an offset that cannot be read;
    - every rollout has one end, and none is trained twice; groups agree with their rollouts;
    - steps form one chain, were taken as planned, and count their inputs correctly;
    - versions are the results of the steps, and were proved by a replica before it served them;
    - every answer to a user has one end, is in one batch at most, and is not trained on after an erasure.

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
        grace_us=to_us(grace_s),
        horizon_us=to_us(settings.join.map.wait_s + settings.join.grace_s),
    )
    with working("auditing") as bar:
        report = audit_log(settings.kafka, rules, lambda topic, n, of: bar.say(f"{topic}: {n:,} of {of:,} records"))
    if as_json:
        print_json(report.document())
    else:
        # Output other than the checks goes to standard error.
        heads = ("check", "passed", "offenders", "first_offender")
        rows = ((one.name, one.passed, one.offenders, one.first and str(one.first)) for one in report.checks)
        print_rows(heads, rows, as_csv=as_csv, formats={"offenders": ","})
        for title, counts in (("rollouts", report.states), ("read", report.counts), ("repeated", report.repeated)):
            summary = ", ".join(f"{number:,} {what}" for what, number in counts.items())
            typer.echo(f"{title}: {summary or 'nothing'}", err=True)
        typer.echo(harmless(f"run {report.run_id}: {report.verdict()}"), err=True)
    raise typer.Exit(0 if report.passed else 1)


@with_settings
def trace(
    settings_of: SettingsOf,
    name: Annotated[
        str | None,
        typer.Argument(help="Id of an interaction (or its interaction token), of a feedback event, or of a rollout."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The product's id of a user: follow their data.")] = None,
    is_pseudonym: Annotated[bool, typer.Option("--pseudonym", help="--user is already the log's pseudonym.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow one event through the log: served, judged, batched, trained, decided and served again, with offsets.

    Shows where the path ends and why: excluded, dropped, waiting, erased, or the replicas that serve it now. With
    --user it lists the versions that learnt from a user's data, also after their erasure.

    Examples: `tidemill trace 3f2a…` · `tidemill trace --user 4711 --json`
    """
    if (name is None) == (user is None):
        raise typer.BadParameter("give the id of an interaction, event or rollout, or --user, and not both")
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.trace.reading import TraceReader

    with working("reading the log") as bar:
        reader = TraceReader(settings.kafka, bar.records)
        path = reader.trace(name or "") if user is None else reader.user(pseudonym_of(settings, user, is_pseudonym))
    lines = user_lines if user is not None else rollout_lines if "rollout_id" in path else path_lines
    print_document(path, lines(path), as_json)


def path_lines(path: dict[str, Any]) -> list[str]:
    served, feedback, outcomes = [], [], []
    if path["served"] is not None:
        consent = "consent" if path["served"]["consent"] else "NO consent"
        served = [
            "{at} by {replica_id}, version {versions}, arm {arm} (p {propensity:g}), {agreed}, user {user_id}, "
            "{finish_reason} · {place}".format(
                at=utc(path["served"]["served_at"]), versions=_span(path["served"]), agreed=consent, **path["served"]
            ),
            *(f"the same record again · {place}" for place in path["served"]["repeats"]),
        ]
    if path["erased"] is not None:
        served.append(f"erased · {path['erased']}")
    for event in path["feedback"]:
        value = "" if event["value"] is None else f" {event['value']:g}"
        corrects = f" correcting {event['corrects']}" if event["corrects"] else ""
        summary = f"{utc(event['observed_at'])} {event['kind']}{value}{corrects} from {event['source']}"
        feedback.append(f"{summary}, {event['event_id']}: {event['fate']} · {event['place']}")
    feedback += ("refused by {found_by}: {reason} · {place}".format(**letter) for letter in path["letters"])
    for end in path["outcomes"]:
        what = f"excluded: {end['exclusion']}" if end["exclusion"] else f"reward {_number(end['reward'])}"
        if end["revision"]:
            what += f", revision {end['revision']}, before {_number(end['previous_reward'])}"
        outcomes.append(f"{utc(end['closed_at'])} {what}, map {end['map_version']} · {end['place']}")
    batches = (
        f"{one['batch_id']} of version {one['version']}, {'correction' if one['correction'] else 'reward'} "
        f"{one['reward']:+g}, {_ended(one['ended'])} · {one['place']}"
        for one in path["batches"]
    )
    return [
        f"interaction {path['interaction_id']}",
        *_stage("served", served),
        *_stage("feedback", feedback),
        *_stage("outcome", outcomes),
        *_stage("batch", batches),
        *_stage("version", _versions(path["versions"])),
        f"end       {path['end']}",
    ]


def rollout_lines(path: dict[str, Any]) -> list[str]:
    reward = "failed: " + path["failure"] if path["failure"] else f"reward {_number(path['reward'])}"
    waiting = "held out" if path["mode"] is Mode.EVAL else WAITS
    groups = (
        f"{one['group_id']} closed by {one['closed_by']}, advantage {_number(one['advantage'])}, "
        f"{_ended(one['ended'], waiting)} · {one['place']}"
        for one in path["groups"]
    )
    return [
        f"rollout {path['rollout_id']}",
        f"sampled   {path['replica_id']}, version {_span(path)}, {reward} · {path['place']}",
        *_stage("group", groups),
        *_stage("version", _versions(path["versions"])),
        f"end       {path['end']}",
    ]


def user_lines(path: dict[str, Any]) -> list[str]:
    requests = (f"{one.wish.value} by {one.requested_by} at {utc(one.at)}" for one in path["demands"])
    endings = (f"{n:,} interactions ended: {ending}" for ending, n in sorted(path["outcomes"].items()))
    batches = (
        f"{one['batch_id']}: {one['interactions']} interactions, reward {one['reward']:+g}, {one['trained']} trained, "
        f"{'; '.join(map(_ended, one['ended']))} · {one['place']}"
        for one in path["batches"]
    )
    lines = [
        f"user {path['user_id']}",
        *_stage("requests", requests),
        *_stage("outcomes", endings),
        *_stage("batches", batches),
    ]
    for run in path["runs"]:
        trained = ", ".join(str(made.version) for made in run["trained"]) or "none"
        contained = run["contained_in"] or "none"
        where = f"run {run['run_id']}" + (f", branch {run['branch']}" if run["branch"] else "")
        lines.append(f"{where}: trained into version {trained}; contained in {contained}")
        lines += _stage("version", _versions(run["trained"]))
    return lines if path["runs"] else [*lines, "end       their data touched no version"]


def _stage(title: str, lines: Iterable[str]) -> Iterator[str]:
    for n, line in enumerate(lines):
        yield f"{title if n == 0 else '':<9} {line}"


def _versions(versions: list[TracedVersion]) -> Iterator[str]:
    for made in versions:
        branch = f" of branch {made.branch}" if made.branch else ""
        step_place = made.step_place or "step no longer kept"
        yield f"{made.version}{branch} from {made.parent}, step {made.step} · {step_place}"
        published = f"published · {made.manifest_place}" if made.manifest_place else "not published yet"
        yield f"  {published}"
        for decision in made.decisions:
            yield "  {verdict} by {by}: {reason} · {place}".format(**decision)
        if made.served_first_at is not None:
            proved_by = ", ".join(made.proved_by) or "no replica"
            yield f"  served first at {utc(made.served_first_at)}; proved by {proved_by}"
        serving = ", ".join(f"{replica} (version {version})" for replica, version in made.served_by.items())
        yield f"  served now by {serving or 'no replica'}; contained in later versions {made.contained_in or 'none'}"


WAITS = "waits for the trainer"


def _ended(ending: Ended, waiting: str = WAITS) -> str:
    if ending.reason:
        return f"excluded ({ending.reason}) by {ending.step}"
    return waiting if ending.version is None else f"trained by {ending.step}"


def _span(sampled: dict[str, Any]) -> str:
    first, last = sampled["version_min"], sampled["version_max"]
    return str(first) if first == last else f"{first}-{last}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+g}"


def query(
    sql: Annotated[str | None, typer.Argument(help="SQL, or the name of a query from --list.")] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Value of a parameter, written as {NAME:Type} in the SQL; may be repeated. One of a named query "
            "that is not given is empty; for a name that a query does not take, the error lists those that it takes.",
        ),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the named queries.")] = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the sink's tables.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Query ClickHouse about a run, while it runs or after it.

    Examples: `tidemill query held_out_by_version` · `tidemill query "SELECT count() FROM rollouts"` ·
    `tidemill query "SELECT reward FROM rollouts WHERE run_id = {run:String}" --param run=demo-0`
    """
    from tidemill.consumers.sink.query import ask, named_queries

    if list_names or sql is None:
        named = named_queries()
        print_rows(("query", "answers"), named.items(), as_json=as_json, as_csv=as_csv, document=named)
        return
    flags = given(sink__path=None if data_dir is None else str(data_dir))
    settings = settings_from({"config": config, "assignments": assignments}, flags)
    answer = ask(settings.sink, sql, key_values(parameters or [], "--param", "run=demo-0"))
    # If the SQL has a FORMAT clause, the answer is one text in that format, in a column named after the format.
    formatted = len(answer.columns) == 1 and re.search(
        rf"\bFORMAT\s+{re.escape(answer.columns[0])}\b", sql, re.IGNORECASE
    )
    if formatted and not (as_json or as_csv):
        typer.echo(answer.rows[0][0], nl=False)
    else:
        print_rows(answer.columns, answer.rows, as_json=as_json, as_csv=as_csv)
