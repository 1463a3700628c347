"""`tidemill replay copy`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.options import with_settings
from tidemill.compose.progress import remaining
from tidemill.compose.replay.app import replay_app
from tidemill.compose.replay.choice import SelectionOf, with_selection
from tidemill.compose.replay.stage import SettingsOf
from tidemill.compose.replay.tables import note_lines, print_manifest
from tidemill.compose.rows import CsvOption, JsonOption

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.copy import Copied
    from tidemill.consumers.operate.replay.session import Replay

IntoOption = Annotated[
    str, typer.Option("--into", metavar="PREFIX", help="Topic prefix for this replay only, for instance replay-1.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Write. Without it, or with --dry-run, only show the plan.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]
ResumeOption = Annotated[
    str | None, typer.Option("--resume", metavar="REPLAY_ID", help="Continue a replay that was interrupted.")
]
SpeedOption = Annotated[
    str,
    typer.Option("--speed", metavar="original|N|max", help="Pace: as written, N times as fast, or as fast as it goes."),
]
ManifestOption = Annotated[
    Path | None, typer.Option("--manifest", metavar="FILE", help="Write what was copied, as JSON, when it is done.")
]
INTERRUPTED = 130


@replay_app.command("copy")
@with_settings
@with_selection
def copy(
    settings_of: SettingsOf,
    selection_of: SelectionOf,
    into: IntoOption,
    speed: SpeedOption = "max",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    resume: ResumeOption = None,
    manifest_file: ManifestOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Copy records of the log into other topics, in the original order and, if wanted, at the original pace.

    Reads without a consumer group, up to the ends of the topics as they are now. A copy keeps its key, partition, time
    and headers, and says in further headers which replay wrote it, when, and of which record it is the copy; a trainer
    refuses such records unless told of the replay. Records of several partitions are merged by time, partition and
    offset. References to records that are copied too, such as those of a group to its rollouts, lead to the copies.

    Writes only below --into: not into live topics, nor where a consumer group reads or other records lie. Says first
    what it would do; --yes does it. To continue a replay that was interrupted, give the same options and --resume: no
    record is copied twice, and none is left out.

    Examples: `tidemill replay copy --topic rollouts --from 2026-11-21T14:00 --to 2026-11-21T15:00 --into monday.` ·
    `tidemill replay copy --step 7..9 --into step7. --yes` ·
    `tidemill replay copy --topic rollouts --where 'record.reward > 0.5' --into good. --speed 10 --yes`
    """
    from tidemill.consumers.operate.replay.copy import speed_of
    from tidemill.consumers.operate.replay.session import LogOrigin, Replay
    from tidemill.consumers.operate.replay.target import check_prefix

    pace, settings = speed_of(speed), settings_of({})
    selection = selection_of(settings)
    check_prefix(settings.kafka.topic_prefix, into)
    kafka = with_reachable_log(settings).kafka
    with Replay(kafka, LogOrigin(kafka, selection), into, resume=resume) as replay:
        carry_out(
            replay, speed=pace, do_it=yes and not dry_run, manifest_file=manifest_file, as_json=as_json, as_csv=as_csv
        )


def carry_out(
    replay: Replay, *, speed: float | None, do_it: bool, manifest_file: Path | None, as_json: bool, as_csv: bool
) -> None:
    """Say what a replay would do, and do it where that is wanted."""
    with remaining("reading") as progress:
        made = replay.prepare(progress)
    document: dict[str, Any] = {"dry_run": not do_it, "already_copied": replay.already_copied, **asdict(made)}
    if not as_json:
        where = f"{made.source_prefix}* into {made.into}*" if made.into else f"{made.source_prefix}*"
        typer.echo(where, err=as_csv)
        print_manifest(made, as_csv)
        for line in note_lines(made):
            typer.echo(line, err=as_csv)
    if not do_it:
        _say(f"nothing was written: --yes copies {made.records:,} records", document, as_json, as_csv)
        return
    copied = _copy(replay, speed)
    document |= asdict(copied)
    if manifest_file is not None:
        manifest_file.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    _say(_done_text(copied, made.replay_id), document, as_json, as_csv)


def _copy(replay: Replay, speed: float | None) -> Copied:
    try:
        with remaining("copying") as progress:
            return replay.run(speed, progress)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted. Copied records stay; continue with the same options and --resume {replay.begun.replay_id}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def _done_text(copied: Copied, replay_id: str) -> str:
    there = f", {copied.there:,} were there" if copied.there else ""
    moved = f", {copied.relocated:,} with references to copies" if copied.relocated else ""
    return f"replay {replay_id}: {copied.written:,} records copied{there}{moved}"


def _say(text: str, document: dict[str, Any], as_json: bool, as_csv: bool) -> None:
    typer.echo(json.dumps(document, indent=2) if as_json else text, err=as_csv)
