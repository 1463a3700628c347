"""Faust's settings: at least once, without a web server and with the state's changelog as its only own topic.

Faust uses aiokafka, which does not know librdkafka's options: its credentials are made from Tidemill's Kafka settings.
Certificates and host names are always verified; no option turns that off here.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from faust.auth import Credentials, SASLCredentials, SSLCredentials
from yarl import URL

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import (
    FILES,
    WITH_PASSWORD,
    AccessRefused,
    Security,
    SecurityError,
    check_access,
    security_of,
    security_options,
)
from tidemill.schemas.log.client_settings import MAX_LETTER_BYTES, METADATA_TIMEOUT_S, groupless_settings
from tidemill.schemas.log.watermarks import watermarks
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.base import StreamFailure

TAKEN = frozenset(
    {
        *FILES,
        "security.protocol",
        "ssl.key.password",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
    }
)
ONLY = MappingProxyType(
    {"ssl.endpoint.identification.algorithm": "https", "enable.ssl.certificate.verification": "true"}
)
"""Options that are accepted only with the value that always applies."""


def broker_credentials(kafka: KafkaSettings) -> Credentials | None:
    """Return Faust's credentials for the brokers, and its checks of theirs; None for plain connections.

    Raises SecurityError, also for an option that Faust would ignore.
    """
    security = security_of(kafka)
    given = security_options(kafka.client_options)
    refused = sorted(name for name, value in given.items() if name not in TAKEN and value.lower() != ONLY.get(name))
    if refused:
        raise SecurityError(
            f"kafka.client_options: a stream worker does not support {', '.join(refused)}. It supports "
            f"{', '.join(sorted(TAKEN))}, and always verifies the broker's certificate and host name: leave the others "
            "out of its configuration, and write certificates and keys to PEM files"
        )
    context = _tls(security) if security.protocol.encrypted else None
    if not security.protocol.sasl:
        return SSLCredentials(context) if context else None
    if security.mechanism not in WITH_PASSWORD:
        raise SecurityError(
            f"kafka.client_options: sasl.mechanism is {security.mechanism!r}, and a stream worker supports only "
            f"{', '.join(WITH_PASSWORD)}: give it a user of one of these, or a listener that asks for a certificate "
            "(security.protocol SSL)"
        )
    return SASLCredentials(
        username=security.user,
        password=security.password.get_secret_value(),
        ssl_context=context,
        mechanism=security.mechanism,
    )


def _tls(security: Security) -> ssl.SSLContext:
    """Return the TLS context of a client that verifies the server. Raises SecurityError for unreadable files."""
    directory = bool(security.ca) and Path(security.ca).is_dir()
    try:
        context = ssl.create_default_context(
            cafile=None if directory else security.ca or None, capath=security.ca if directory else None
        )
    except (ssl.SSLError, OSError) as error:
        raise SecurityError(f"kafka.client_options: ssl.ca.location, {security.ca}: {error}") from error
    if security.certificate or security.key:
        try:
            # Without a password argument, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(security.certificate, security.key or None, security.key_password.get_secret_value)
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(
                f"kafka.client_options: ssl.certificate.location ({security.certificate or 'not set'}), "
                f"ssl.key.location ({security.key or 'not set'}) and ssl.key.password do not match: {error}"
            ) from error
    return context


def checked_credentials(kafka: KafkaSettings) -> Credentials | None:
    """Return Faust's credentials, checked with the brokers; None for plain connections. Raises StreamFailure."""
    try:
        credentials = broker_credentials(kafka)
        check_access(kafka)
    except (SecurityError, AccessRefused) as error:
        raise StreamFailure(str(error)) from error
    return credentials


def faust_settings(
    kafka: KafkaSettings, stream: StreamSettings, partitions: int, credentials: Credentials | None
) -> dict[str, Any]:
    """Return Faust's settings.

    `exactly_once` is not set on purpose: Faust's implementation writes outputs outside of the transaction.
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
        "producer_max_request_size": MAX_LETTER_BYTES,
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
    """Raise StreamFailure if a state topic ends in a transaction marker: Faust would never reach its end."""
    log = Consumer(groupless_settings(kafka, "tidemill-stream-state") | {"enable.partition.eof": True})
    try:
        metadata = log.list_topics(timeout=METADATA_TIMEOUT_S).topics.get(topic)
        places = [(topic, partition) for partition in metadata.partitions] if metadata else []
        for (_, partition), (low, end) in watermarks(log, places).items():
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
