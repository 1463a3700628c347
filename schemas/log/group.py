"""A member of a consumer group. The caller commits offsets when the work is done.

Invariants: a partition is read from its committed offset, or from the first record that the log keeps if no offset was
committed; a committed offset that the log no longer keeps raises `RetentionGap` and is never skipped silently.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from tidemill.schemas.catalogue import Names, Topic, is_compacted
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.client_settings import METADATA_TIMEOUT_S, Partition, consumer_settings
from tidemill.schemas.log.consumed import ConsumedRecord, consumed_record
from tidemill.schemas.log.guard import ReadingGuard


class GroupConsumer:
    """A member of a consumer group. The caller commits offsets when the work is done."""

    def __init__(self, kafka: KafkaSettings, group_id: str, topics: Iterable[Topic], *, client_id: str) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = Codec(kafka.registry_url)
        settings = consumer_settings(kafka, client_id, kafka.topic_prefix + group_id)
        self._consumer = Consumer({**settings, "auto.offset.reset": "error"})
        self._guard = ReadingGuard(self._consumer, f"{client_id} in group {group_id}", kafka)
        self._next: dict[Partition, int | None] = {}
        """Next offset of each owned partition; None for the first one that is kept."""
        self._paused: set[Partition] = set()
        self._kafka = kafka
        self._ask_at: float | None = time.monotonic() + METADATA_TIMEOUT_S
        """Time of the next access check; None after the first assignment, which may be empty."""
        topics = list(topics)
        self._may_have_holes = {self._names.of(topic) for topic in topics if is_compacted(topic)}
        self._consumer.subscribe(
            [self._names.of(topic) for topic in topics], on_assign=self._begin, on_revoke=self._revoke
        )

    def _begin(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._ask_at = None
        # By default, librdkafka treats a partition without a committed offset as out of range.
        for found in consumer.committed(partitions, timeout=METADATA_TIMEOUT_S) if partitions else []:
            if found.error is not None:  # without this, the partition would be read from its beginning
                raise KafkaException(found.error)
            self._next[found.topic, found.partition] = found.offset if found.offset >= 0 else None
        begin = [(tp.topic, tp.partition, self._next[tp.topic, tp.partition]) for tp in partitions]
        consumer.incremental_assign([TopicPartition(t, p, OFFSET_BEGINNING if o is None else o) for t, p, o in begin])

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._next.pop((tp.topic, tp.partition), None)
            self._paused.discard((tp.topic, tp.partition))
        # A partition may come back later: while others have it, this member makes no progress with it.
        self._guard.rest()
        consumer.incremental_unassign(partitions)

    def poll(self, timeout_s: float = 0.1, max_records: int = 100) -> list[ConsumedRecord]:
        """Return the next records of the partitions assigned to this member.

        Raises:
            RetentionGap: the log deleted records of a partition after the committed offset. The next offset is then
                the first one that is kept: a caller that does not need the deleted records can continue to poll.
            LookupError: the committed offset is after the end of a partition.
            RuntimeError: there are records to read, and the client delivered none for `kafka.stall_timeout_s`.
            AccessRefused: the brokers refuse a client with these settings.
        """
        self._guard.check()
        if self._ask_at is not None and time.monotonic() > self._ask_at:
            # A member that the brokers refuse would wait for its group without limit.
            check_access(self._kafka)
            self._ask_at = time.monotonic() + METADATA_TIMEOUT_S
        found: list[ConsumedRecord] = []
        for message in self._consumer.consume(max_records, timeout_s):
            place, error = (message.topic() or "", message.partition() or 0), message.error()
            if error is None:
                self._next[place] = (message.offset() or 0) + 1
                found.append(consumed_record(message, self._names, self._codec))
                continue
            onward = self._guard.take(error, place, self._next.get(place))
            if onward is not None:
                self._next[place] = onward
        if not found:
            self._guard.check()
        if self._paused:
            self._guard.rest()
            return found
        flowing = {place: offset for place, offset in self._next.items() if offset is not None}
        for tp in self._consumer.position([TopicPartition(*place) for place in flowing]):
            place = (tp.topic, tp.partition)
            flowing[place] = max(flowing[place], tp.offset)
        self._guard.look(flowing, self._may_have_holes)
        return found

    def commit(self, offsets: Mapping[tuple[Topic, int], int]) -> None:
        """Commit the next offsets to read, by (topic, partition), and wait for the broker."""
        if offsets:
            places = [TopicPartition(self._names.of(topic), p, offset) for (topic, p), offset in offsets.items()]
            self._consumer.commit(offsets=places, asynchronous=False)

    def pause(self) -> None:
        """Stop fetching from the partitions owned now. Further polls keep the membership alive."""
        owned = self._consumer.assignment()
        self._consumer.pause(owned)
        self._paused = {(tp.topic, tp.partition) for tp in owned}

    def resume(self) -> None:
        """Fetch again after `pause`."""
        self._consumer.resume(self._consumer.assignment())
        self._paused = set()

    def assignment(self) -> set[tuple[Topic, int]]:
        """Return the partitions that this member owns now."""
        return {(self._names.parse(tp.topic), tp.partition) for tp in self._consumer.assignment()}

    def close(self) -> None:
        """Leave the group."""
        self._guard.close()
        self._consumer.close()
