"""A replay from start to end: plan the selection, check the target and then, unless it is a dry run, copy the records.

`prepare` writes nothing, so a dry run shows what a run would do, including refusals. The manifest of a replay contains
its ranges, counts and digests. Every selected record is then written once, at its planned position. Key, partition,
time and headers are those of the original; so is the value, except that references point to the copies. Copies that
the target already holds must be the beginning of the plan, partition by partition; otherwise nothing is written.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from confluent_kafka import KafkaError, Message

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.replay.archive import ArchiveOrigin
from tidemill.consumers.operate.replay.plan import LogOrigin, Plan, lane_reports
from tidemill.consumers.operate.replay.records import CLIENT_ID, REFERRING, Header, Lane, Place, RawRecord, relocated
from tidemill.consumers.operate.replay.target import MARKS_BYTES, ReplayStart, Target, TargetState, copy_headers
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import DELIVERY_TIMEOUT_MS, MAX_RECORD_BYTES
from tidemill.schemas.log.consumed import decoded
from tidemill.schemas.log.producer import DeliveryError, RecordProducer

ReplayOrigin = LogOrigin | ArchiveOrigin
"""The source of a replay's records."""


class Replay:
    """One replay into its own prefix: a new one, or the interrupted one with the id `resume`."""

    def __init__(self, kafka: KafkaSettings, origin: ReplayOrigin, into: str, *, resume: str | None = None) -> None:
        self._kafka, self._origin, self._into, self._resume = kafka, origin, into, resume
        self._target = Target(kafka, into)
        self.plan: Plan
        self.begun: ReplayStart
        self._standing: TargetState

    def prepare(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Plan the replay, and check that the target belongs to it; write nothing.

        Returns:
            the replay's manifest: the selection, the number of copies that an earlier run wrote, its `lanes`, and their
            `records`, `n_bytes` and `sha256` (equal for two replays of the same records); the number of records that
            are left out because they cannot be decoded (`undecodable`) or because a step names them but the log no
            longer holds them (`missing`); and the number of positions that copies refer to but that are not copied
            (`references_outside`).

        Raises:
            ValueError: the target does not belong to this replay, or the replay to continue had another selection.
            LookupError: the log does not hold the selected records.
        """
        self._standing = self._target.check(self._resume)
        old = self._standing.begun
        if old is None and self._standing.records:
            raise ValueError(f"the first copy of replay {self._resume} is gone from {self._into!r}: start a new replay")
        selected = self._origin.selection.digest(self._origin.prefix)
        if old is not None and old.selected != selected:
            raise ValueError(
                f"replay {self._resume} was begun with another selection: give the same options with --resume"
            )
        self.plan = self._origin.plan(None if old is None else old.ends, progress)
        self._target.check_partitions(self.plan.partitions)
        carried_on(self.plan, self._standing)
        # The start time (UTC), and four random digits against collisions.
        new_id = f"replay-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
        self.begun = old or ReplayStart(
            replay_id=self._resume or new_id,
            began_at=now_us(),
            selected=selected,
            ends={lane: chosen.end for lane, chosen in self.plan.lanes.items()},
        )
        plan = self.plan
        return {
            "replay_id": self.begun.replay_id,
            "began_at": self.begun.began_at,
            "source_prefix": self._origin.prefix,
            "into": self._into,
            "already_copied": self._standing.records,
            "selection": asdict(self._origin.selection),
            "lanes": lane_reports(plan, self._origin.prefix),
            "records": plan.records,
            "n_bytes": plan.n_bytes,
            "sha256": plan.sha256(),
            "undecodable": plan.undecodable,
            "missing": len(plan.missing),
            "references_outside": sum(1 for _ in plan.outside()),
        }

    def run(self, speed: float | None = None, progress: Progress = no_progress) -> dict[str, int]:
        """Copy the planned records that are not copied yet, `speed` seconds of the log in a second (None: no pacing).

        Returns and raises like `copy_records`; also raises ValueError if the target topics do not fit the plan.
        """
        self._target.prepare(self.plan.partitions)
        ends = self._target.ends(self.plan.lanes)
        base = {lane: self._standing.first.get(lane, end) for lane, end in ends.items()}
        return copy_records(
            self._origin.ordered(self.plan),
            self.plan,
            self.begun,
            self._origin.prefix,
            carried_on(self.plan, self._standing),
            base,
            Codec(self._kafka.registry_url),
            CopyWriter(self._kafka, self._into),
            wait_s=pacing(speed, time.monotonic),
            progress=progress,
        )


GONE = "{what} were deleted from the source during the copy, by retention or compaction"


def carried_on(plan: Plan, standing: TargetState) -> dict[Lane, int]:
    """Return the number of records of each partition that are copied already.

    Raises ValueError if these copies are not the beginning of the plan: the source has changed since then.
    """
    for lane, offsets in standing.copied.items():
        planned = plan.lanes.get(lane)
        if planned is None or list(planned.offsets[: len(offsets)]) != offsets:
            raise ValueError(
                f"the copies in {lane[0]}[{lane[1]}] are no longer the beginning of the selected records: the source "
                "has lost records since, or the replay's topics were changed. Replay under another prefix"
            )
    return {lane: len(standing.copied.get(lane, ())) for lane in plan.lanes}


def copy_records(
    ordered: Iterable[tuple[int, RawRecord]],
    plan: Plan,
    begun: ReplayStart,
    source_prefix: str,
    done: Mapping[Lane, int],
    base: Mapping[Lane, int],
    codec: Codec,
    writer: CopyWriter,
    *,
    wait_s: Callable[[int], float],
    progress: Progress = no_progress,
) -> dict[str, int]:
    """Copy records of the source, in the order of the replay, each with the time reached; skip those not in the plan.
    When this function returns or is interrupted, all queued copies are in the log.

    Args:
        done: number of records of each partition that are copied already.
        base: offset of the first copy in each partition, by (topic, partition).
        wait_s: returns how long a record waits, see `pacing`.

    Returns the numbers of copies that this run wrote (`written`), that were `there`, and, of the written ones, of those
    whose references were changed to point to copies (`relocated`).

    Raises DeliveryError if the log refuses a copy, ValueError if the source has lost a planned record.
    """

    def copy_of(place: Place) -> int | None:
        rank = plan.rank(place)
        return None if rank is None else base[place[:2]] + rank

    following, there = dict(done), sum(done.values())
    total, copied, n_relocated = plan.records, there, 0
    try:
        for reached_ms, record in ordered:
            rank = plan.rank((*record.lane, record.offset))
            if rank is None or rank < following[record.lane]:
                continue
            if rank > following[record.lane]:
                raise ValueError(GONE.format(what=f"records before {record}"))
            if (waits_s := wait_s(reached_ms)) > 0:
                time.sleep(waits_s)
            value = record.value
            original = decoded(codec, record.value)[0] if record.topic in REFERRING else None
            moved = relocated(original, copy_of)
            if moved is not original:
                n_relocated += 1
                value = codec.encode(moved)
            first = copied == 0
            writer.send_copy(record, value, copy_headers(record, source_prefix, begun, first), base[record.lane] + rank)
            copied += 1
            following[record.lane] += 1
            if first:
                # The first copy holds the `ReplayStart` for a later continuation: no other copy may be written earlier.
                writer.flush()
            progress(copied, total)
    finally:
        writer.flush()
    if copied < total:
        raise ValueError(GONE.format(what=f"{total - copied} of {total} records"))
    return {"written": copied - there, "there": there, "relocated": n_relocated}


def speed_of(text: str) -> float | None:
    """Parse the seconds of the log per second: `original`, `max` (None) or a number above 0, as `10` or `10x`.

    Raises ValueError.
    """
    if text == "max":
        return None
    if text == "original":
        return 1.0
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"--speed {text!r}: give `original`, `max`, or a multiple above 0 such as 10 or 0.5")
    return factor


def pacing(speed: float | None, clock: Callable[[], float]) -> Callable[[int], float]:
    """Return a function of the time at which a record was written, in milliseconds: the seconds, at least 0, until the
    record is due. Times must not decrease; the first record is due at once.

    Args:
        clock: returns seconds from an arbitrary start; never decreases.
    """
    origin: tuple[float, int] | None = None

    def wait_s(reached_ms: int) -> float:
        nonlocal origin
        if speed is None:
            return 0.0
        if origin is None:
            origin = clock(), reached_ms
        began, first_ms = origin
        due = began + (reached_ms - first_ms) / 1_000 / speed
        return max(0.0, due - clock())

    return wait_s


class CopyWriter(RecordProducer):
    """Writes copies and checks that each gets its planned offset."""

    def __init__(self, kafka: KafkaSettings, prefix: str) -> None:
        super().__init__(kafka, CLIENT_ID, own={"message.max.bytes": MAX_RECORD_BYTES + 2 * MARKS_BYTES})
        self._prefix = prefix
        self._misplaced = ""

    def send_copy(self, record: RawRecord, value: bytes | None, headers: list[Header], offset: int) -> None:
        """Queue the copy of a record, which must get `offset`. Raises DeliveryError if an earlier copy failed."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            self._delivered(error, message)
            if error is None and message.offset() != offset:
                self._misplaced = self._misplaced or (
                    f"{message.topic()}[{message.partition()}]: a copy is at offset {message.offset()}, planned was "
                    f"{offset}. Another process writes there: delete these topics and replay under another prefix"
                )

        self._raise_misplaced()
        self.send_bytes(
            self._prefix + record.topic,
            value,
            key=record.key,
            partition=record.partition,
            timestamp_ms=record.timestamp_ms,
            headers=headers,
            on_delivery=delivered,
        )

    def flush(self, timeout_s: float = DELIVERY_TIMEOUT_MS / 1000) -> None:
        """Wait until all queued copies are in the log. Raises DeliveryError."""
        super().flush(timeout_s)
        self._raise_misplaced()

    def _raise_misplaced(self) -> None:
        if self._misplaced:
            raise DeliveryError(self._misplaced)
