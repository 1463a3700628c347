"""`tidemill replay export` and `tidemill replay import`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.options import with_settings
from tidemill.compose.progress import remaining
from tidemill.compose.replay.app import replay_app
from tidemill.compose.replay.choice import SelectionOf, with_selection
from tidemill.compose.replay.copy import (
    DryRunOption,
    IntoOption,
    ManifestOption,
    ResumeOption,
    SpeedOption,
    YesOption,
    carry_out,
)
from tidemill.compose.replay.stage import SettingsOf
from tidemill.compose.rows import CsvOption, JsonOption


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

    The file is an Avro object container with each record's bytes, key, headers, time and place, and a manifest with
    ranges, counts, digests and schemas. What records refer to in object stores is named there and not included. Give
    the sha256 that is printed along by another way: only with it can a change by somebody who knows the format be
    noticed. Reads without a consumer group, like `replay copy`.

    Example: `tidemill replay export --step 7 step7.avro`
    """
    if file.exists():
        raise typer.BadParameter(f"{file} exists already")
    settings = settings_of({})
    selection = selection_of(settings)
    kafka = with_reachable_log(settings).kafka
    from tidemill.consumers.operate.replay.archive import export
    from tidemill.consumers.operate.replay.session import LogOrigin

    origin = LogOrigin(kafka, selection)
    try:
        with remaining("reading") as progress:
            made, sha256 = export(origin, file, progress)
    finally:
        origin.close()
    if as_json:
        typer.echo(json.dumps({"file": str(file), "file_sha256": sha256, **asdict(made)}, indent=2))
        return
    typer.echo(f"{file}: {made.records:,} records of {len(made.partitions)} topics, sha256 {sha256}")
    for uri, size in made.not_included.items():
        typer.echo(f"not included: {uri} ({size:,} bytes)")


@replay_app.command("import")
@with_settings
def import_command(
    settings_of: SettingsOf,
    file: Annotated[Path, typer.Argument(help="An archive of `tidemill replay export`.")],
    into: IntoOption,
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="The sha256 that the export printed: any other file is refused.")
    ] = None,
    speed: SpeedOption = "max",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    resume: ResumeOption = None,
    manifest_file: ManifestOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Copy the records of an archive into other topics.

    The archive is checked whole before anything is written. Then it goes as with `replay copy`: a prefix that is
    nobody's, the same partitions, keys, times and headers, a dry run unless --yes, and --resume after an interruption.

    Example: `tidemill replay import step7.avro --into bug-17. --yes`
    """
    from tidemill.consumers.operate.replay.archive import ArchiveError, ArchiveOrigin
    from tidemill.consumers.operate.replay.copy import speed_of
    from tidemill.consumers.operate.replay.session import Replay
    from tidemill.consumers.operate.replay.target import check_prefix

    pace, settings = speed_of(speed), settings_of({})
    check_prefix(settings.kafka.topic_prefix, into)
    if sha256 is not None and (found := _sha256(file)) != sha256.lower():
        raise ArchiveError(f"{file} has sha256 {found}: it is not the file that was exported")
    with remaining("checking") as progress:
        origin = ArchiveOrigin(file, progress)
    kafka = with_reachable_log(settings).kafka
    with Replay(kafka, origin, into, resume=resume) as replay:
        carry_out(
            replay, speed=pace, do_it=yes and not dry_run, manifest_file=manifest_file, as_json=as_json, as_csv=as_csv
        )


def _sha256(file: Path) -> str:
    import hashlib

    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
