"""What was replayed: ranges, counts and digests, to be kept beside the findings that rest on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tidemill.consumers.operate.replay.marks import Beginning
from tidemill.consumers.operate.replay.plan import Plan
from tidemill.consumers.operate.replay.selection import Selection, utc_text


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What was chosen of one partition."""

    topic: str
    """Full name."""
    partition: int
    start: int
    end: int
    """Offsets [start, end) were looked at."""
    records: int
    n_bytes: int
    first: str | None
    last: str | None
    """Oldest and newest record time, UTC."""
    sha256: str
    """Of the chosen records as they lie in the source."""


@dataclass(frozen=True, slots=True)
class ReplayManifest:
    """What a replay is made of."""

    replay_id: str
    began_at: int
    """Microseconds since the Unix epoch."""
    source_prefix: str
    into: str
    """Prefix of the copies' topics."""
    selection: dict[str, object]
    lanes: list[LaneReport]
    records: int
    n_bytes: int
    sha256: str
    """Of everything chosen: two replays of the same records have the same."""
    undecodable: int
    """Records that were left out because they cannot be read, and so cannot be chosen by what they say."""
    missing: int
    """Records that a step names and that the log no longer holds."""
    references_outside: int
    """Places that copies refer to and that are not copied."""


def manifest(plan: Plan, selection: Selection, begun: Beginning, source_prefix: str, into: str) -> ReplayManifest:
    """The manifest of a plan."""
    return ReplayManifest(
        replay_id=begun.replay_id,
        began_at=begun.began_at,
        source_prefix=source_prefix,
        into=into,
        selection=asdict(selection),
        lanes=lane_reports(plan, source_prefix),
        records=plan.records,
        n_bytes=plan.n_bytes,
        sha256=plan.sha256(),
        undecodable=plan.undecodable,
        missing=len(plan.missing),
        references_outside=sum(1 for _ in plan.outside()),
    )


def lane_reports(plan: Plan, source_prefix: str) -> list[LaneReport]:
    """What is chosen of each partition."""
    return [
        LaneReport(
            topic=source_prefix + lane.topic,
            partition=lane.partition,
            start=lane.start,
            end=lane.end,
            records=len(lane.offsets),
            n_bytes=lane.n_bytes,
            first=None if lane.first_ms is None else utc_text(lane.first_ms),
            last=None if lane.last_ms is None else utc_text(lane.last_ms),
            sha256=lane.sha256,
        )
        for lane in plan.lanes.values()
    ]
