"""Kafka clients with the settings of the design: one producer, one group-less reader, one group member.

Invariants:

- every producer is idempotent, non-transactional, acks=all, and partitions keys as Java and Faust do (murmur2);
- a reader without a group never moves anybody's committed offsets;
- a value that cannot be decoded arrives as a `Located` whose `record` is None and whose `error` says why: the caller
  decides where it goes, and the stream goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Record

MAX_RECORD_BYTES = 1_048_576
DELIVERY_TIMEOUT_MS = 120_000
METADATA_TIMEOUT_S = 20.0
RETRY_S = 0.05
TRANSIENT = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._PARTITION_EOF,
    }
)
"""Errors that librdkafka outlives by itself; its `retriable` flag is set for transactional calls alone."""


class DeliveryError(RuntimeError):
    """The log did not acknowledge a record."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record lies in the log."""

    topic: Topic
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Located:
    """A record with its place in the log."""

    topic: Topic
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    record: Record | None
    error: str = ""
    """Why `record` is None."""

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return Position(self.topic, self.partition, self.offset)


def producer_settings(kafka: KafkaSettings, client_id: str) -> dict[str, Any]:
    """librdkafka settings of every producer of Tidemill."""
    return {
        "bootstrap.servers": kafka.address(),
        "client.id": client_id,
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 5,
        "message.max.bytes": MAX_RECORD_BYTES + 65_536,
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
        **kafka.client_options,
    }


def consumer_settings(kafka: KafkaSettings, client_id: str, group_id: str) -> dict[str, Any]:
    """librdkafka settings of every consumer of Tidemill."""
    return {
        "bootstrap.servers": kafka.address(),
        "client.id": client_id,
        "group.id": group_id,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 20,
        "fetch.queue.backoff.ms": 50,
        "queued.max.messages.kbytes": 65_536,
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 10_000,
        "heartbeat.interval.ms": 3_000,
        **kafka.client_options,
    }


class RecordProducer:
    """Writes records. `send` queues, `send_acked` waits; a failed delivery is raised at the next call."""

    def __init__(self, kafka: KafkaSettings, client_id: str, codec: Codec | None = None) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        self._producer = Producer(producer_settings(kafka, client_id))
        self._failure: KafkaError | None = None

    def send(
        self,
        topic: Topic,
        record: Record,
        *,
        key: str,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> None:
        """Queue one record. Raises ValueError when it does not fit its schema, DeliveryError for an earlier failure."""
        self.send_bytes(
            self._names.of(topic),
            self._codec.encode(record),
            key=key.encode(),
            partition=partition,
            timestamp_ms=timestamp_ms,
            headers=headers,
        )

    def send_bytes(
        self,
        full_topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        on_delivery: Any = None,  # noqa: ANN401 - librdkafka's callback
    ) -> None:
        """Queue raw bytes under a full topic name; waits while the local queue is full."""
        self._raise_failure()
        arguments: dict[str, Any] = {"key": key, "on_delivery": on_delivery or self._delivered}
        if partition is not None:
            arguments["partition"] = partition
        if timestamp_ms is not None:
            arguments["timestamp"] = timestamp_ms
        if headers:
            arguments["headers"] = list(headers.items())
        while True:
            try:
                self._producer.produce(full_topic, value, **arguments)
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Write (key, record) pairs and wait for the log: their positions, in order. Raises DeliveryError."""
        positions: list[Position | None] = [None] * len(records)

        def delivered(place: int) -> Any:  # noqa: ANN401 - librdkafka's callback
            def callback(error: KafkaError | None, message: Message) -> None:
                self._delivered(error, message)
                if error is None:
                    positions[place] = Position(topic, message.partition() or 0, message.offset() or 0)

            return callback

        for place, (key, record) in enumerate(records):
            value = self._codec.encode(record)
            self.send_bytes(self._names.of(topic), value, key=key.encode(), on_delivery=delivered(place))
        self.flush()
        acknowledged = [position for position in positions if position is not None]
        if len(acknowledged) != len(records):
            raise DeliveryError(
                f"{topic}: {len(records) - len(acknowledged)} of {len(records)} records not acknowledged"
            )
        return acknowledged

    def flush(self, timeout_s: float = DELIVERY_TIMEOUT_MS / 1000) -> None:
        """Wait until the log has acknowledged everything. Raises DeliveryError."""
        left = self._producer.flush(timeout_s)
        self._raise_failure()
        if left:
            raise DeliveryError(f"{left} records not acknowledged within {timeout_s:g} s")

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise DeliveryError(f"the log refused a record: {failure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self.flush()


def locate(message: Message, names: Names, codec: Codec) -> Located:
    """A consumed message as a `Located`, decoded where it can be."""
    record, error = None, ""
    try:
        record = codec.decode(message.value())
    except DecodeError as failure:
        error = str(failure)
    return Located(
        topic=names.parse(message.topic() or ""),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        record=record,
        error=error,
    )


class LogReader:
    """Reads whole topics from chosen offsets, without a consumer group.

    Args:
        start: "beginning", "end", or next offsets by (topic, partition); partitions not named begin at the beginning.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Iterable[Topic],
        *,
        start: str | Mapping[tuple[Topic, int], int] = "beginning",
        client_id: str = "tidemill-reader",
        codec: Codec | None = None,
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        settings = consumer_settings(kafka, client_id, f"{client_id}-groupless")
        self._consumer = Consumer({**settings, "partition.assignment.strategy": "range"})
        self._assignment = [
            TopicPartition(self._names.of(topic), partition, _start_offset(start, topic, partition))
            for topic in topics
            for partition in self.partitions(topic)
        ]
        self._resolve_ends()
        self._consumer.assign(self._assignment)
        self._next = {(tp.topic, tp.partition): tp.offset for tp in self._assignment}

    def partitions(self, topic: Topic) -> list[int]:
        """Partition numbers of a topic. Raises LookupError when the topic does not exist."""
        full = self._names.of(topic)
        metadata = self._consumer.list_topics(full, timeout=METADATA_TIMEOUT_S).topics[full]
        if metadata.error is not None or not metadata.partitions:
            raise LookupError(f"topic {full} does not exist: create the topics with `tidemill topics --create`")
        return sorted(metadata.partitions)

    def _resolve_ends(self) -> None:
        for tp in self._assignment:
            low, high = self._watermarks(tp)
            if tp.offset == OFFSET_END:
                tp.offset = high
            elif tp.offset == OFFSET_BEGINNING:
                tp.offset = low
            elif tp.offset < low:
                raise LookupError(
                    f"{tp.topic}[{tp.partition}]: offset {tp.offset} is no longer kept, the log begins at {low}"
                )

    def _watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        # A partition that was created a moment ago, or whose leader moves, answers with a retriable error first.
        deadline = time.monotonic() + METADATA_TIMEOUT_S
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(tp, timeout=METADATA_TIMEOUT_S)
                return low, high
            except KafkaException as error:
                if error.args[0].code() not in TRANSIENT or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def poll(self, timeout_s: float = 0.1, max_records: int = 500) -> list[Located]:
        """The next records, in offset order within each partition; empty when none came in `timeout_s`."""
        found = []
        for message in self._consumer.consume(max_records, timeout_s):
            error = message.error()
            if error is not None:
                _raise_fatal(error)
                continue
            self._next[(message.topic() or "", message.partition() or 0)] = (message.offset() or 0) + 1
            found.append(locate(message, self._names, self._codec))
        return found

    def end_offsets(self) -> dict[tuple[Topic, int], int]:
        """End of the log now, by (topic, partition): the offset that the next record will have."""
        return {(self._names.parse(tp.topic), tp.partition): self._watermarks(tp)[1] for tp in self._assignment}

    def next_offsets(self) -> dict[tuple[Topic, int], int]:
        """The next offset to be read, by (topic, partition)."""
        return {(self._names.parse(topic), partition): offset for (topic, partition), offset in self._next.items()}

    def read_to_end(self, deadline_s: float = 60.0) -> Iterator[Located]:
        """Every record up to the end of the log as it is now. Raises TimeoutError past the deadline."""
        ends = self.end_offsets()
        deadline = time.monotonic() + deadline_s
        while any(offset < ends[place] for place, offset in self._positions().items()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the end of {sorted({t.value for t, _ in ends})} was not reached in {deadline_s:g} s"
                )
            yield from self.poll(0.1)

    def _positions(self) -> dict[tuple[Topic, int], int]:
        # The consumer's own position moves past transaction markers and compacted records, which carry no message.
        seen = self.next_offsets()
        for tp in self._consumer.position(self._assignment):
            place = (self._names.parse(tp.topic), tp.partition)
            seen[place] = max(seen[place], tp.offset)
        return seen

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Go to an offset of an assigned partition."""
        full = self._names.of(topic)
        self._consumer.seek(TopicPartition(full, partition, offset))
        self._next[(full, partition)] = offset

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_offset(start: str | Mapping[tuple[Topic, int], int], topic: Topic, partition: int) -> int:
    if isinstance(start, str):
        return {"beginning": OFFSET_BEGINNING, "end": OFFSET_END}[start]
    return start.get((topic, partition), OFFSET_BEGINNING)


def _raise_fatal(error: KafkaError) -> None:
    if error.code() not in TRANSIENT:
        raise KafkaException(error)


class GroupMember:
    """A member of a consumer group; offsets are committed by the caller, when the work is done."""

    def __init__(
        self,
        kafka: KafkaSettings,
        group_id: str,
        topics: Iterable[Topic],
        *,
        client_id: str,
        codec: Codec | None = None,
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        self._consumer = Consumer(consumer_settings(kafka, client_id, kafka.topic_prefix + group_id))
        self._consumer.subscribe([self._names.of(topic) for topic in topics])

    def poll(self, timeout_s: float = 0.1, max_records: int = 100) -> list[Located]:
        """The next records of the partitions assigned to this member."""
        found = []
        for message in self._consumer.consume(max_records, timeout_s):
            error = message.error()
            if error is not None:
                _raise_fatal(error)
                continue
            found.append(locate(message, self._names, self._codec))
        return found

    def commit(self, offsets: Mapping[tuple[Topic, int], int]) -> None:
        """Commit the next offsets to read, by (topic, partition); waits for the broker."""
        if offsets:
            places = [TopicPartition(self._names.of(topic), p, offset) for (topic, p), offset in offsets.items()]
            self._consumer.commit(offsets=places, asynchronous=False)

    def pause(self) -> None:
        """Fetch nothing more from the partitions owned now; polling goes on and keeps the membership alive."""
        self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Fetch again after `pause`."""
        self._consumer.resume(self._consumer.assignment())

    def assignment(self) -> set[tuple[Topic, int]]:
        """Partitions that this member owns now."""
        return {(self._names.parse(tp.topic), tp.partition) for tp in self._consumer.assignment()}

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()
