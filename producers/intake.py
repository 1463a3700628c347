"""Takes tasks from the log as a member of a consumer group, and commits what is done. Blocking: it has its own thread.

What holds: while no task is wanted, polling goes on, so that the membership lives and rebalances are not held up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException

from tidemill.producers.offsets import Partition
from tidemill.schemas.clients import GroupMember, Located

LOG = logging.getLogger(__name__)
POLL_S = 0.05
REBALANCING = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError._STATE,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""Why a commit may fail though nothing is wrong: the partitions are on their way to another member."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one round brought."""

    located: list[Located]
    owned: set[Partition]
    committed: dict[Partition, int]


class Intake:
    """One member's way to the tasks."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._paused = False

    def round(self, wanted: bool, offsets: dict[Partition, int]) -> Taken:
        """Commit `offsets` where they are owned, and take at most one record, when one is wanted."""
        committed = self._commit(offsets)
        if not wanted:
            self._member.pause()
        elif self._paused:
            self._member.resume()
        self._paused = not wanted
        located = self._member.poll(POLL_S, max_records=1)
        return Taken(located, self._member.assignment(), committed)

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
