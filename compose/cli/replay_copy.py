"""`tidemill replay export|import|copy`: copies of selected records in a file and in other topics.

`with_selection` gives a command the selecting options, and passes it a function from settings to a `Selection`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, with_options, with_reachable_log, with_settings
from tidemill.compose.output import CsvOption, JsonOption, as_json_text, moment_us, print_json, print_rows, remaining
from tidemill.consumers.operate.replay.records import RANK, READ_COMMITTED, READ_UNCOMMITTED, topic_of
from tidemill.consumers.operate.replay.target import check_prefix
from tidemill.schemas.catalogue import CATALOGUE, ERASABLE
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.copy import Replay, ReplayOrigin
    from tidemill.consumers.operate.replay.selection import Selection


replay_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Replay the log: run recorded work again, without writing to the live topics.""",
)
SelectionOf = Callable[[TidemillSettings], "Selection"]
PANEL = "Which records (each option narrows the choice)"


def _option(kind: Any, *names: str, help: str, metavar: str | None = None) -> Any:  # noqa: ANN401 - of any type
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help, rich_help_panel=PANEL)]


_TEXT, _TEXTS = str | None, list[str] | None
_OPTIONS = {
    "topic": _option(
        _TEXTS, "--topic", help="A topic without its prefix, or its dead letters (rollouts.dlq); may be repeated."
    ),
    "since": _option(_TEXT, "--from", metavar="TIME", help="Written at or after, ISO 8601, UTC."),
    "until": _option(_TEXT, "--to", metavar="TIME", help="Written before, ISO 8601, UTC."),
    "offsets": _option(
        _TEXTS,
        "--offsets",
        metavar="TOPIC[/PARTITION]=FROM:TO",
        help="Offsets from, up to and not including; either may be left out; may be repeated.",
    ),
    "step": _option(
        _TEXTS,
        "--step",
        metavar="N[..M]",
        help="What optimizer steps read: groups and their rollouts, batches and their interactions.",
    ),
    "version": _option(_TEXTS, "--version", metavar="V[..W]", help="The same, of the steps that made versions."),
    "group": _option(_TEXTS, "--group", metavar="ID", help="A group and its rollouts; may be repeated."),
    "where": _option(
        str,
        "--where",
        metavar="EXPRESSION",
        help="Of the decoded record, for instance 'record.reward > 0.5 and record.mode == \"train\"'; kind, topic, "
        "partition, offset, timestamp, key and headers[...] can be named too.",
    ),
    "uncommitted": _option(bool, "--uncommitted", help="Also records of transactions that are open or aborted."),
}


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `selection_of` by the options that select records."""
    return with_options(command, "selection_of", _OPTIONS, {"where": "", "uncommitted": False}, selection)


def selection(options: dict[str, Any], settings: TidemillSettings) -> Selection:
    from tidemill.consumers.operate.replay.selection import Selection, offset_range, span

    since, until = moment_us(options["since"]), moment_us(options["until"])
    return Selection(
        topics=tuple(sorted(set(options["topic"] or ()), key=lambda name: RANK.get(name, -1))),
        # A record's time is a whole millisecond: the first one at or after the given time is the bound of both.
        from_ms=None if since is None else -(-since // 1_000),
        to_ms=None if until is None else -(-until // 1_000),
        offsets=tuple(offset_range(text) for text in options["offsets"] or ()),
        steps=tuple(span(text) for text in options["step"] or ()),
        versions=tuple(span(text) for text in options["version"] or ()),
        groups=tuple(options["group"] or ()),
        where=options["where"],
        run_id=settings.run.run_id,
        isolation=READ_UNCOMMITTED if options["uncommitted"] else READ_COMMITTED,
    )


IntoOption = Annotated[
    str, typer.Option("--into", metavar="PREFIX", help="Topic prefix for this replay only, for instance replay-1.")
]
_COPY_OPTIONS = {
    "speed": Annotated[
        str,
        typer.Option(
            "--speed", metavar="original|N|max", help="Pace: as written, N times as fast, or as fast as it goes."
        ),
    ],
    "yes": Annotated[bool, typer.Option("--yes", help="Write. Without it, or with --dry-run, only show the plan.")],
    "dry_run": Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")],
    "resume": Annotated[
        str | None, typer.Option("--resume", metavar="REPLAY_ID", help="Continue a replay that was interrupted.")
    ],
    "manifest_file": Annotated[
        Path | None, typer.Option("--manifest", metavar="FILE", help="Write what was copied, as JSON, when it is done.")
    ],
    "as_json": JsonOption,
    "as_csv": CsvOption,
}
CopyFrom = Callable[["KafkaSettings", "ReplayOrigin"], None]
CopyingOf = Callable[[TidemillSettings, str], CopyFrom]
"""Passed to a command by `with_copying`: checks pace and prefix; returns the function that copies from an origin."""


def with_copying(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `copying_of` by the options of a copy."""
    defaults = {"speed": "max", "yes": False, "dry_run": False, "as_json": False, "as_csv": False}
    return with_options(command, "copying_of", _COPY_OPTIONS, defaults, copying)


def copying(options: dict[str, Any], settings: TidemillSettings, into: str) -> CopyFrom:
    from tidemill.consumers.operate.replay.copy import Replay, speed_of

    pace = speed_of(options["speed"])
    check_prefix(settings.kafka.topic_prefix, into)
    if options["manifest_file"] is not None:
        check_directory(options["manifest_file"])

    def copy_from(kafka: KafkaSettings, origin: ReplayOrigin) -> None:
        with closing(origin):
            carry_out(
                Replay(kafka, origin, into, resume=options["resume"]),
                speed=pace,
                do_it=options["yes"] and not options["dry_run"],
                manifest_file=options["manifest_file"],
                as_json=options["as_json"],
                as_csv=options["as_csv"],
            )

    return copy_from


def check_directory(file: Path) -> None:
    """Raise BadParameter, before the log is read, if a file cannot be written because its directory does not exist."""
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{file}: there is no directory {file.parent}")


INTERRUPTED = 130
ERASABLE_NOTE = (
    "holds users' data: an erasure (`tidemill users erase`) does not reach the copies, delete them when you are done"
)


@replay_app.command("export")
@with_settings
@with_selection
def export_command(
    settings_of: SettingsOf,
    selection_of: SelectionOf,
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    as_json: JsonOption = False,
) -> None:
    """Write records of the log into one file with checksums, for a bug report.

    The file is an Avro object container with each record's bytes, key, headers, time and position, and a manifest with
    ranges, counts, digests and schemas. Objects in object stores to which records refer are listed there, but not
    included. Send the printed sha256 on a different channel: without it, a change by a person who knows the format
    cannot be detected. Reads without a consumer group, like `replay copy`.

    Example: `tidemill replay export --step 7 step7.avro`
    """
    if file.exists():
        raise typer.BadParameter(f"{file} exists already")
    check_directory(file)
    settings = settings_of({})
    chosen = selection_of(settings)
    kafka = with_reachable_log(settings).kafka
    from tidemill.consumers.operate.replay.archive import export
    from tidemill.consumers.operate.replay.plan import LogOrigin

    with closing(LogOrigin(kafka, chosen)) as origin, remaining("reading") as progress:
        made, sha256 = export(origin, file, Codec(kafka.registry_url), progress)
    if as_json:
        print_json({"file": str(file), "file_sha256": sha256, **asdict(made)})
        return
    typer.echo(f"{file}: {made.records:,} records of {len(made.partitions)} topics, sha256 {sha256}")
    for uri, size in made.not_included.items():
        typer.echo(f"not included: {uri} ({size:,} bytes)")


@replay_app.command("import")
@with_settings
@with_copying
def import_command(
    settings_of: SettingsOf,
    copying_of: CopyingOf,
    file: Annotated[Path, typer.Argument(help="An archive of `tidemill replay export`.")],
    into: IntoOption,
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="The sha256 that the export printed: any other file is refused.")
    ] = None,
) -> None:
    """Copy the records of an archive into other topics.

    The whole archive is checked before the first write. Then it works as `replay copy`: an unused prefix, the same
    partitions, keys, times and headers, a dry run unless --yes, and --resume after an interruption.

    Example: `tidemill replay import step7.avro --into bug-17. --yes`
    """
    from tidemill.consumers.operate.replay.archive import ArchiveError, ArchiveOrigin

    settings = settings_of({})
    copy_from = copying_of(settings, into)
    if sha256 is not None:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != sha256.lower():
            raise ArchiveError(f"{file} has sha256 {found}: it is not the file that was exported")
    with remaining("checking") as progress:
        origin = ArchiveOrigin(file, Codec(settings.kafka.registry_url), progress)
    copy_from(with_reachable_log(settings).kafka, origin)


@replay_app.command("copy")
@with_settings
@with_copying
@with_selection
def copy(settings_of: SettingsOf, selection_of: SelectionOf, copying_of: CopyingOf, into: IntoOption) -> None:
    """Copy records of the log into other topics, in the original order and, with --speed, at the original pace.

    Reads without a consumer group, up to the present ends of the topics. A copy keeps its key, partition, time and
    headers; further headers name the replay, its time, and the original record. A trainer refuses such records, unless
    `trainer.accept_replays` has the replay's id. Records of several partitions are merged by time, partition and
    offset. References between copied records, such as those of a group to its rollouts, are changed to the copies.

    Writes only below --into: never into live topics, or where a consumer group reads or other records exist. First
    shows the plan; --yes executes it. To continue an interrupted replay, give the same options and --resume: no
    record is copied twice, and none is left out.

    Examples: `tidemill replay copy --topic rollouts --from 2026-11-21T14:00 --to 2026-11-21T15:00 --into monday.` ·
    `tidemill replay copy --step 7..9 --into step7. --yes` ·
    `tidemill replay copy --topic rollouts --where 'record.reward > 0.5' --into good. --speed 10 --yes`
    """
    from tidemill.consumers.operate.replay.plan import LogOrigin

    settings = settings_of({})
    chosen = selection_of(settings)
    copy_from = copying_of(settings, into)
    kafka = with_reachable_log(settings).kafka
    copy_from(kafka, LogOrigin(kafka, chosen))


NOTES = {
    "undecodable": "records cannot be decoded, so that no filter can select them: not copied",
    "missing": "records that the steps name are no longer in the log (erased, or deleted by retention): not copied",
    "references_outside": (
        "references are to records that are not selected: they keep the original's position, where the copy has "
        "another record or none. A trainer excludes such groups with a reason"
    ),
}
"""The messages for the counts of a replay's manifest, shown if the count is not 0."""


def carry_out(
    replay: Replay, *, speed: float | None, do_it: bool, manifest_file: Path | None, as_json: bool, as_csv: bool
) -> None:
    """Show the plan of a replay, and carry it out if `do_it`."""
    with remaining("reading") as progress:
        made = replay.prepare(progress)
    document: dict[str, Any] = {"dry_run": not do_it, **made}
    if not as_json:
        typer.echo(f"{made['source_prefix']}* into {made['into']}*", err=as_csv)
        print_manifest(made, as_csv)
    done = f"nothing was written: --yes copies {made['records']:,} records"
    if do_it:
        try:
            with remaining("copying") as progress:
                copied = replay.run(speed, progress)
        except KeyboardInterrupt:
            again = f"continue with the same options and --resume {made['replay_id']}"
            typer.echo(f"interrupted. Copied records stay; {again}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        document |= copied
        if manifest_file is not None:
            manifest_file.write_text(as_json_text(document) + "\n", "utf-8")
        there = f", {copied['there']:,} were there" if copied["there"] else ""
        moved = f", {copied['relocated']:,} with references to copies" if copied["relocated"] else ""
        done = f"replay {made['replay_id']}: {copied['written']:,} records copied{there}{moved}"
    typer.echo(as_json_text(document) if as_json else done, err=as_csv)


def print_manifest(made: dict[str, Any], as_csv: bool) -> None:
    """Print one row per topic: partitions, how many of them have records, records, bytes, oldest and newest, in UTC;
    then the notes on the selection."""
    prefix: str = made["source_prefix"]
    lanes_of: dict[str, list[dict[str, Any]]] = {}
    for lane in made["lanes"]:
        lanes_of.setdefault(lane["topic"].removeprefix(prefix), []).append(lane)
    rows = []
    for topic, lanes in lanes_of.items():
        filled = [lane for lane in lanes if lane["records"]]
        first = min((lane["first"] for lane in filled), default=None)
        last = max((lane["last"] for lane in filled), default=None)
        counts = sum(lane["records"] for lane in lanes), sum(lane["n_bytes"] for lane in lanes)
        rows.append((topic, len(lanes), len(filled), *counts, first, last))
    heads = ("topic", "partitions", "filled", "records", "bytes", "first", "last")
    print_rows(heads, rows, as_csv=as_csv, formats={"records": ",", "bytes": ","})
    for field, note in NOTES.items():
        if made[field]:
            typer.echo(f"{made[field]:,} {note}", err=as_csv)
    filled_topics = (topic for topic, lanes in lanes_of.items() if any(lane["records"] for lane in lanes))
    for topic in sorted(topic for topic in filled_topics if CATALOGUE[topic_of(topic)].config == ERASABLE):
        typer.echo(f"{prefix}{topic} {ERASABLE_NOTE}", err=as_csv)
