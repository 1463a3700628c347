"""`tidemill weights`: the weight chain on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.options import SettingsOf, given, with_reachable_log, with_settings
from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption, print_rows
from tidemill.compose.weights.decisions import pin, release, rollback
from tidemill.compose.weights.diff import diff

if TYPE_CHECKING:
    from tidemill.consumers.weights.builder import Checkout
    from tidemill.consumers.weights.chain import VersionRow
    from tidemill.consumers.weights.verify import Verification


BranchOption = Annotated[str | None, typer.Option("--branch", help="Branch of the weight chain.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds that a chunk may take to come from the log.")
]

weights_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""The weight log: every version of a branch, its deltas and anchors, and which version is served.

Examples, all for the run and branch of the configuration:

    tidemill weights log --last 20           # the versions, and the replicas that proved them
    tidemill weights verify                  # check every delta and every tensor
    tidemill weights checkout 40 models/v40  # a version as a Hugging Face checkpoint
    tidemill weights diff v39 v40            # what a step changed, and the bytes to send it
    tidemill weights pin 40                  # go no further than version 40
    tidemill weights rollback 37 --wait 60   # back to 37; wait until every replica follows
    tidemill weights release                 # follow the newest version again

These commands need no running trainer or replica.""",
)


@weights_app.command("log")
@with_settings
def log_command(
    settings_of: SettingsOf,
    branch: BranchOption = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Number of newest versions to show; 0 for all.")] = 30,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """List the versions of a branch, oldest first.

    One line for each version: parent, optimizer step, learning rate, density (changed elements of all), bytes of the
    delta, bytes for each changed element, whether it has an anchor, from which older versions skip-deltas lead to it,
    which replicas proved it from their live tensors, and the gate's decisions on it.

    Example: `tidemill weights log --branch main --last 10`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.consumers.weights.chain import describe, read_chain, rows

    chain = read_chain(settings.kafka, settings.run)
    found, limit = rows(chain, last), chain.limit
    if as_json:
        _print_json(
            {
                "run_id": chain.run_id,
                "branch": chain.branch,
                "head": chain.head.version,
                "limit": None if limit is None else asdict(limit),
                "versions": [asdict(row) for row in found],
            }
        )
        return
    print_chain(found, chain.head.version, as_csv)
    typer.echo("serving: the newest version" if limit is None else f"serving: {describe(limit)}", err=True)


@weights_app.command()
@with_settings
def verify(
    settings_of: SettingsOf,
    start: Annotated[
        int | None,
        typer.Option("--from", help="Version to begin at; it needs an anchor. Default: the oldest usable one."),
    ] = None,
    branch: BranchOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Verify a chain offline: fetch, decode, guard and apply every delta, and compare every tensor with its manifest.

    Begins at an anchor and makes each version in memory, without an engine. Anchors on the way and skip-deltas are
    verified as well. Stops at the first fault, names it and exits with status 1; if retention has removed a chunk, it
    says so.

    Example: `tidemill weights verify --from 32`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.consumers.weights.builder import open_builder
    from tidemill.consumers.weights.chain import read_chain
    from tidemill.consumers.weights.verify import Verifier, default_start

    chain = read_chain(settings.kafka, settings.run)
    first = default_start(chain) if start is None else start
    total = sum(version >= first for version in chain.manifests)
    with working("verifying", total) as progress, open_builder(settings.kafka, timeout_s) as builder:
        report = Verifier(chain, builder, progress).run(first)
    if as_json:
        _print_json({"sound": report.offender is None, **asdict(report)})
    else:
        typer.echo("\n".join(verification_lines(report)))
    raise typer.Exit(0 if report.offender is None else 1)


@weights_app.command()
@with_settings
def checkout(
    settings_of: SettingsOf,
    version: Annotated[str, typer.Argument(help="Version to write, for instance 40 or v40.")],
    directory: Annotated[Path, typer.Argument(help="Directory to make; it must not exist or be empty.")],
    branch: BranchOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Write a version as a Hugging Face checkpoint: weights, configuration and tokenizer.

    The version is built from the nearest anchor over deltas or skip-deltas, written to a temporary directory, read
    back and proved by the fingerprints of its manifest, and only then renamed.

    Example: `tidemill weights checkout v40 models/v40`
    """
    settings = with_reachable_log(settings_of(given(run__branch=branch)))
    from tidemill.compose.weights.diff import version_number
    from tidemill.consumers.weights.builder import checkout as write_checkout
    from tidemill.consumers.weights.builder import open_builder
    from tidemill.consumers.weights.chain import read_chain

    number = version_number(version)
    chain = read_chain(settings.kafka, settings.run)
    with working("building") as progress, open_builder(settings.kafka, timeout_s, progress.say) as builder:
        made = write_checkout(chain, builder, number, directory)
    if as_json:
        _print_json(asdict(made))
    else:
        typer.echo("\n".join(checkout_lines(made)))


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


for _command in (diff, pin, rollback, release):
    weights_app.command()(with_settings(_command))


def print_chain(rows: Sequence[VersionRow], head: int, as_csv: bool) -> None:
    """Print the versions of a chain."""
    print_rows(
        ("version", "parent", "step", "lr", "density", "bytes", "bytes/changed", "anchor", "skips_from", "proved_by",
         "remarks"),
        (
            (row.version, row.parent, row.step, row.learning_rate, row.density, row.delta_bytes, row.bytes_per_changed,
             row.anchor is not None, row.skips, row.proved_by, "; ".join(_remarks(row, head)))
            for row in rows
        ),
        as_csv=as_csv,
        formats={"lr": ".3g", "density": ".3%", "bytes": ",", "bytes/changed": ".3f"},
    )  # fmt: skip


def _remarks(row: VersionRow, head: int) -> list[str]:
    refused = [f"refused by {replica}: {reason}" for replica, reason in row.refused_by.items()]
    told = ["head" if row.version == head else "", row.serving_format, row.fork, "delta expired" if row.expired else ""]
    return [*filter(None, told), *row.decisions, *refused]


def verification_lines(report: Verification) -> list[str]:
    """What was verified, and the first thing that is wrong."""
    lines = [
        f"versions {report.start} to {report.end}: {report.versions} verified, with {report.anchors} anchors and "
        f"{report.skip_deltas} skip-deltas, {report.n_bytes:,} bytes of deltas"
    ]
    if report.expired_before:
        lines.append(
            f"the deltas of {len(report.expired_before)} older versions ({report.expired_before[0]} to "
            f"{report.expired_before[-1]}) are expired: the log's retention has removed them"
        )
    if report.expired_skips:
        lines.append(f"{report.expired_skips} skip-deltas are expired and were passed over")
    lines.append("the chain is sound" if report.offender is None else f"not sound: {report.offender}")
    return lines


def checkout_lines(made: Checkout) -> list[str]:
    """What was written."""
    return [
        f"version {made.version} in {made.directory}: {made.n_bytes:,} bytes, built from {made.way}",
        f"fingerprint {made.fingerprint}, read back from the files",
    ]
