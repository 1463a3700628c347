"""`tidemill gate`: run the gate, show its state, and decide in its place; the same decisions are `tidemill weights
pin|rollback|release`.

A person's decision is written to `gate.decisions`, in the same way as the gate's own. The gate reads it there, ends its
current trial, and makes no decision while the branch is held. Replicas follow these decisions; so does a trainer that
learns from users, and no other trainer.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from tidemill.compose.options import (
    BranchOption,
    SettingsOf,
    begin_role,
    given,
    version_number,
    with_options,
    with_reachable_log,
    with_settings,
)
from tidemill.compose.output import CsvOption, JsonOption, harmless, print_json, print_rows, utc, working
from tidemill.consumers.weights.chain import DecisionFollowers, decision, no_version, read_chain
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_us
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Arm, GateDecision, GateVerdict, WeightAck
from tidemill.streams.gate.controller import Snapshot
from tidemill.streams.gate.role import rebuild
from tidemill.streams.gate.role import run as run_gate

VersionArgument = Annotated[str, typer.Argument(help="Version, for instance 40 or v40.")]
_OPTIONS = {
    "reason": Annotated[str, typer.Option("--reason", help="Why; it is kept with the decision.")],
    "decided_by": Annotated[str | None, typer.Option("--by", help="Who decides. Default: the name of the user.")],
    "branch": BranchOption,
    "dry_run": Annotated[bool, typer.Option("--dry-run", help="Check and show the decision, and write nothing.")],
    "wait_s": Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", min=0.0,
            help="Wait at most so long until every replica follows; status 1 if not.",
        ),
    ],
    "recent_s": Annotated[
        float,
        typer.Option(
            "--recent", metavar="SECONDS", min=0.0, help="Do not wait for a replica that has been silent for longer."
        ),
    ],
    "as_json": JsonOption,
}  # fmt: skip
_DEFAULTS = {"reason": "no reason given", "dry_run": False, "recent_s": 3600.0, "as_json": False}
POLL_S = 0.1


def deciding(app: typer.Typer, name: str, verdict: GateVerdict, explained: str) -> None:
    """Add a command `name` that decides `verdict`, for a version unless it is a release; `explained` is its help."""

    def release(decided: Callable[..., None], settings_of: SettingsOf) -> None:
        decided(settings_of, verdict, None)

    def of_version(decided: Callable[..., None], settings_of: SettingsOf, version: VersionArgument) -> None:
        decided(settings_of, verdict, version_number(version))

    command = release if verdict is GateVerdict.RELEASE else of_version
    command.__doc__ = explained
    app.command(name)(with_settings(with_options(command, "decided", _OPTIONS, _DEFAULTS, decide)))


def decide(options: dict[str, Any], settings_of: SettingsOf, verdict: GateVerdict, version: int | None) -> None:
    """Check a person's decision, write it, show it, and end the command: status 1 if it was not followed in time.

    Raises VersionError if the decision cannot be carried out.
    """
    settings = with_reachable_log(settings_of(given(run__branch=options["branch"])))
    dry_run, wait_s, decided_by = options["dry_run"], options["wait_s"], options["decided_by"]
    from tidemill.consumers.weights.builder import anchor_exists

    if not decided_by:
        try:
            decided_by = getpass.getuser()
        except (KeyError, OSError):  # a user without a name
            decided_by = str(os.getuid())
    # Opened before the chain is read, so that no acknowledgement is between the two.
    with (
        LogReader(settings.kafka, [Topic.ACKS], start="end", client_id="tidemill-weights-acks")
        if wait_s and not dry_run
        else nullcontext()
    ) as acks:
        chain = read_chain(settings.kafka, settings.run)
        made = decision(chain, verdict, version, options["reason"], decided_by, now_us(), anchor_exists)
        following = DecisionFollowers(made, chain.head.version, to_us(options["recent_s"]))
        for known in chain.replicas.values():
            following.observe(known)
        if not dry_run:
            with RecordProducer(settings.kafka, "tidemill-weights") as producer:
                producer.send_acked(Topic.GATE, [(made.branch, made)])
            deadline = time.monotonic() + (wait_s or 0.0)
            with working("waiting for") as progress:
                # Until no replica is behind that may catch up.
                while acks and set(following.behind) - set(following.beyond) and time.monotonic() < deadline:
                    progress.say(", ".join(f"{replica} (serves {v})" for replica, v in following.behind.items()))
                    for located in acks.poll(POLL_S):
                        ack = located.record
                        if isinstance(ack, WeightAck) and (ack.run_id, ack.branch) == (made.run_id, made.branch):
                            following.observe(ack)
    waited = wait_s is not None and not dry_run
    _show(made, following, written=not dry_run, waited=waited, as_json=options["as_json"])
    raise typer.Exit(1 if waited and following.behind else 0)


def _show(made: GateDecision, following: DecisionFollowers, *, written: bool, waited: bool, as_json: bool) -> None:
    if as_json:
        document = {"decision": made, "written": written, "serving": following.serving}
        print_json({**document, "behind": sorted(following.behind)})
        return
    version = "" if made.version is None else f" {made.version}"
    verb = "decided" if written else "would decide"
    typer.echo(f"{verb}: {made.verdict.value}{version} on branch {made.branch} by {made.decided_by}: {made.reason}")
    for replica, serving in sorted(following.beyond.items()):
        typer.echo(
            harmless(f"{replica} serves {serving} and stays there: a pin takes no replica back, `rollback` does"),
            err=True,
        )
    if not waited:
        return
    for replica in sorted(set(following.behind) - set(following.beyond)):
        typer.echo(harmless(f"{replica} still serves {following.behind[replica]}"), err=True)
    if not following.behind:
        replicas = ", ".join(sorted(following.serving)) or "no replica: none has acknowledged lately"
        typer.echo(harmless(f"followed by {replicas}"))


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
    settings = begin_role(settings_of, run__branch=branch)
    run_gate(settings.kafka, settings.run, settings.gate)


@gate_app.command()
@with_settings
def status(
    settings_of: SettingsOf, branch: BranchOption = None, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    """Show the gate's state, from the log: no gate needs to run.

    Shows the served version, the candidate with its stage and numbers, who holds the branch, the version of each
    replica, and the newest decisions. p_worse, p_not_worse and p_better are valid at any number of looks. With --csv it
    prints only the newest decisions.

    Example: `tidemill gate status --json`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    found = rebuild(settings.kafka, settings.run, settings.gate, 0)[0].snapshot()
    if found.head < 0:
        raise no_version(found.run_id, found.branch)
    if as_json:
        print_json(found)
    elif as_csv:
        print_decisions(found.decisions, as_csv=True)
    else:
        print_status(found)


deciding(
    gate_app,
    "hold",
    GateVerdict.HOLD,
    """Go no further than a version (as `weights pin`). A trial ends, and the gate decides nothing until `release`.

    Example: `tidemill gate hold 40 --reason "a launch today" --by ada`
    """,
)

deciding(
    gate_app,
    "veto",
    GateVerdict.REJECT,
    """Never serve a version. Its trial ends; if everyone is served it, the gate goes back to the version before.

    Example: `tidemill gate veto 41 --reason "it flatters" --by ada`
    """,
)

deciding(
    gate_app,
    "rollback",
    GateVerdict.ROLL_BACK,
    """Take every replica back to an older version (as `weights rollback`); the gate decides nothing until `release`.

    Example: `tidemill gate rollback 39 --reason "40 repeats itself" --wait 60`
    """,
)

deciding(
    gate_app,
    "release",
    GateVerdict.RELEASE,
    """End a hold or a roll-back, by a person or by the gate: the gate then tries the newest version.

    Example: `tidemill gate release --reason "the launch is over" --by ada`
    """,
)


def print_status(found: Snapshot) -> None:
    if found.held_by is not None:
        hold = found.held_by
        stage = f"held by {hold.decided_by} ({hold.verdict.value} {hold.version}): {hold.reason}"
    elif found.candidate is None:
        stage = "no version is on trial"
    else:
        doing = "is benched on held-out tasks" if found.stage == "bench" else "is compared among users"
        stage = f"version {found.candidate} {doing}"
    learns = "may learn from users" if found.admitted else "may not learn from users yet"
    watched = f"; version {found.watched} is watched" if found.watched is not None else ""
    typer.echo(
        f"{found.run_id}/{found.branch}: version {found.promoted} is served, the newest is {found.head}; "
        f"the served one {learns}{watched}\n{harmless(stage)}"
    )
    if found.numbers:
        # Measures of both arms next to each other, and the others below.
        arms = (Arm.CANARY.value, Arm.STABLE.value)
        prefixes = tuple(f"{arm}/" for arm in arms)
        shared = sorted({key.split("/", 1)[1] for key in found.numbers if key.startswith(prefixes)})
        rows = [(name, *(found.numbers.get(f"{arm}/{name}") for arm in arms)) for name in shared]
        rows += [(name, value, None) for name, value in found.numbers.items() if not name.startswith(prefixes)]
        print_rows(("measure", *arms), rows, formats=dict.fromkeys(arms, ".4g"))
    if found.serving:
        typer.echo(harmless(", ".join(f"{replica} serves {version}" for replica, version in found.serving.items())))
    if found.decisions:
        print_decisions(found.decisions)


def print_decisions(decisions: Iterable[GateDecision], *, as_csv: bool = False) -> None:
    rows = ((utc(made.at), made.verdict.value, made.version, made.decided_by, made.reason) for made in decisions)
    print_rows(("decided_at", "verdict", "version", "by", "reason"), rows, as_csv=as_csv)
