"""A replay from end to end: what is selected is planned, the target checked, and then, where it is wanted, copied.

`prepare` writes nothing, so that a dry run tells what a run would do, refusals included.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Protocol, Self

from tidemill.consumers.operate.reading import Progress, no_progress
from tidemill.consumers.operate.replay.copy import Copied, Copier, carried_on
from tidemill.consumers.operate.replay.manifest import ReplayManifest, manifest
from tidemill.consumers.operate.replay.marks import Beginning
from tidemill.consumers.operate.replay.pace import Clock, Pacer
from tidemill.consumers.operate.replay.plan import Plan
from tidemill.consumers.operate.replay.planner import Planner
from tidemill.consumers.operate.replay.raw import Lane, RawRecord
from tidemill.consumers.operate.replay.selection import Selection
from tidemill.consumers.operate.replay.source import LogSource, Range
from tidemill.consumers.operate.replay.target import Refused, Standing, Target, Writer
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings


class Origin(Protocol):
    """Where the records of a replay come from: a log, or an archive."""

    prefix: str
    """Of the topics that they lay in."""
    selection: Selection

    def plan(self, ends: Mapping[Lane, int] | None, progress: Progress) -> Plan:
        """What there is to copy; `ends` as in `Planner`."""

    def ordered(self, plan: Plan) -> Iterable[tuple[int, RawRecord]]:
        """The records of a plan, and perhaps others, in the order of `Merge`, with the time reached."""

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

    def __init__(self, kafka: KafkaSettings, origin: Origin, into: str, *, resume: str | None = None) -> None:
        self._kafka, self._origin, self._into, self._resume = kafka, origin, into, resume
        self._target = Target(kafka, into)
        self.plan: Plan
        self.begun: Beginning
        self._standing: Standing

    def prepare(self, progress: Progress = no_progress) -> ReplayManifest:
        """Plan, and check that the target is this replay's; nothing is written.

        Raises:
            Refused: the target is somebody else's, or the replay that goes on was another one.
            LookupError: the log does not hold what is selected.
        """
        self._standing = self._target.check(self._resume)
        old = self._standing.begun
        if old is None and self._standing.records:
            raise Refused(f"the first copy of replay {self._resume} is gone from {self._into!r}: replay anew")
        selected = self._origin.selection.digest(self._origin.prefix)
        if old is not None and old.selected != selected:
            raise Refused(
                f"replay {self._resume} was begun with another selection: give the same options with --resume"
            )
        self.plan = self._origin.plan(None if old is None else old.ends, progress)
        self._target.check_partitions(self.plan)
        carried_on(self.plan, self._standing)
        self.begun = old or Beginning(
            replay_id=self._resume or new_replay_id(),
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

        Raises like `Copier.run`, and Refused when the topics cannot be those of the plan.
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
            Writer(self._kafka, self._into),
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


def new_replay_id() -> str:
    """A name for a replay: when it began (UTC), and four digits against chance."""
    return f"replay-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
