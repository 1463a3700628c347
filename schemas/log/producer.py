"""Producer of records: each record is acknowledged by the log, or an error is raised.

A value that cannot be used is written unchanged as a dead letter, with its position and the reason. For records whose
key is longer than the key by which they are joined, the partition is computed here (`partition_of`) and passed to the
client. It is the one that Java's client, Faust and librdkafka's `murmur2_random` choose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_char_p, c_int32, c_size_t, c_void_p
from typing import Any, Protocol, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer, cimpl

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import AccessRefused, check_access
from tidemill.schemas.log.client_settings import CREATE_TOPICS, DELIVERY_TIMEOUT_MS, MAX_RECORD_BYTES, producer_settings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Record

REMEDIES = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: f": {CREATE_TOPICS}",
    KafkaError._UNKNOWN_TOPIC: f": {CREATE_TOPICS}",
    KafkaError.INVALID_TIMESTAMP: ": the clock of this host is more than a minute ahead of the broker's",
    KafkaError.MSG_SIZE_TOO_LARGE: ": raise `max.message.bytes` of the topic: Tidemill writes records of up to 1 MiB",
    KafkaError.INVALID_RECORD: ": a compacted topic refuses records without a key; compare it with `tidemill topics`",
    KafkaError.UNKNOWN: ": compare the topic with `tidemill topics`",
}
"""Ends of error messages, by the code of the broker's refusal."""


def refusal(topic: str, code: int, reason: str) -> str:
    """Return the message about a record that the log refused: the topic, the reason and what to do."""
    return f"the log refused a record for {topic}: {reason}{REMEDIES.get(code, '')}"


METADATA_S = 1.0
"""Maximum time of a request for metadata that only saves time."""


class DeliveryError(RuntimeError):
    """The log did not acknowledge a record."""


class AckedWriter(Protocol):
    """A writer of records that waits for the log's acknowledgement."""

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Write (key, record) pairs, wait for the log, return their positions in order. Raises DeliveryError."""


class RecordProducer:
    """A writer of records. `send` queues, `send_acked` waits. A failed delivery raises an error at the next call.

    Args:
        own: settings of librdkafka that replace those of every producer.
    """

    def __init__(
        self, kafka: KafkaSettings, client_id: str, codec: Codec | None = None, own: dict[str, Any] | None = None
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        self._producer = Producer(producer_settings(kafka, client_id) | (own or {}))
        self._kafka = kafka
        self._accepted = False
        self._failure = ""

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
        """Queue one record. Raises ValueError if it does not fit its schema, and as `send_bytes`."""
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
        headers: Mapping[str, bytes] | Sequence[tuple[str, bytes | None]] | None = None,
        on_delivery: Any = None,  # noqa: ANN401 - librdkafka's callback
    ) -> None:
        """Queue raw bytes for a topic, by its full name. Waits while the local queue is full.

        Raises ValueError if they are too large for the log, DeliveryError for an earlier failure.
        """
        self._raise_failure()
        arguments: dict[str, Any] = {"key": key, "on_delivery": on_delivery or self._delivered}
        if partition is not None:
            arguments["partition"] = partition
        if timestamp_ms is not None:
            arguments["timestamp"] = timestamp_ms
        if headers:
            arguments["headers"] = list(headers.items() if isinstance(headers, Mapping) else headers)
        while True:
            try:
                self._producer.produce(full_topic, value, **arguments)
                break
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                    raise
                n_bytes = len(key or b"") + len(value or b"")
                raise ValueError(
                    f"a record of {n_bytes:,} bytes for {full_topic} is too large: the log takes records of up to 1 MiB"
                ) from error
        self._producer.poll(0)

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Write (key, record) pairs, wait for the log, return their positions in order. Raises DeliveryError."""
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
        """Wait until the log has acknowledged all records. Raises DeliveryError."""
        if len(self._producer) and not self._accepted:
            # librdkafka requests an idempotent producer's id when it receives metadata and is connected to a broker,
            # otherwise every half second. The first answer comes over a connection that it then replaces.
            for _ in range(2):
                with suppress(KafkaException):
                    self._producer.list_topics(timeout=min(timeout_s, METADATA_S))
        left = self._producer.flush(timeout_s)
        self._raise_failure()
        if left:
            self._raise_refusal()
            raise DeliveryError(f"{left} records not acknowledged within {timeout_s:g} s")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._accepted |= error is None
        if error is not None:
            self._failure = refusal(message.topic() or "", error.code(), error.str())

    def _raise_failure(self) -> None:
        if self._failure:
            failure, self._failure = self._failure, ""
            self._raise_refusal()
            raise DeliveryError(failure)

    def _raise_refusal(self) -> None:
        """Raise the brokers' refusal, if any: librdkafka reports only a timeout to a producer that is refused."""
        if not self._accepted:
            try:
                check_access(self._kafka)
            except AccessRefused as error:
                raise DeliveryError(str(error)) from error
            self._accepted = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self.flush()


HEADER_TOPIC = "tidemill-source-topic"
HEADER_PARTITION = "tidemill-source-partition"
HEADER_OFFSET = "tidemill-source-offset"
HEADER_TIMESTAMP = "tidemill-source-timestamp-ms"
HEADER_REASON = "tidemill-reason"
HEADER_APPLICATION = "tidemill-application"
MOST_REASON = 2_000
"""Most characters of a reason: it may quote a key of any length, and the dead letter must fit into a record."""


def dead_letter_of(
    names: Names, located: ConsumedRecord, reason: str, application: str
) -> tuple[bytes | None, bytes | None, dict[str, bytes]]:
    """Return key, value and headers of a dead letter: the original bytes, their position and the reason.

    Bytes that a dead-letter topic has no room for are left out, and the reason says so: other programs can write larger
    records, since a topic limits the compressed size.
    """
    key = None if located.key is None else located.key[:MAX_RECORD_BYTES]
    value = None if located.value is None else located.value[: MAX_RECORD_BYTES - len(key or b"")]
    n_bytes = len(located.key or b"") + len(located.value or b"")
    if n_bytes > MAX_RECORD_BYTES:
        reason = f"only the first {MAX_RECORD_BYTES} of its {n_bytes} bytes are kept here: {reason}"
    headers = {
        HEADER_TOPIC: names.of(located.topic).encode(),
        HEADER_PARTITION: str(located.partition).encode(),
        HEADER_OFFSET: str(located.offset).encode(),
        HEADER_TIMESTAMP: str(located.timestamp_ms).encode(),
        HEADER_REASON: reason[:MOST_REASON].encode(),
        HEADER_APPLICATION: application.encode(),
    }
    return key, value, headers


def send_dead_letter(
    producer: RecordProducer, names: Names, located: ConsumedRecord, reason: str, application: str
) -> None:
    """Write the original bytes of `located` to the dead-letter topic of its topic.

    Its timestamp is the current time: with the timestamp of an old record, the log would delete it at once.
    """
    key, value, headers = dead_letter_of(names, located, reason, application)
    producer.send_bytes(names.dead_letter(located.topic), value, key=key, headers=headers)


# A public function of librdkafka, in the library that confluent-kafka has loaded. It keeps Python's lock: releasing it
# would take longer than the call.
_murmur2 = ctypes.PyDLL(cimpl.__file__).rd_kafka_msg_partitioner_murmur2
_murmur2.argtypes = (c_void_p, c_char_p, c_size_t, c_int32, c_void_p, c_void_p)
_murmur2.restype = c_int32


def partition_of(key: str, partitions: int) -> int:
    """Return the partition, from 0, of a record with this key in a topic with `partitions` partitions.

    Raises ValueError if there are none.
    """
    if partitions < 1:  # librdkafka would divide by it
        raise ValueError(f"a topic with {partitions} partitions has no place for a record")
    data = key.encode()
    partition: int = _murmur2(None, data, len(data), partitions, None, None)
    return partition
