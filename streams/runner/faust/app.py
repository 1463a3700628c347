"""What a stream worker asks of Faust and of the log before it begins: settings, topics, partitions.

Faust runs at least once, without a web server and without topics of its own but the state's changelog.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faust.auth import Credentials
from yarl import URL

from tidemill.schemas.catalogue import Names, co_partitioned
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.access import AccessRefused, check_access
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.log.security import SecurityError
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Processor
from tidemill.streams.runner.faust.security import broker_credentials

METADATA_TIMEOUT_S = 20.0
LEADER_POLL_S = 0.1


class StreamFailure(RuntimeError):
    """The stream worker cannot go on; the message says why and what to do."""


def application_id(kafka: KafkaSettings, run: RunSettings, processor: Processor) -> str:
    """Consumer group, and prefix of the state topic: one a processor, run and topic prefix."""
    return f"{kafka.topic_prefix}{processor.name}.{run.run_id}"


def checked_partitions(kafka: KafkaSettings, processor: Processor) -> int:
    """Partition count of a processor's inputs; waits for the leaders of all its topics. Raises StreamFailure."""
    names = Names(kafka.topic_prefix)
    topics = [*processor.inputs, *processor.outputs]
    wanted = [*map(names.of, topics), *map(names.dead_letter, processor.inputs)]
    leaders = _leaders(kafka, wanted)
    # What lies in equal partitions by the catalogue must do so in the log: machines and their outputs go by number.
    aligned = [
        topic for topic in topics if topic in processor.inputs or co_partitioned(processor.inputs[0], topic, kafka)
    ]
    return _equal_count({names.of(topic): leaders[names.of(topic)] for topic in aligned})


def _leaders(kafka: KafkaSettings, wanted: Sequence[str]) -> dict[str, int]:
    """Partition count of each wanted topic, once all of their partitions have a leader."""
    client = admin_client(kafka)
    deadline = time.monotonic() + METADATA_TIMEOUT_S
    while True:
        topics = client.list_topics(timeout=METADATA_TIMEOUT_S).topics
        leaders = {n: [p.leader for p in topics[n].partitions.values()] if n in topics else [] for n in wanted}
        if all(found and min(found) >= 0 for found in leaders.values()):
            return {name: len(found) for name, found in leaders.items()}
        missing = " and ".join(name for name, found in leaders.items() if not found)
        if missing:
            raise StreamFailure(f"missing topics: {missing}. Create them with `tidemill topics --create`")
        if time.monotonic() > deadline:
            raise StreamFailure(f"partitions without a leader for {METADATA_TIMEOUT_S:g} s: {leaders}")
        # Leaders of new topics are elected within moments; aiokafka refuses to write to a partition without one.
        time.sleep(LEADER_POLL_S)


def _equal_count(counts: Mapping[str, int]) -> int:
    if len(set(counts.values())) != 1:
        raise StreamFailure(f"records meet by partition number, so these topics need equal partition counts: {counts}")
    return next(iter(counts.values()))


def checked_credentials(kafka: KafkaSettings) -> Credentials | None:
    """What Faust shows to the brokers, which let this worker in; None for plain connections. Raises StreamFailure."""
    try:
        credentials = broker_credentials(kafka)
        check_access(kafka)
    except (SecurityError, AccessRefused) as error:
        raise StreamFailure(str(error)) from error
    return credentials


def faust_settings(
    kafka: KafkaSettings, stream: StreamSettings, partitions: int, credentials: Credentials | None
) -> dict[str, Any]:
    """Faust's settings.

    `exactly_once` is left out on purpose: Faust's leaves outputs outside of the transaction.
    """
    return {
        "broker": [URL(f"kafka://{address.strip()}") for address in kafka.address().split(",")],
        "broker_client_id": "tidemill-stream",
        "broker_credentials": credentials,
        "broker_commit_interval": stream.commit_interval_s,
        "broker_session_timeout": stream.session_timeout_s,
        "broker_heartbeat_interval": stream.heartbeat_interval_s,
        "broker_rebalance_timeout": stream.session_timeout_s,
        "consumer_auto_offset_reset": "earliest",
        "consumer_group_instance_id": stream.instance or None,
        "datadir": Path(stream.data_dir),
        "producer_acks": -1,
        "producer_linger": 0,
        "producer_max_batch_size": 262_144,
        "producer_max_request_size": MAX_RECORD_BYTES,
        "store": "memory://",
        "stream_buffer_maxsize": stream.buffer_records,
        "stream_wait_empty": False,
        "table_standby_replicas": 0,
        "topic_disable_leader": True,
        "topic_partitions": partitions,
        "topic_replication_factor": kafka.replication_factor,
        "web_enabled": False,
    }
