"""The `rollouts` topic by place, and its records that are held in memory ahead of the groups that refer to them."""

from __future__ import annotations

from collections import OrderedDict

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.reader import LogReader, MissingRecordError
from tidemill.schemas.records import GroupMember, Rollout
from tidemill.schemas.stored_object import ClaimError, ForeignClaimError, claimed_rollout, load_claim
from tidemill.trainer.batch import InvalidRolloutError
from tidemill.trainer.expert_ids import InvalidRoutingError, RoutedShape, checked_ids

CLIENT = "tidemill-trainer"


class MissingRolloutError(LookupError):
    """The log holds no such rollout where a group says it is: its retention has passed, or the reference is wrong."""


class ReadAhead:
    """Rollouts by place, oldest forgotten first when they pass `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[tuple[int, int], tuple[ConsumedRecord, int]] = OrderedDict()
        self._bytes = 0

    def put(self, located: ConsumedRecord) -> None:
        """Keep one record; the newest is always kept, at any size."""
        place = (located.partition, located.offset)
        if place in self._held:
            return
        self._held[place] = (located, len(located.value or b""))
        self._bytes += self._held[place][1]
        while self._bytes > self._limit_bytes and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def take(self, partition: int, offset: int) -> ConsumedRecord | None:
        """Give a record out and forget it; None when it is not held."""
        located, size = self._held.pop((partition, offset), (None, 0))
        self._bytes -= size
        return located


class RolloutLog:
    """The `rollouts` topic by partition and offset."""

    def __init__(self, kafka: KafkaSettings, limit_bytes: int) -> None:
        self._codec = Codec(kafka.registry_url)
        self._reader = LogReader(kafka, [Topic.ROLLOUTS], start="end", client_id=CLIENT, codec=self._codec)
        self._held = ReadAhead(limit_bytes)

    def read_ahead(self, timeout_s: float) -> None:
        """Hold the next rollouts of the log."""
        for located in self._reader.poll(timeout_s):
            self._held.put(located)

    def with_origin(self, member: GroupMember) -> tuple[Rollout, str]:
        """The rollout of a group's member, with its segments, and the replay that wrote it; empty: none did.

        Raises:
            MissingRolloutError: the log or the store no longer holds it.
            InvalidRolloutError: what lies there is something else.
            TimeoutError: the broker did not deliver it in time.
        """
        located = self._held.take(member.partition, member.offset) or self._fetch(member)
        record = located.record
        if not isinstance(record, Rollout) or record.rollout_id != member.rollout_id:
            raise InvalidRolloutError(
                f"rollouts[{member.partition}] offset {member.offset} does not hold rollout {member.rollout_id}"
            )
        return self._with_segments(record), located.replay_id

    def close(self) -> None:
        """Give the connections back."""
        self._reader.close()

    def _fetch(self, member: GroupMember) -> ConsumedRecord:
        """The record itself is not held: reading on to it may push it out of memory before it is used."""
        try:
            return self._reader.at(Position(Topic.ROLLOUTS.value, member.partition, member.offset), self._held.put)
        except MissingRecordError as error:
            raise MissingRolloutError(str(error)) from error

    def _with_segments(self, rollout: Rollout) -> Rollout:
        try:
            return claimed_rollout(rollout, self._codec)
        except (ClaimError, DecodeError) as error:
            raise MissingRolloutError(f"rollout {rollout.rollout_id}: {error}") from error
        except ForeignClaimError as error:
            raise InvalidRolloutError(str(error)) from error


def expert_ids_of(rollout: Rollout, shape: RoutedShape) -> ExpertIds:
    """The expert ids of a rollout with its segments, for a model of this shape. Raises InvalidRoutingError."""
    if rollout.expert_ids is None:
        raise InvalidRoutingError(f"rollout {rollout.rollout_id} was recorded without expert ids")
    try:
        return checked_ids(load_claim(rollout.expert_ids), rollout.segments, shape)
    except (ClaimError, InvalidRoutingError) as error:
        raise InvalidRoutingError(f"rollout {rollout.rollout_id}: {error}") from error
