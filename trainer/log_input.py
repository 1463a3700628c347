"""The trainer's inputs from the log: groups in order, and the rollouts that they refer to by place.

`groups` and `rollouts` are co-partitioned and a rollout precedes its group, so reading both forward finds nearly every
rollout in memory. One that is not there, after a restart or for a group that closed long after, is fetched by offset.
What is undecodable or is no group goes to the dead-letter topic, and reading goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Exclusion, Group, StepInput
from tidemill.trainer.batch import InvalidRolloutError, check
from tidemill.trainer.batch_builder import BatchBuilder
from tidemill.trainer.expert_ids import InvalidRoutingError, RoutedShape
from tidemill.trainer.rollout_log import CLIENT, MissingRolloutError, RolloutLog, expert_ids_of
from tidemill.trainer.trainable import TrainableGroup, completed
from tidemill.trainer.undefined_lag import Reminder

_log = logging.getLogger(__name__)

R = TypeVar("R")


class InOrderError(ValueError):
    """The log does not give the groups in one order; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Reference(Generic[R]):
    """A record that refers to others, as it was read."""

    place: StepInput
    record: R
    replay_id: str
    """The replay that wrote it; empty: none did."""


class ReferenceLog(Generic[R]):
    """A topic whose records refer to others, from given offsets on.

    Args:
        kind: what the topic holds; anything else there is a dead letter.
        name: a record's id.
        start: "beginning", "end", or next offsets by partition.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        producer: RecordProducer,
        topic: Topic,
        kind: type[R],
        name: Callable[[R], str],
        start: str | Mapping[int, int],
    ) -> None:
        begin = start if isinstance(start, str) else {(topic, p): offset for p, offset in start.items()}
        self._topic, self._kind, self._name = topic, kind, name
        self._reader = LogReader(kafka, [topic], start=begin, client_id=CLIENT)
        self._producer = producer
        self._names = Names(kafka.topic_prefix)

    def partitions(self) -> list[int]:
        """The topic's partitions."""
        return self._reader.partitions(self._topic)

    def poll(self, timeout_s: float) -> list[Reference[R]]:
        """The next records."""
        found = []
        for located in self._reader.poll(timeout_s):
            if isinstance(located.record, self._kind):
                name = self._name(located.record)
                place = StepInput(name, located.topic.value, located.partition, located.offset)
                found.append(Reference(place, located.record, located.replay_id))
            else:
                reason = located.error or f"{type(located.record).__name__} is no record of this topic"
                send_dead_letter(self._producer, self._names, located, reason, CLIENT)
        return found

    def at(self, place: StepInput) -> R:
        """The record at a recorded place. Raises LookupError when something else, or nothing, lies there."""
        found = self._reader.at(Position(self._topic.value, place.partition, place.offset)).record
        if isinstance(found, self._kind) and self._name(found) == place.group_id:
            return found
        where = f"{self._topic}[{place.partition}] offset {place.offset}"
        raise LookupError(f"{where} does not hold {self._kind.__name__} {place.group_id}")

    def close(self) -> None:
        """Give the connections back."""
        self._reader.close()


def group_log(kafka: KafkaSettings, producer: RecordProducer, start: str | Mapping[int, int]) -> ReferenceLog[Group]:
    """The `groups` topic."""
    return ReferenceLog(kafka, producer, Topic.GROUPS, Group, lambda group: group.group_id, start)


class LogInput:
    """Feeds a `BatchBuilder` from the log, as far as it takes any.

    What waits in memory is bounded: the groups that the builder lets wait, those of one poll, and `limit_bytes` of
    rollouts ahead of them.

    Raises InOrderError when the builder has to have the groups in order and they lie in several partitions.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        builder: BatchBuilder,
        producer: RecordProducer,
        *,
        limit_bytes: int,
        vocab_size: int,
        routed: RoutedShape | None = None,
    ) -> None:
        self._builder = builder
        self._groups = group_log(kafka, producer, builder.progress().next_offsets)
        if builder.in_order:
            _require_one(self._groups.partitions())
        self._rollouts = RolloutLog(kafka, limit_bytes)
        self._vocab_size, self._routed = vocab_size, routed
        self._undecided: deque[Reference[Group]] = deque()
        self._reminder = Reminder()

    def poll(self, timeout_s: float, version: int) -> None:
        """Read on: hold the next rollouts and let the builder decide the next groups at trainer version `version`.

        While the builder is full this only lets the time pass.
        """
        if self._builder.full:
            time.sleep(timeout_s)
            return
        self._rollouts.read_ahead(0.0)
        if not self._undecided:
            self._undecided.extend(self._groups.poll(timeout_s))
        while self._undecided and not self._builder.full:
            self._decide(self._undecided.popleft(), version)
        self._warn(version)

    def _warn(self, version: int) -> None:
        missed = self._builder.missed
        if missed is not None and self._reminder.due(time.monotonic()):
            _log.warning("the next step waits for groups: %s", missed.told(self._builder.incarnation, version))

    def _decide(self, read: Reference[Group], version: int) -> None:
        if not self._builder.wants(read.place, read.record, version, read.replay_id):
            return
        try:
            found = trainable(
                read.place, read.record, self._rollouts, self._vocab_size, read.replay_id, routed=self._routed
            )
        except MissingRolloutError:
            self._builder.exclude(read.place, read.record, Exclusion.MISSING_ROLLOUT)
        except InvalidRoutingError as error:
            _log.warning("group %s is not trained: %s", read.record.group_id, error)
            self._builder.exclude(read.place, read.record, Exclusion.INVALID_ROUTING)
        except InvalidRolloutError:
            self._builder.exclude(read.place, read.record, Exclusion.INVALID_ROLLOUT)
        else:
            self._builder.accept(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._groups.close()
        self._rollouts.close()


def trainable(
    place: StepInput,
    group: Group,
    rollouts: RolloutLog,
    vocab_size: int,
    replay_id: str = "",
    *,
    routed: RoutedShape | None = None,
) -> TrainableGroup:
    """A group, which the replay `replay_id` wrote if any did, with the checked rollouts of its completed members.

    Args:
        routed: what expert ids of the model look like, where tokens are routed by them.

    Raises as `RolloutLog.with_origin`, and InvalidRoutingError.
    """
    found = [rollouts.with_origin(member) for member in completed(group)]
    for rollout, _ in found:
        check(rollout, vocab_size)
    replays = {replay_id, *(origin for _, origin in found)} - {""}
    expert_ids = () if routed is None else tuple(expert_ids_of(rollout, routed) for rollout, _ in found)
    return TrainableGroup(place, group, tuple(rollout for rollout, _ in found), frozenset(replays), expert_ids)


def _require_one(partitions: list[int]) -> None:
    if len(partitions) != 1:
        raise InOrderError(
            f"trainer.in_order needs one order of all groups, and `groups` has {len(partitions)} partitions: create "
            "the topics under a fresh prefix with kafka.partitions set to 1, or set trainer.in_order to false"
        )
