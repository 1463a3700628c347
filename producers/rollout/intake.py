"""Takes tasks from the log as a member of a consumer group, and commits what is done. Blocking: it has its own thread.

A task comes with its recorded part, from a worker that began it before.

What holds: while no task is wanted the member polls every `PATIENCE_S`, with its partitions paused, so that it stays a
member and holds a rebalance up no longer. It does not do so at once, since a paused partition takes about a second to
flow again, and what was fetched ahead is lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException

from tidemill.producers.rollout.recovery import Partition, TaskProgress, TaskRecovery
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.group import GroupConsumer

LOG = logging.getLogger(__name__)
POLL_S = 0.05
PATIENCE_S = 2.0
REBALANCING = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError._STATE,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._WAIT_COORD,
    }
)
"""Why a commit may fail though nothing is wrong: the partitions are on their way to another member, or the group to
another broker."""
FENCED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL, KafkaError._FENCED})
"""What a static member is told when another one took its place."""


class OffsetTracker:
    """Offsets that may be committed when work finishes out of order. Pure.

    What holds: the offset to commit of a partition is never past a record whose work is unfinished, so that work that a
    crash interrupts is delivered again; a record delivered again while its work runs, or after it, is not begun twice.
    """

    def __init__(self) -> None:
        self._running: dict[Partition, set[int]] = {}
        self._next: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}

    def begin(self, partition: Partition, offset: int) -> bool:
        """A record arrived; whether its work is to be begun. Offsets of a partition arrive in order, with gaps."""
        if offset < self._next.get(partition, 0):
            return False
        self._running.setdefault(partition, set()).add(offset)
        self._next[partition] = offset + 1
        return True

    def finish(self, partition: Partition, offset: int) -> None:
        """The work of a record is done. One of a partition that was dropped is ignored."""
        self._running.get(partition, set()).discard(offset)

    def drop(self, partition: Partition) -> None:
        """The partition belongs to another member now."""
        for state in (self._running, self._next, self._committed):
            state.pop(partition, None)

    def partitions(self) -> set[Partition]:
        """Partitions of which a record has arrived."""
        return set(self._next)

    def committable(self) -> dict[Partition, int]:
        """The next offset to read of each partition where it moved since `committed`."""
        marks = {partition: min(self._running[partition], default=end) for partition, end in self._next.items()}
        return {partition: mark for partition, mark in marks.items() if mark > self._committed.get(partition, 0)}

    def committed(self, offsets: dict[Partition, int]) -> None:
        """The offsets were committed."""
        self._committed.update(offsets)


class Fenced(RuntimeError):
    """Another worker joined under this one's name."""


@dataclass(frozen=True, slots=True)
class TakenTasks:
    """What one round brought."""

    delivered: list[tuple[ConsumedRecord, TaskProgress]]
    """Records of `tasks`, with what the log has of their tasks already."""
    owned: set[Partition]
    committed: dict[Partition, int]


class TaskIntake:
    """One member's way to the tasks."""

    def __init__(self, member: GroupConsumer, recovery: TaskRecovery) -> None:
        self._member = member
        self._recovery = recovery
        self._paused = False
        self._polled_at = time.monotonic()

    def round(self, wanted: bool, offsets: dict[Partition, int]) -> TakenTasks:
        """Commit `offsets` where they are owned; take at most one record, waiting `POLL_S`, when one is wanted.

        Raises Fenced; KafkaException, LookupError or TimeoutError when the log cannot be read.
        """
        try:
            committed = self._commit(offsets)
            located = self._take() if wanted else self._keep_alive()
        except KafkaException as error:
            if error.args[0].code() not in FENCED:
                raise
            raise Fenced(
                "another worker of this run joined under the same name: give every worker its own rollout.worker_id"
            ) from error
        owned = self._member.assignment()
        self._recovery.keep(owned)
        return TakenTasks([(one, self._recovery.progress(one)) for one in located], owned, committed)

    def _take(self) -> list[ConsumedRecord]:
        if self._paused:
            self._member.resume()
            self._paused = False
        return self._poll(POLL_S)

    def _keep_alive(self) -> list[ConsumedRecord]:
        if time.monotonic() - self._polled_at < PATIENCE_S:
            return []
        self._member.pause()
        self._paused = True
        return self._poll(0.0)  # a partition that was assigned just now is not paused, and may bring a record

    def _poll(self, timeout_s: float) -> list[ConsumedRecord]:
        located = self._member.poll(timeout_s, max_records=1)
        self._polled_at = time.monotonic()
        return located

    def _commit(self, offsets: dict[Partition, int]) -> dict[Partition, int]:
        owned = self._member.assignment()
        mine = {partition: offset for partition, offset in offsets.items() if partition in owned}
        try:
            self._member.commit(mine)
        except KafkaException as error:
            if error.args[0].code() not in REBALANCING:
                raise
            LOG.info("commit put off until the group is balanced: %s", error)
            return {}
        return mine
