"""Faust's settings: at least once, without a web server and without topics of its own but the state's changelog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from faust.auth import Credentials
from yarl import URL

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import AccessRefused, check_access
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES, METADATA_TIMEOUT_S, groupless_settings
from tidemill.schemas.log.security import SecurityError
from tidemill.schemas.log.watermarks import watermarks
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.base import StreamFailure
from tidemill.streams.runner.faust_security import broker_credentials


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


def refuse_transactional_state(kafka: KafkaSettings, topic: str) -> None:
    """Raise StreamFailure for a state topic that ends in the mark of a transaction: Faust would never read it whole."""
    log = Consumer(groupless_settings(kafka, "tidemill-stream-state") | {"enable.partition.eof": True})
    try:
        metadata = log.list_topics(timeout=METADATA_TIMEOUT_S).topics.get(topic)
        for partition in metadata.partitions if metadata else ():
            low, end = watermarks(log, (topic, partition))
            if end == low:
                continue
            log.assign([TopicPartition(topic, partition, end - 1)])
            found = log.poll(METADATA_TIMEOUT_S)
            error = found.error() if found is not None else None
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                raise StreamFailure(
                    f"the state in {topic} was written by the transactional runner, and Faust cannot read it: use "
                    "`stream.runner=transactional`, or give the processor another `application` name, to start it "
                    "again from the beginning of the log"
                )
    finally:
        log.close()
