"""Carries out a plan: every chosen record is written once, at the place that was planned for it.

Key, partition, time and headers are those of the original. So is the value, except that references point to the copies.
The copies that are in the target already must be the beginning of the plan, partition by partition; otherwise nothing
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.replay.plan import Plan
from tidemill.consumers.operate.replay.records import REFERRING, Lane, Place, RawRecord, relocated
from tidemill.consumers.operate.replay.target import Beginning, CopyWriter, TargetRefused, TargetState, copy_headers
from tidemill.schemas.codec import Codec, DecodeError

GONE = "{what} went from the source while it was copied: its retention or compaction has removed them"


@dataclass(slots=True)
class Copied:
    """What a run of a replay did."""

    written: int = 0
    """Copies written by this run."""
    there: int = 0
    """Copies that an earlier run had written."""
    relocated: int = 0
    """Copies of this run whose references were made to point to copies."""


def carried_on(plan: Plan, standing: TargetState) -> dict[Lane, int]:
    """How many records of each partition are copied already.

    Raises TargetRefused when what lies there is not the beginning of the plan: the source has changed meanwhile.
    """
    for lane, offsets in standing.copied.items():
        planned = plan.lanes.get(lane)
        if planned is None or list(planned.offsets[: len(offsets)]) != offsets:
            raise TargetRefused(
                f"what was copied of {lane[0]}[{lane[1]}] is no longer the beginning of the selected records: the "
                "source has lost records since, or the replay's topics were changed. Replay under another prefix"
            )
    return {lane: len(standing.copied.get(lane, ())) for lane in plan.lanes}


class Copier:
    """Copies the records of one plan.

    Args:
        done: how many of each partition are copied already.
        base: offset of the first copy in each partition, by (topic, partition).
        pause: waits so many seconds.
    """

    def __init__(
        self,
        plan: Plan,
        begun: Beginning,
        source_prefix: str,
        done: Mapping[Lane, int],
        base: Mapping[Lane, int],
        codec: Codec,
        writer: CopyWriter,
        *,
        pacer: Pacer,
        pause: Callable[[float], object],
    ) -> None:
        self._plan, self._begun, self._source_prefix = plan, begun, source_prefix
        self._next, self._base = dict(done), base
        self._codec, self._writer = codec, writer
        self._pacer, self._pause = pacer, pause
        self.copied = Copied(there=sum(done.values()))

    def run(self, ordered: Iterable[tuple[int, RawRecord]], progress: Progress = no_progress) -> Copied:
        """Copy records of the source, in the order of the replay, each with the time reached; those not in the plan are
        passed over. What was queued is in the log when this returns or is interrupted.

        Raises DeliveryError when the log refuses a copy, TargetRefused when the source has lost a planned record.
        """
        total = self._plan.records
        try:
            for reached_ms, record in ordered:
                rank = self._plan.rank((*record.lane, record.offset))
                if rank is None or rank < self._next[record.lane]:
                    continue
                if rank > self._next[record.lane]:
                    raise TargetRefused(GONE.format(what=f"records before {record}"))
                if (wait_s := self._pacer.wait_s(reached_ms)) > 0:
                    self._pause(wait_s)
                self._write(record, rank)
                progress(self.copied.there + self.copied.written, total)
        finally:
            self._writer.flush()
        if self.copied.there + self.copied.written != total:
            raise TargetRefused(
                GONE.format(what=f"{total - self.copied.there - self.copied.written} of {total} records")
            )
        return self.copied

    def _write(self, record: RawRecord, rank: int) -> None:
        first = self.copied.there + self.copied.written == 0
        headers = copy_headers(record, self._source_prefix, self._begun, first)
        self._writer.send(record, self._value(record), headers, self._base[record.lane] + rank)
        self.copied.written += 1
        self._next[record.lane] += 1
        if first:
            # A process that carries this replay on finds its beginning in its first copy: none may be there before it.
            self._writer.flush()

    def _value(self, record: RawRecord) -> bytes | None:
        if record.topic not in REFERRING:
            return record.value
        try:
            original = self._codec.decode(record.value)
        except DecodeError:
            return record.value
        moved = relocated(original, self._copy_of)
        if moved is original:
            return record.value
        self.copied.relocated += 1
        return self._codec.encode(moved)

    def _copy_of(self, place: Place) -> int | None:
        rank = self._plan.rank(place)
        return None if rank is None else self._base[place[:2]] + rank


ORIGINAL = "original"
FULL = "max"

Clock = Callable[[], float]
"""Seconds, from any beginning; never goes back."""


def speed_of(text: str) -> float | None:
    """How many seconds of the log pass in one second: `original`, `max` (None) or a number above 0, `10` or `10x`.

    Raises ValueError.
    """
    if text == FULL:
        return None
    if text == ORIGINAL:
        return 1.0
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"--speed {text!r}: give `original`, `max`, or a multiple above 0 such as 10 or 0.5")
    return factor


class Pacer:
    """Says how long a record has to wait. The first record that it is asked of is due at once."""

    def __init__(self, speed: float | None, clock: Clock) -> None:
        self._speed, self._clock = speed, clock
        self._origin: tuple[float, int] | None = None

    def wait_s(self, reached_ms: int) -> float:
        """Seconds, at least 0, until a record written at `reached_ms` is due. Times must not go back."""
        if self._speed is None:
            return 0.0
        if self._origin is None:
            self._origin = (self._clock(), reached_ms)
        began, first_ms = self._origin
        due = began + (reached_ms - first_ms) / 1_000 / self._speed
        return max(0.0, due - self._clock())
