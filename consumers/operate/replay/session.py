"""A replay from start to end: the selection is planned, the target checked, and then, unless it is a dry run, copied.

`prepare` writes nothing, so that a dry run shows what a run would do, refusals included. The manifest of a replay holds
its ranges, counts and digests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Protocol, Self

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.replay.copy import Clock, Copied, Copier, Pacer, carried_on
from tidemill.consumers.operate.replay.plan import Plan, Planner
from tidemill.consumers.operate.replay.records import Lane, RawRecord
from tidemill.consumers.operate.replay.selection import Selection, utc_text
from tidemill.consumers.operate.replay.source import LogSource, Range
from tidemill.consumers.operate.replay.target import Beginning, CopyWriter, Target, TargetRefused, TargetState
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings


class ReplayOrigin(Protocol):
    """Where the records of a replay come from: a log, or an archive."""

    prefix: str
    """Of the topics that they lay in."""
    selection: Selection

    def plan(self, ends: Mapping[Lane, int] | None, progress: Progress) -> Plan:
        """What there is to copy; `ends` as in `Planner`."""

    def ordered(self, plan: Plan) -> Iterable[tuple[int, RawRecord]]:
        """The records of a plan, and perhaps others, in the order of `OrderedMerge`, with the time reached."""

    def close(self) -> None:
        """Give back what it holds."""


class LogOrigin:
    """Records of the topics under the configured prefix."""

    def __init__(self, kafka: KafkaSettings, selection: Selection) -> None:
        self.prefix, self.selection = kafka.topic_prefix, selection
        self._source = LogSource(kafka, selection.isolation)
        self._codec = Codec(kafka.registry_url)

    def plan(self, ends: Mapping[Lane, int] | None, progress: Progress) -> Plan:
        """What the selection comes to. Raises like `Planner.plan`."""
        return Planner(self._source, self._codec, progress, ends).plan(self.selection)

    def ordered(self, plan: Plan) -> Iterator[tuple[int, RawRecord]]:
        """Every record between the first and the last that is chosen of each partition."""
        return self._source.ordered(
            {
                lane: Range(chosen.offsets[0], chosen.offsets[-1] + 1)
                for lane, chosen in plan.lanes.items()
                if chosen.offsets
            }
        )

    def close(self) -> None:
        """Give the connections back."""
        self._source.close()


class Replay:
    """One replay into a prefix of its own.

    Args:
        resume: id of the interrupted replay that goes on; None for one that begins.
    """

    def __init__(self, kafka: KafkaSettings, origin: ReplayOrigin, into: str, *, resume: str | None = None) -> None:
        self._kafka, self._origin, self._into, self._resume = kafka, origin, into, resume
        self._target = Target(kafka, into)
        self.plan: Plan
        self.begun: Beginning
        self._standing: TargetState

    def prepare(self, progress: Progress = no_progress) -> ReplayManifest:
        """Plan, and check that the target is this replay's; nothing is written.

        Raises:
            TargetRefused: the target is somebody else's, or the replay that goes on was another one.
            LookupError: the log does not hold what is selected.
        """
        self._standing = self._target.check(self._resume)
        old = self._standing.begun
        if old is None and self._standing.records:
            raise TargetRefused(
                f"the first copy of replay {self._resume} is gone from {self._into!r}: start a new replay"
            )
        selected = self._origin.selection.digest(self._origin.prefix)
        if old is not None and old.selected != selected:
            raise TargetRefused(
                f"replay {self._resume} was begun with another selection: give the same options with --resume"
            )
        self.plan = self._origin.plan(None if old is None else old.ends, progress)
        self._target.check_partitions(self.plan)
        carried_on(self.plan, self._standing)
        # When it began (UTC), and four digits against chance.
        new_id = f"replay-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
        self.begun = old or Beginning(
            replay_id=self._resume or new_id,
            began_at=now_us(),
            selected=selected,
            ends={lane: chosen.end for lane, chosen in self.plan.lanes.items()},
        )
        return manifest(self.plan, self._origin.selection, self.begun, self._origin.prefix, self._into)

    @property
    def already_copied(self) -> int:
        """Copies that an earlier run wrote."""
        return self._standing.records

    def run(
        self,
        speed: float | None = None,
        progress: Progress = no_progress,
        *,
        clock: Clock = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> Copied:
        """Copy what is planned and not copied yet.

        Args:
            speed: seconds of the log in a second; None for as fast as it goes.

        Raises like `Copier.run`, and TargetRefused when the topics cannot be those of the plan.
        """
        self._target.prepare(self.plan)
        ends = self._target.ends(self.plan)
        base = {lane: self._standing.first.get(lane, end) for lane, end in ends.items()}
        copier = Copier(
            self.plan,
            self.begun,
            self._origin.prefix,
            carried_on(self.plan, self._standing),
            base,
            Codec(self._kafka.registry_url),
            CopyWriter(self._kafka, self._into),
            pacer=Pacer(speed, clock),
            pause=pause,
        )
        return copier.run(self._origin.ordered(self.plan), progress)

    def close(self) -> None:
        """Give back what the origin holds."""
        self._origin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
