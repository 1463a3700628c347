"""The ClickHouse sink: every topic as a table, one row for each record, readable over ClickHouse's HTTP protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.consumers.sink.config import SinkSettings
    from tidemill.schemas.config import KafkaSettings, RunSettings


def run(kafka: KafkaSettings, run: RunSettings, sink: SinkSettings) -> None:
    """Fill the tables until SIGTERM or SIGINT; see `service.run`."""
    # Imported here so that a process that only reads the settings does not load the engine.
    from tidemill.consumers.sink.service import run as run_service

    run_service(kafka, run, sink)
