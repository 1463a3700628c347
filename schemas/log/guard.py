"""What every consumer's reading is guarded against: records that are gone, and a client that reads no more.

librdkafka is told never to choose an offset by itself (`auto.offset.reset: error`): what is out of range is looked at
here. After a gap was told the consumer stands at the first record that is kept, so that whoever can do without the
missing ones goes on polling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Set

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import raise_lasting
from tidemill.schemas.log.partitions import watermarks
from tidemill.schemas.log.retention import RetentionGap, TopicMadeAnew
from tidemill.schemas.log.stall import Place, ReadingWatch, Stall
from tidemill.schemas.log.watermarks import LogEnds

LOG = logging.getLogger(__name__)
LOOK_TIMEOUT_S = 2.0
"""Longest wait for the end of a partition while records could be read meanwhile."""
OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION})


class ReadingStalled(RuntimeError):
    """Records wait, the log answers, and the client delivers none: its process must be started again."""

    def __init__(self, stall: Stall) -> None:
        super().__init__(f"{stall}; start this process again")
        self.stall = stall


class ReadingGuard:
    """Guards one consumer, which is polled by one thread.

    Args:
        name: says whose reading it is.
        kafka: the log, and how long a partition with records may stand still.
    """

    def __init__(self, consumer: Consumer, name: str, kafka: KafkaSettings) -> None:
        self._consumer = consumer
        self._name = name
        self._ends = LogEnds(kafka, f"{name}, ends")
        self._watch = ReadingWatch(kafka.stall_timeout_s, time.monotonic())
        self._trouble: LookupError | None = None
        self._warned: set[Place] = set()

    def take(self, error: KafkaError, place: Place, wanted: int | None) -> int | None:
        """An error that came in place of a record; `wanted` is the next offset, None for the first that is kept.

        Returns the offset to go on from when the place is out of range; what is wrong with it is raised by `check`.
        Raises KafkaException for what librdkafka does not outlive by itself.
        """
        if error.code() not in OUT_OF_RANGE:
            raise_lasting(error)
            return None
        low, high = watermarks(self._consumer, place)
        if wanted is None or low <= wanted <= high:
            onward = low if wanted is None else wanted
        elif wanted < low:
            onward = low
            self._trouble = self._trouble or RetentionGap(*place, wanted, low)
        else:
            onward = high
            self._trouble = self._trouble or TopicMadeAnew(*place, wanted, high)
        # A partition that is out of range takes no seek.
        self._consumer.incremental_unassign([TopicPartition(*place)])
        self._consumer.incremental_assign([TopicPartition(*place, onward)])
        return onward

    def check(self) -> None:
        """Raises RetentionGap or TopicMadeAnew, once, for what was found out of range."""
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def look(self, positions: Mapping[Place, int], may_have_holes: Set[str]) -> None:
        """Called at each poll: compares positions with the log's ends when it is time to.

        Raises ReadingStalled, but not for a topic that may have holes: one may be at the end of its log.
        """
        if not self._watch.due(time.monotonic()):
            return
        try:
            ends = self._ends.bounds(positions, LOOK_TIMEOUT_S)
        except KafkaException as error:
            self._say_unanswered(positions, error)
            return
        now_s = time.monotonic()
        silent_s = self._watch.answered(now_s)
        if silent_s is not None:
            LOG.warning("%s: the log answers again, after %.0f s; nothing was lost", self._name, silent_s)
        for place, (low, high) in ends.items():
            # Where retention took everything there is nothing to wait for, wherever the reader stands.
            stall = self._watch.observe(place, positions[place], high if high > low else 0, now_s)
            if stall is not None and place[0] not in may_have_holes:
                raise ReadingStalled(stall)
            if stall is not None and place not in self._warned:
                self._warned.add(place)
                LOG.warning("%s: %s; what waits may be what compaction left of the log's end", self._name, stall)

    def rest(self) -> None:
        """Called at a poll that is to bring nothing: no partition can move."""
        self._watch.rest()

    def close(self) -> None:
        """Give its connection back."""
        self._ends.close()

    def _say_unanswered(self, positions: Mapping[Place, int], error: KafkaException) -> None:
        silent_s = self._watch.unanswered(time.monotonic())
        if silent_s is not None:
            where = ", ".join(f"{topic}[{p}] at {offset}" for (topic, p), offset in sorted(positions.items()))
            LOG.error(
                "%s: no progress for %.0f s, the log does not answer (%s). It goes on when it does, from: %s",
                self._name, silent_s, error, where,
            )  # fmt: skip
