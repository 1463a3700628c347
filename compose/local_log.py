"""Finding the log: a configured bootstrap address always wins over the local stack."""

from __future__ import annotations

from tidemill.compose.config import TidemillSettings
from tidemill.compose.stack import local_bootstrap
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.admin import wait_for_broker

PATIENCE_S = 5.0
"""Seconds that a log gets to answer."""


def with_local_log(settings: TidemillSettings) -> TidemillSettings:
    """Settings whose Kafka address is known: the configured one, or that of the running local stack.

    Raises:
        ConnectionError: neither is there, or the configured brokers refuse this client (AccessRefused).
        SecurityError: the configured security cannot open a connection.
    """
    if settings.kafka.bootstrap:
        check_access(settings.kafka)
        return settings
    address = local_bootstrap(settings.stack)
    if address is None:
        raise ConnectionError(
            "no Kafka: give --bootstrap HOST:PORT (or TIDEMILL_KAFKA__BOOTSTRAP), or start the local stack with "
            "`tidemill stack up`"
        )
    return settings.model_copy(update={"kafka": with_address(settings.kafka, address)})


def with_address(kafka: KafkaSettings, address: str) -> KafkaSettings:
    """The same settings with another bootstrap address."""
    return kafka.model_copy(update={"bootstrap": address})


def with_reachable_log(settings: TidemillSettings) -> TidemillSettings:
    """Settings whose Kafka address is known and answers. Raises ConnectionError."""
    found = with_local_log(settings)
    # The client's own complaints, many a second, would bury the one line that says what to do.
    quiet = {**found.kafka.client_options, "log_level": "0"}
    wait_for_broker(found.kafka.model_copy(update={"client_options": quiet}), PATIENCE_S)
    return found
