"""librdkafka settings of all producers and consumers, and the set of its transient errors.

Every producer is idempotent, has acks=all, and partitions keys as Java and Faust do (murmur2). Only `FencedProducer` is
transactional.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidemill.schemas.config import KafkaSettings

Partition = tuple[str, int]
"""Full name of a topic, and a partition number."""
MAX_RECORD_BYTES = 1_048_576
MAX_LETTER_BYTES = MAX_RECORD_BYTES + 65_536
"""Limit of a dead letter: a whole record, with its position and the reason."""
DELIVERY_TIMEOUT_MS = 120_000
LOG_WAIT_S = 2 * DELIVERY_TIMEOUT_MS / 1000
"""Maximum duration of one iteration of a loop that writes, however slow the log is; a longer one means a hang."""
METADATA_TIMEOUT_S = 20.0
CREATE_TOPICS = "create the topics with `tidemill topics --create`"
"""The remedy for a missing topic, for error messages."""
RETRY_S = 0.05
RECONNECT_MS = 20
"""First wait before a connection is opened again. A new client waits for half of it before its first connection."""
TRANSIENT = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._PARTITION_EOF,
        # The request was waiting for a broker that left the cluster's metadata.
        KafkaError._DESTROY_BROKER,
    }
)
"""Errors from which librdkafka recovers by itself; its `retriable` flag is set only for transactional calls."""


def producer_settings(kafka: KafkaSettings, client_id: str) -> dict[str, Any]:
    """Return the librdkafka settings of every producer of Tidemill."""
    return {
        "bootstrap.servers": kafka.address(),
        "client.id": client_id,
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        "linger.ms": 5,
        "message.max.bytes": MAX_LETTER_BYTES,
        "queue.buffering.max.kbytes": kafka.write_ahead_bytes // 1024,
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
        "reconnect.backoff.ms": RECONNECT_MS,
        **kafka.client_options,
    }


def consumer_settings(kafka: KafkaSettings, client_id: str, group_id: str) -> dict[str, Any]:
    """Return the librdkafka settings of every consumer of Tidemill."""
    return {
        "bootstrap.servers": kafka.address(),
        "client.id": client_id,
        "group.id": group_id,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 100,
        "fetch.queue.backoff.ms": 50,
        "queued.max.messages.kbytes": kafka.read_ahead_bytes // 1024,
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 10_000,
        "heartbeat.interval.ms": 3_000,
        "reconnect.backoff.ms": RECONNECT_MS,
        **kafka.client_options,
    }


def groupless_settings(kafka: KafkaSettings, client_id: str, fetch_bytes: int | None = None) -> dict[str, Any]:
    """Return the librdkafka settings of a consumer that assigns its partitions itself.

    It joins no group and commits no offsets, but librdkafka requires a group name.

    Args:
        fetch_bytes: maximum size of one fetch response, over all partitions; by default librdkafka's own limits.
    """
    settings = consumer_settings(kafka, client_id, f"{client_id}-groupless")
    if fetch_bytes is None:
        return settings
    return settings | {"fetch.max.bytes": fetch_bytes, "fetch.message.max.bytes": fetch_bytes, **kafka.client_options}


def raise_lasting(error: KafkaError) -> None:
    """Raise a client error as KafkaException, except if librdkafka recovers from it by itself."""
    if error.code() not in TRANSIENT:
        raise KafkaException(error)
