"""The settings of a command on a log that answers: one that does not is said so at once, in one line."""

from __future__ import annotations

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_local_log
from tidemill.schemas.log.admin import wait_for_broker

PATIENCE_S = 5.0


def with_reachable_log(settings: TidemillSettings) -> TidemillSettings:
    """Settings whose Kafka address is known and answers. Raises ConnectionError."""
    found = with_local_log(settings)
    # The client's own complaints, many a second, would bury the one line that says what to do.
    quiet = {**found.kafka.client_options, "log_level": "0"}
    wait_for_broker(found.kafka.model_copy(update={"client_options": quiet}), PATIENCE_S)
    return found
