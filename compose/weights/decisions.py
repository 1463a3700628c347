"""`tidemill weights pin|rollback|release`: decisions of an operator on `gate.decisions`.

Replicas follow these decisions; so does a trainer that learns from users, and no other trainer.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, given, with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import JsonOption
from tidemill.compose.weights.diff import version_number
from tidemill.schemas.records import GateDecision, GateVerdict

if TYPE_CHECKING:
    from tidemill.consumers.weights.chain import Following

VersionArgument = Annotated[str, typer.Argument(help="Version, for instance 40 or v40.")]
BranchOption = Annotated[str | None, typer.Option("--branch", help="Branch of the weight chain.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is kept with the decision.")]
NO_REASON = "no reason given"
ByOption = Annotated[str | None, typer.Option("--by", help="Who decides. Default: the name of the user.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check and show the decision, and write nothing.")]
WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait", metavar="SECONDS", min=0.0, help="Wait at most so long until every replica follows; status 1 if not."
    ),
]
RecentOption = Annotated[
    float,
    typer.Option(
        "--recent", metavar="SECONDS", min=0.0, help="Do not wait for a replica that has been silent for longer."
    ),
]
RECENT_S = 3600.0
POLL_S = 0.1


def on_version(name: str, verdict: GateVerdict, explained: str) -> Callable[..., None]:
    """A command `name` that decides `verdict` of one version; `explained` is its help."""

    def command(
        settings_of: SettingsOf,
        version: VersionArgument,
        reason: ReasonOption = NO_REASON,
        decided_by: ByOption = None,
        branch: BranchOption = None,
        dry_run: DryRunOption = False,
        wait_s: WaitOption = None,
        recent_s: RecentOption = RECENT_S,
        as_json: JsonOption = False,
    ) -> None:
        settings = with_reachable_log(settings_of(given(run__branch=branch)))
        decide(settings, verdict, version_number(version), reason, decided_by, dry_run, wait_s, recent_s, as_json)

    command.__name__, command.__doc__ = name, explained
    return command


pin = on_version(
    "pin",
    GateVerdict.HOLD,
    """Let replicas go no further than a version, while the trainer continues. It is the same decision as `gate hold`.

    A replica that is behind goes up to it; a replica that is beyond it stays there (use `rollback` to take it back).

    Example: `tidemill weights pin 40 --reason "evaluation of 40 runs"`
    """,
)

rollback = on_version(
    "rollback",
    GateVerdict.ROLL_BACK,
    """Take replicas back to an older version, and keep them there until a release.

    Example: `tidemill weights rollback 37 --reason "38 repeats itself" --wait 60`
    """,
)


def release(
    settings_of: SettingsOf,
    reason: ReasonOption = NO_REASON,
    decided_by: ByOption = None,
    branch: BranchOption = None,
    dry_run: DryRunOption = False,
    wait_s: WaitOption = None,
    recent_s: RecentOption = RECENT_S,
    as_json: JsonOption = False,
) -> None:
    """End a pin or a roll-back: replicas follow the newest version again.

    Example: `tidemill weights release --wait 60`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    decide(settings, GateVerdict.RELEASE, None, reason, decided_by, dry_run, wait_s, recent_s, as_json)


def decide(
    settings: TidemillSettings, verdict: GateVerdict, version: int | None, reason: str, decided_by: str | None,
    dry_run: bool, wait_s: float | None, recent_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Check a person's decision, write it, show it, and end the command: status 1 when it was not followed in time.

    Raises VersionError when it cannot be carried out.
    """
    from tidemill.consumers.weights.builder import anchor_exists
    from tidemill.consumers.weights.chain import Following, decision, read_chain
    from tidemill.schemas.clock import now_us, to_us

    chain = read_chain(settings.kafka, settings.run)
    made = decision(chain, verdict, version, reason, decided_by or _operator(), now_us(), anchor_exists)
    following = Following(made, chain.head.version, to_us(recent_s))
    for ack in chain.replicas.values():
        following.observe(ack)
    if not dry_run:
        _carry_out(settings, made, following, wait_s)
    waited = wait_s is not None and not dry_run
    _show(made, following, written=not dry_run, waited=waited, as_json=as_json)
    raise typer.Exit(1 if waited and following.behind else 0)


def _operator() -> str:
    """The name of the user; their number where they have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _carry_out(settings: TidemillSettings, made: GateDecision, following: Following, wait_s: float | None) -> None:
    """Write a decision, and follow the acknowledgements for as long as somebody is behind who may catch up."""
    from tidemill.schemas.catalogue import Topic
    from tidemill.schemas.log.producer import RecordProducer
    from tidemill.schemas.log.reader import LogReader
    from tidemill.schemas.records import WeightAck

    with LogReader(settings.kafka, [Topic.ACKS], start="end", client_id="tidemill-weights-acks") as acks:
        with RecordProducer(settings.kafka, "tidemill-weights") as producer:
            producer.send_acked(Topic.GATE, [(made.branch, made)])
        deadline = time.monotonic() + (wait_s or 0.0)
        with working("waiting for") as progress:
            while set(following.behind) - set(following.beyond) and time.monotonic() < deadline:
                progress.say(", ".join(f"{replica} (serves {v})" for replica, v in following.behind.items()))
                for located in acks.poll(POLL_S):
                    ack = located.record
                    if isinstance(ack, WeightAck) and (ack.run_id, ack.branch) == (made.run_id, made.branch):
                        following.observe(ack)


def _show(made: GateDecision, following: Following, *, written: bool, waited: bool, as_json: bool) -> None:
    if as_json:
        document = {"decision": asdict(made), "written": written, "serving": following.serving}
        typer.echo(json.dumps({**document, "behind": sorted(following.behind)}, indent=2))
        return
    version = "" if made.version is None else f" {made.version}"
    said = "decided" if written else "would decide"
    typer.echo(f"{said}: {made.verdict.value}{version} on branch {made.branch} by {made.decided_by}: {made.reason}")
    for replica, serving in sorted(following.beyond.items()):
        typer.echo(
            f"{replica} serves {serving} and stays there: a pin takes no replica back, `rollback` does", err=True
        )
    if not waited:
        return
    for replica in sorted(set(following.behind) - set(following.beyond)):
        typer.echo(f"{replica} still serves {following.behind[replica]}", err=True)
    if not following.behind:
        typer.echo(f"followed by {', '.join(sorted(following.serving)) or 'no replica: none has written lately'}")
