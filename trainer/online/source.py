"""Online batches from the log, with what decides of them: the gate's decisions and users' demands about their data.

Decisions and demands are read to the end of the log whenever a batch has come, before anything is decided about it: so
what was said before a batch is known when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, Interaction, OnlineBatch, StepInput, UserRequest
from tidemill.trainer.batch_builder import Exclusion
from tidemill.trainer.log_input import ReferenceLog
from tidemill.trainer.online.interactions import InteractionLog
from tidemill.trainer.online.line import WeightLine
from tidemill.trainer.online.queue import OnlineQueue
from tidemill.trainer.online.trainable import TrainableBatch
from tidemill.trainer.rollout_log import CLIENT

_log = logging.getLogger(__name__)


def batch_log(
    kafka: KafkaSettings, producer: RecordProducer, start: str | Mapping[int, int]
) -> ReferenceLog[OnlineBatch]:
    """The `online-batches` topic."""
    return ReferenceLog(kafka, producer, Topic.ONLINE_BATCHES, OnlineBatch, lambda batch: batch.batch_id, start)


class OnlineInput:
    """Feeds an `OnlineQueue` and a `WeightLine` from the log."""

    def __init__(
        self,
        kafka: KafkaSettings,
        queue: OnlineQueue,
        line: WeightLine,
        producer: RecordProducer,
        vocab_size: int,
        accept_replays: frozenset[str] = frozenset(),
    ) -> None:
        self._queue, self._line = queue, line
        self._standing = LogReader(kafka, [Topic.GATE, Topic.USER_REQUESTS], client_id=CLIENT)
        self._batches = batch_log(kafka, producer, queue.progress().next_offsets)
        self._interactions = InteractionLog(kafka, vocab_size, accept_replays)
        self._found: tuple[StepInput, Mapping[Position, Interaction | Exclusion]] | None = None
        for located in self._standing.read_to_end():
            self._observe(located)

    def poll(self) -> None:
        """Read on, without waiting for what is not there yet."""
        came = self._batches.poll(0.0)
        for located in self._standing.read_to_end() if came else self._standing.poll(0.0):
            self._observe(located)
        for read in came:
            self._queue.read(read.place, read.record, read.replay_id)

    def ready(self, current: int) -> TrainableBatch | None:
        """What is left of the batch to be trained next at version `current`; batches with nothing left are excluded."""
        while (waiting := self._queue.next(current)) is not None:
            if self._found is None or self._found[0] != waiting.place:
                self._found = waiting.place, self._interactions.fetch(waiting.batch.members)
            left = self._queue.settle(waiting, self._found[1], current)
            if isinstance(left, TrainableBatch):
                return left
            self._queue.exclude(waiting, left)
        return None

    def _observe(self, located: ConsumedRecord) -> None:
        match located.record:
            case GateDecision():
                self._line.observe(located.record)
            case UserRequest():
                self._queue.observe_request(located.record)
            case _:
                # Not a dead letter: everybody reads these topics from their beginning, again after each start.
                _log.warning(
                    "%s offset %d is left out: %s", located.topic, located.offset, located.error or "no decision"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._standing.close()
        self._batches.close()
        self._interactions.close()
