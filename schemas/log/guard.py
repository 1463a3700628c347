"""Guards of a consumer's reading: against deleted records, and against a client that no longer reads.

librdkafka is told never to choose an offset by itself (`auto.offset.reset: error`): what is out of range is looked at
here. After a gap was told the consumer stands at the first record that is kept, so that a caller that can do without
the missing ones goes on polling. A wait for something that has not come yet is never a stall: only what could move and
does not is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Set
from typing import Generic, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import Partition, raise_lasting
from tidemill.schemas.log.watermarks import EndsClient, watermarks

LOG = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
LOOK_TIMEOUT_S = 2.0
"""Longest wait for the end of a partition while records could be read meanwhile."""
LOOKS_PER_TIMEOUT = 4
OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION})


class RetentionGap(LookupError):
    """The next record to read is no longer kept: retention, or a deletion, was faster than the reader."""

    def __init__(self, topic: str, partition: int, wanted: int, first: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the log no longer keeps offset {wanted}, the log begins at {first}: up to "
            f"{first - wanted} records were deleted before they were read. Let the topic's retention.ms outlast the "
            "longest time that its readers are down. To continue without these records, set `stream.accept_gaps` or "
            "`sink.accept_gaps` for a stream worker or a sink, or move the consumer group's committed offset"
        )
        self.topic = topic
        """Full name."""
        self.partition = partition
        self.wanted = wanted
        """Next offset to read."""
        self.first = first
        """First offset that the log keeps."""


class IdleTimes(Generic[K]):
    """Since when each of several things has not moved while it had reason to.

    Args:
        timeout: how long is too long, in the unit of every `now`.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[K, tuple[object, float]] = {}

    def observe(self, key: K, position: object, waiting: bool, now: float) -> float | None:
        """One look at `key`: where it is, and whether something waits for it to move.

        Returns how long it has stood still when that is the time-out or more; then its time begins anew, so that it is
        told once a time-out.
        """
        last, since = self._seen.get(key, (position, now))
        if not waiting or last != position:
            since = now
        still = now - since
        told = still >= self._timeout
        self._seen[key] = (position, now if told else since)
        return still if told else None

    def forget(self) -> None:
        """Begin anew: nobody could move meanwhile."""
        self._seen.clear()


class ReadingWatch:
    """The progress of one consumer's partitions. Times are seconds of any monotonic clock.

    Standing still counts only while the consumer is polled and the log answers.

    Args:
        timeout_s: how long is too long; 0 looks at nothing.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / LOOKS_PER_TIMEOUT
        self._still: IdleTimes[Partition] = IdleTimes(timeout_s)
        self._polled_at_s = self._looked_at_s = self._answered_at_s = now_s
        self._told_silence = False

    def due(self, now_s: float) -> bool:
        """A poll; whether it is time to ask for the ends of the partitions."""
        if not self._timeout_s:
            return False
        if now_s - self._polled_at_s > self._interval_s:
            # The polling thread was busy elsewhere: the partitions could not move.
            self._still.forget()
            self._answered_at_s = now_s
        self._polled_at_s = now_s
        if now_s - self._looked_at_s < self._interval_s:
            return False
        self._looked_at_s = now_s
        return True

    def rest(self) -> None:
        """Reading is paused on purpose."""
        self._still.forget()

    def observe(self, partition: Partition, position: int, end: int, now_s: float) -> str:
        """The log answered: a partition's next offset to read, and its end. Returns why it is stalled, else nothing."""
        seconds = self._still.observe(partition, position, end > position, now_s)
        if seconds is None:
            return ""
        return (
            f"{partition[0]}[{partition[1]}] is stalled: {end - position} records wait at offset {position} and none "
            f"was read for {seconds:.0f} s (`kafka.stall_timeout_s` sets how long is too long)"
        )

    def answered(self, now_s: float) -> float | None:
        """The log answered for every partition; how long it had not, when that was told."""
        self._polled_at_s = now_s
        silent_s, told = now_s - self._answered_at_s, self._told_silence
        self._answered_at_s, self._told_silence = now_s, False
        return silent_s if told else None

    def unanswered(self, now_s: float) -> float | None:
        """The log did not answer; how long it has not, when that is the time-out or more and was not told yet."""
        self._still.forget()
        # The asking took its time.
        self._polled_at_s = now_s
        silent_s = now_s - self._answered_at_s
        if self._told_silence or silent_s < self._timeout_s:
            return None
        self._told_silence = True
        return silent_s


class ReadingStalled(RuntimeError):
    """Records wait, the log answers, and the client delivers none: its process must be started again."""


class ReadingGuard:
    """Guards one consumer, which is polled by one thread.

    Args:
        name: says whose reading it is.
        kafka: the log, and how long a partition with records may stand still.
    """

    def __init__(self, consumer: Consumer, name: str, kafka: KafkaSettings) -> None:
        self._consumer = consumer
        self._name = name
        self._ends = EndsClient(kafka, f"{name}, ends")
        self._watch = ReadingWatch(kafka.stall_timeout_s, time.monotonic())
        self._troubles: list[LookupError] = []
        self._warned: set[Partition] = set()

    def take(self, error: KafkaError, partition: Partition, wanted: int | None) -> int | None:
        """An error that came in place of a record; `wanted` is the next offset, None for the first that is kept.

        Returns the offset to go on from when the next one is out of range; `check` raises what is wrong with it.
        Raises KafkaException for an error that librdkafka does not outlive by itself.
        """
        if error.code() not in OUT_OF_RANGE:
            raise_lasting(error)
            return None
        onward = self.within(partition, wanted, *watermarks(self._consumer, partition))
        # A partition that is out of range takes no seek.
        self._consumer.incremental_unassign([TopicPartition(*partition)])
        self._consumer.incremental_assign([TopicPartition(*partition, onward)])
        return onward

    def within(self, partition: Partition, wanted: int | None, low: int, high: int) -> int:
        """The offset to go on from in a partition that begins at `low` and ends at `high`; `check` raises what is wrong
        with `wanted`."""
        if wanted is None or wanted < low:
            if wanted is not None:
                self._troubles.append(RetentionGap(*partition, wanted, low))
            return low
        if wanted > high:
            self._troubles.append(
                LookupError(
                    f"{partition[0]}[{partition[1]}]: the reader is at offset {wanted} and the log ends at {high}: the "
                    "topic was deleted and created again, or the log lost records. The state of the reader does not "
                    "belong to this log"
                )
            )
        return min(wanted, high)

    @property
    def has_problem(self) -> bool:
        """Whether `check` has something to raise."""
        return bool(self._troubles)

    def check(self) -> None:
        """Raises LookupError, one at a time, for each partition that was found out of range: RetentionGap where the
        log deleted records, else the partition ends before the next offset."""
        if self._troubles:
            raise self._troubles.pop(0)

    def look(self, positions: Mapping[Partition, int], may_have_holes: Set[str]) -> None:
        """Called at each poll: compares positions with the log's ends when it is time to.

        Raises ReadingStalled, but not for a topic that may have holes: one may be at the end of its log.
        """
        if not self._watch.due(time.monotonic()):
            return
        try:
            ends = self._ends.ends(positions, LOOK_TIMEOUT_S)
        except KafkaException as error:
            silent_s = self._watch.unanswered(time.monotonic())
            if silent_s is not None:
                where = ", ".join(f"{topic}[{p}] at {offset}" for (topic, p), offset in sorted(positions.items()))
                LOG.error(
                    "%s: no progress for %.0f s, the log does not answer (%s). When it does, reading continues from: "
                    "%s", self._name, silent_s, error, where,
                )  # fmt: skip
            return
        now_s = time.monotonic()
        silent_s = self._watch.answered(now_s)
        if silent_s is not None:
            LOG.warning("%s: the log answers again, after %.0f s; nothing was lost", self._name, silent_s)
        for partition, end in ends.items():
            stall = self._watch.observe(partition, positions[partition], end, now_s)
            if stall and partition[0] not in may_have_holes:
                raise ReadingStalled(f"{stall}; start this process again")
            if stall and partition not in self._warned:
                self._warned.add(partition)
                LOG.warning("%s: %s; what waits may be what compaction left of the log's end", self._name, stall)

    def rest(self) -> None:
        """Called at a poll that is to bring nothing: no partition can move."""
        self._watch.rest()

    def close(self) -> None:
        """Give its connection back."""
        self._ends.close()
