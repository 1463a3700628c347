"""What a replay is made of, as tables and lines for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tidemill.consumers.replay.manifest import LaneReport, ReplayManifest

ERASABLE_NOTE = (
    "holds users' data: an erasure (`tidemill users erase`) does not reach the copies, delete them when you are done"
)


def manifest_table(made: ReplayManifest) -> Table:
    """One line a topic: partitions that have records, records, bytes, oldest and newest."""
    where = f"{made.source_prefix}* into {made.into}*" if made.into else f"{made.source_prefix}*"
    table = Table("topic", title=where, title_justify="left")
    for title in ("partitions", "records", "bytes"):
        table.add_column(title, justify="right")
    for title in ("first (UTC)", "last (UTC)"):
        table.add_column(title, no_wrap=True)
    by_topic: dict[str, list[LaneReport]] = {}
    for lane in made.lanes:
        by_topic.setdefault(lane.topic, []).append(lane)
    for topic, lanes in by_topic.items():
        table.add_row(
            topic.removeprefix(made.source_prefix),
            f"{sum(lane.records > 0 for lane in lanes)} of {len(lanes)}",
            f"{sum(lane.records for lane in lanes):,}",
            f"{sum(lane.n_bytes for lane in lanes):,}",
            min((lane.first for lane in lanes if lane.first), default="-"),
            max((lane.last for lane in lanes if lane.last), default="-"),
        )
    return table


def note_lines(made: ReplayManifest) -> list[str]:
    """What there is to know of a selection beside its numbers."""
    from tidemill.consumers.replay.raw import topic_of
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
