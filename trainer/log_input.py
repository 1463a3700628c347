"""The trainer's inputs from the log: groups in order, and the rollouts to which they refer by position.

`groups` and `rollouts` are co-partitioned and a rollout precedes its group, so with forward reads of both nearly every
rollout is in memory. A missing one, after a restart or for a group that closed much later, is fetched by offset. Values
that cannot be decoded or are not groups are written to the dead-letter topic, and reading continues.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Generic, TypeVar

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader, MissingRecordError
from tidemill.schemas.records import Exclusion, Group, GroupMember, OnlineBatch, Rollout, StepInput
from tidemill.schemas.stored_object import ForeignClaimError, StoredObjectError, claimed, read_object
from tidemill.trainer.batch import InvalidRolloutError, InvalidRoutingError, RoutedShape, check, checked_ids
from tidemill.trainer.batch_builder import BatchBuilder
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.trainable import Reference, TrainableGroup, completed

CLIENT = "tidemill-trainer"
REMINDED_S = 600.0
"""Seconds between two warnings."""
R = TypeVar("R", bound=Group | OnlineBatch)
_log = logging.getLogger(__name__)


class MissingRolloutError(LookupError):
    """The log has no rollout at the position in a group: its retention has passed, or the reference is wrong."""


class ReadAhead:
    """Rollouts by position; beyond `limit_bytes` the oldest are removed."""

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
        """Remove and return a record; None if it is not in memory."""
        located, size = self._held.pop((partition, offset), (None, 0))
        self._bytes -= size
        return located


class RolloutLog(ExitStack):
    """The `rollouts` topic by partition and offset; a context manager."""

    def __init__(self, kafka: KafkaSettings, limit_bytes: int) -> None:
        super().__init__()
        self._codec = Codec(kafka.registry_url)
        reader = LogReader(kafka, [Topic.ROLLOUTS], start="end", client_id=CLIENT, codec=self._codec)
        self._reader = self.enter_context(reader)
        self._held = ReadAhead(limit_bytes)

    def read_ahead(self, timeout_s: float) -> None:
        """Read the next rollouts of the log into memory."""
        for located in self._reader.poll(timeout_s):
            self._held.put(located)

    def with_origin(self, member: GroupMember) -> tuple[Rollout, str]:
        """Return the rollout of a group's member, with its segments, and the replay that wrote it; empty: none did.

        Raises:
            MissingRolloutError: the log or the store no longer has it.
            InvalidRolloutError: its position contains something else.
            TimeoutError: the broker did not deliver it in time.
        """
        located = self._held.take(member.partition, member.offset)
        if located is None:
            # The record itself is not kept in memory: it could be removed again before it is used.
            place = Position(Topic.ROLLOUTS.value, member.partition, member.offset)
            try:
                located = self._reader.at(place, self._held.put)
            except MissingRecordError as error:
                raise MissingRolloutError(str(error)) from error
        record = located.record
        if not isinstance(record, Rollout) or record.rollout_id != member.rollout_id:
            raise InvalidRolloutError(
                f"rollouts[{member.partition}] offset {member.offset} does not hold rollout {member.rollout_id}"
            )
        try:
            return claimed(record, self._codec), located.replay_id
        except (StoredObjectError, DecodeError) as error:
            raise MissingRolloutError(f"rollout {record.rollout_id}: {error}") from error
        except ForeignClaimError as error:
            raise InvalidRolloutError(str(error)) from error


def expert_ids_of(rollout: Rollout, shape: RoutedShape) -> ExpertIds:
    """Return the expert ids of a rollout with its segments, for a model of this shape. Raises InvalidRoutingError."""
    if rollout.expert_ids is None:
        raise InvalidRoutingError(f"rollout {rollout.rollout_id} was recorded without expert ids")
    try:
        return checked_ids(read_object(rollout.expert_ids), rollout.segments, shape)
    except (StoredObjectError, InvalidRoutingError) as error:
        raise InvalidRoutingError(f"rollout {rollout.rollout_id}: {error}") from error


class ReferenceLog(ExitStack, Generic[R]):
    """Reader of the topic of groups or of online batches, from given offsets on; a context manager.

    Args:
        start: "beginning", "end", or next offsets by partition.
    """

    def __init__(self, kafka: KafkaSettings, kind: type[R], start: str | Mapping[int, int]) -> None:
        super().__init__()
        self._topic = Topic.GROUPS if kind is Group else Topic.ONLINE_BATCHES
        begin = start if isinstance(start, str) else {(self._topic, p): offset for p, offset in start.items()}
        self._kind = kind
        self._reader = self.enter_context(LogReader(kafka, [self._topic], start=begin, client_id=CLIENT))
        self._names = Names(kafka.topic_prefix)

    def partitions(self) -> list[int]:
        return self._reader.partitions(self._topic)

    def poll(self, timeout_s: float, producer: RecordProducer) -> list[Reference[R]]:
        """Return the next records of its kind; `producer` writes dead letters for others."""
        found: list[Reference[R]] = []
        for located in self._reader.poll(timeout_s):
            if isinstance(located.record, self._kind):
                name = _name(located.record)
                place = StepInput(name, located.topic.value, located.partition, located.offset)
                found.append(Reference(place, located.record, located.replay_id))
            else:
                reason = located.error or f"{type(located.record).__name__} is no record of this topic"
                send_dead_letter(producer, self._names, located, reason, CLIENT)
        return found

    def at(self, place: StepInput) -> R:
        """Return the record at a recorded position. Raises LookupError if there is another record or none."""
        found = self._reader.at(Position(self._topic.value, place.partition, place.offset)).record
        if isinstance(found, self._kind) and _name(found) == place.group_id:
            return found
        where = f"{self._topic}[{place.partition}] offset {place.offset}"
        raise LookupError(f"{where} does not hold {self._kind.__name__} {place.group_id}")


def _name(record: Group | OnlineBatch) -> str:
    return record.group_id if isinstance(record, Group) else record.batch_id


class LogInput(ExitStack):
    """Reads the log for a `BatchBuilder`, unless the builder is full; a context manager.

    The memory is bounded: the groups that wait in the builder, those of one poll, and `trainer.read_ahead_bytes` of
    rollouts that were read ahead.

    Raises ValueError for `trainer.in_order` if the groups are in several partitions.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: TrainerSettings,
        builder: BatchBuilder,
        producer: RecordProducer,
        vocab_size: int,
        routed: RoutedShape | None = None,
    ) -> None:
        super().__init__()
        self._builder, self._producer = builder, producer
        self._groups = self.enter_context(ReferenceLog(kafka, Group, builder.progress().next_offsets))
        if settings.in_order and len(partitions := self._groups.partitions()) != 1:
            raise ValueError(
                f"trainer.in_order needs one order of all groups, and `groups` has {len(partitions)} partitions: "
                "create the topics under a fresh prefix with kafka.partitions set to 1, or set trainer.in_order to "
                "false"
            )
        self._rollouts = self.enter_context(RolloutLog(kafka, settings.read_ahead_bytes))
        self._vocab_size, self._routed = vocab_size, routed
        self._undecided: deque[Reference[Group]] = deque()
        self._warn_at = 0.0
        """Time of the next warning about missed groups, on the monotonic clock."""

    def poll(self, timeout_s: float, version: int) -> None:
        """Read the next rollouts and let the builder decide the next groups at trainer version `version`.

        If the builder is full, only wait.
        """
        if self._builder.full:
            time.sleep(timeout_s)
            return
        self._rollouts.read_ahead(0.0)
        if not self._undecided:
            self._undecided.extend(self._groups.poll(timeout_s, self._producer))
        while self._undecided and not self._builder.full:
            read = self._undecided.popleft()
            if not self._builder.wants(read, version):
                continue
            try:
                found = trainable(read, self._rollouts, self._vocab_size, self._routed)
            except MissingRolloutError:
                reason = Exclusion.MISSING_ROLLOUT
            except InvalidRoutingError as error:
                _log.warning("group %s is not trained: %s", read.record.group_id, error)
                reason = Exclusion.INVALID_ROUTING
            except InvalidRolloutError:
                reason = Exclusion.INVALID_ROLLOUT
            else:
                self._builder.accept(found)
                continue
            self._builder.exclude(read.place, reason, len(read.record.members))
        if (missed := self._builder.missed(version)) and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + REMINDED_S
            _log.warning("the next step waits for groups: %s", missed)


def trainable(
    read: Reference[Group], rollouts: RolloutLog, vocab_size: int, routed: RoutedShape | None = None
) -> TrainableGroup:
    """Return a group with the checked rollouts of its completed members.

    Args:
        routed: the shape of the model's expert ids, if tokens are routed by them.

    Raises as `RolloutLog.with_origin` does, and InvalidRoutingError.
    """
    found = [rollouts.with_origin(member) for member in completed(read.record)]
    for rollout, _ in found:
        check(rollout, vocab_size)
    replays = {read.replay_id, *(origin for _, origin in found)} - {""}
    expert_ids = () if routed is None else tuple(expert_ids_of(rollout, routed) for rollout, _ in found)
    return TrainableGroup(
        read.place, read.record, tuple(rollout for rollout, _ in found), frozenset(replays), expert_ids
    )
