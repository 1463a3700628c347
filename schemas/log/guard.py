"""Checks of a consumer: for deleted records, and for a client that no longer delivers records.

librdkafka never chooses an offset by itself (`auto.offset.reset: error`): offsets out of range are handled here. After
a reported gap, the next offset is that of the first kept record, so that a caller that does not need the missing
records can continue to poll. Waiting for records that do not exist yet is never a stall: only a partition with records
to read and no progress is stalled.
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
"""Maximum time to wait for the end offset of a partition, during which no records are read."""
LOOKS_PER_TIMEOUT = 4
OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION})


class RetentionGap(LookupError):
    """The next record to read was deleted, by retention or by request, before the reader had read it."""

    def __init__(self, topic: str, partition: int, wanted: int, first: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: the log no longer keeps offset {wanted}, the log begins at {first}: up to "
            f"{first - wanted} records were deleted before they were read. Let the topic's retention.ms outlast the "
            "longest time that its readers are down. To continue without these records, set `stream.accept_gaps` for a "
            "stream worker or `sink.accept_gaps` for the sink; for a rollout worker, move its group's committed "
            "offset; for a trainer, begin another run (run.run_id) with trainer.model=DIRECTORY after "
            "`tidemill weights checkout VERSION DIRECTORY`"
        )
        self.topic = topic
        """Full name."""
        self.partition = partition
        self.wanted = wanted
        """Next offset to read."""
        self.first = first
        """First offset that the log keeps."""


class IdleTimes(Generic[K]):
    """The time for which each of several keys has made no progress although it could.

    Args:
        timeout: time after which a key is reported, in the unit of every `now`.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[K, tuple[object, float]] = {}

    def observe(self, key: K, position: object, waiting: bool, now: float) -> float | None:
        """Record the position of `key`, and whether it could make progress (`waiting`).

        Returns the time without progress if it is the timeout or more, otherwise None. The time then starts again, so
        that a key is reported once per timeout.
        """
        last, since = self._seen.get(key, (position, now))
        if not waiting or last != position:
            since = now
        still = now - since
        is_due = still >= self._timeout
        self._seen[key] = (position, now if is_due else since)
        return still if is_due else None

    def forget(self) -> None:
        """Start all times again, after a period in which no key could make progress."""
        self._seen.clear()


class ReadingWatch:
    """The progress of one consumer's partitions. Times are seconds of any monotonic clock.

    Time without progress counts only while the consumer is polled and the log answers.

    Args:
        timeout_s: time without progress after which a partition is stalled; 0 disables the checks.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / LOOKS_PER_TIMEOUT
        self._still: IdleTimes[Partition] = IdleTimes(timeout_s)
        self._polled_at_s = self._looked_at_s = self._answered_at_s = now_s
        self._silence_reported = False

    def due(self, now_s: float) -> bool:
        """Record a poll, and return whether it is time to request the end offsets of the partitions."""
        if not self._timeout_s:
            return False
        if now_s - self._polled_at_s > self._interval_s:
            # The polling thread did other work: the partitions could not make progress.
            self._still.forget()
            self._answered_at_s = now_s
        self._polled_at_s = now_s
        if now_s - self._looked_at_s < self._interval_s:
            return False
        self._looked_at_s = now_s
        return True

    def rest(self) -> None:
        """Start all times again, because reading is paused on purpose."""
        self._still.forget()

    def observe(self, partition: Partition, position: int, end: int, now_s: float) -> str:
        """Record a partition's next offset and its end. Returns the reason if it is stalled, otherwise ""."""
        seconds = self._still.observe(partition, position, end > position, now_s)
        if seconds is None:
            return ""
        return (
            f"{partition[0]}[{partition[1]}] is stalled: {end - position} records wait at offset {position} and none "
            f"was read for {seconds:.0f} s (`kafka.stall_timeout_s` sets how long is too long)"
        )

    def answered(self, now_s: float) -> float | None:
        """Record that the log answered for all partitions. Returns how long it had not, if that was reported."""
        self._polled_at_s = now_s
        silent_s, reported = now_s - self._answered_at_s, self._silence_reported
        self._answered_at_s, self._silence_reported = now_s, False
        return silent_s if reported else None

    def unanswered(self, now_s: float) -> float | None:
        """Record that the log did not answer. Returns for how long, once that reaches the timeout, otherwise None."""
        self._still.forget()
        # The request itself took time in which nothing was polled.
        self._polled_at_s = now_s
        silent_s = now_s - self._answered_at_s
        if self._silence_reported or silent_s < self._timeout_s:
            return None
        self._silence_reported = True
        return silent_s


class ReadingGuard:
    """The checks of one consumer, which is polled by one thread.

    Args:
        name: name of the reader, for messages.
        kafka: the log, and how long a partition with records to read may make no progress.
        isolation: isolation level of the consumer.
    """

    def __init__(self, consumer: Consumer, name: str, kafka: KafkaSettings, isolation: str = "read_committed") -> None:
        self._consumer = consumer
        self._name = name
        self.ends_client = EndsClient(kafka, f"{name}, ends", isolation)
        self._watch = ReadingWatch(kafka.stall_timeout_s, time.monotonic())
        self._troubles: list[LookupError] = []
        self._warned: set[Partition] = set()

    def take(self, error: KafkaError, partition: Partition, wanted: int | None) -> int | None:
        """Handle an error instead of a record; `wanted` is the next offset, or None for the first one that is kept.

        If the next offset is out of range, returns the offset to continue from; `check` then raises the error.
        Raises KafkaException for an error from which librdkafka does not recover by itself.
        """
        if error.code() not in OUT_OF_RANGE:
            raise_lasting(error)
            return None
        onward = self.within(partition, wanted, *watermarks(self._consumer, partition))
        # librdkafka cannot seek in a partition whose offset is out of range.
        self._consumer.incremental_unassign([TopicPartition(*partition)])
        self._consumer.incremental_assign([TopicPartition(*partition, onward)])
        return onward

    def within(self, partition: Partition, wanted: int | None, low: int, high: int) -> int:
        """Return the offset to continue from in a partition with the offsets from `low` up to `high`; if `wanted` is
        out of range, `check` then raises the error."""
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
        """Whether `check` has an error to raise."""
        return bool(self._troubles)

    def check(self) -> None:
        """Raise the next LookupError of a partition whose offset was out of range: a RetentionGap if the log deleted
        records, otherwise a LookupError because the partition ends before the next offset."""
        if self._troubles:
            raise self._troubles.pop(0)

    def look(self, positions: Mapping[Partition, int], may_have_holes: Set[str]) -> None:
        """Compare the positions with the ends of the partitions, if it is time to. Called at each poll.

        Raises RuntimeError if the log answers and the client delivers none of the records to read: it must be started
        again. Not for topics in `may_have_holes`: a partition may end with a hole.
        """
        if not self._watch.due(time.monotonic()):
            return
        try:
            ends = self.ends_client.ends(positions, LOOK_TIMEOUT_S)
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
                raise RuntimeError(f"{stall}; start this process again")
            if stall and partition not in self._warned:
                self._warned.add(partition)
                LOG.warning("%s: %s; compaction may have removed the records at the end of the log", self._name, stall)

    def rest(self) -> None:
        """Start all times again: this poll is expected to return nothing, so no partition can make progress."""
        self._watch.rest()

    def close(self) -> None:
        self.ends_client.close()
