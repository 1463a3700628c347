"""What a replay is made of, as tables and lines for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.compose.rows import print_rows

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.session import LaneReport, ReplayManifest

ERASABLE_NOTE = (
    "holds users' data: an erasure (`tidemill users erase`) does not reach the copies, delete them when you are done"
)


def print_manifest(made: ReplayManifest, as_csv: bool) -> None:
    """Print one row a topic: partitions, how many of them have records, records, bytes, oldest and newest, in UTC."""
    by_topic: dict[str, list[LaneReport]] = {}
    for lane in made.lanes:
        by_topic.setdefault(lane.topic, []).append(lane)
    rows = (
        (
            topic.removeprefix(made.source_prefix),
            len(lanes),
            sum(lane.records > 0 for lane in lanes),
            sum(lane.records for lane in lanes),
            sum(lane.n_bytes for lane in lanes),
            min((lane.first for lane in lanes if lane.first), default=None),
            max((lane.last for lane in lanes if lane.last), default=None),
        )
        for topic, lanes in by_topic.items()
    )
    heads = ("topic", "partitions", "filled", "records", "bytes", "first", "last")
    print_rows(heads, rows, as_csv=as_csv, formats={"records": ",", "bytes": ","})


def note_lines(made: ReplayManifest) -> list[str]:
    """What there is to know of a selection beside its numbers."""
    from tidemill.consumers.operate.replay.records import topic_of
    from tidemill.schemas.catalogue import CATALOGUE, ERASABLE

    lines = []
    if made.undecodable:
        lines.append(f"{made.undecodable:,} records cannot be read, so that no filter can choose them: left out")
    if made.missing:
        lines.append(f"{made.missing:,} records that the steps name were erased from the log: left out")
    if made.references_outside:
        lines.append(
            f"{made.references_outside:,} references lead to records that are not selected: they keep the place of the "
            "original, where the copy holds something else or nothing. A trainer excludes such groups with a reason"
        )
    prefix = made.source_prefix
    personal = {
        lane.topic
        for lane in made.lanes
        if lane.records and CATALOGUE[topic_of(lane.topic.removeprefix(prefix))].config == ERASABLE
    }
    return lines + [f"{topic} {ERASABLE_NOTE}" for topic in sorted(personal)]
