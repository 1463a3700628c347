"""Reads the tables of the running sink, only over HTTP: to open its directory would itself be a fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tidemill.compose.config import TidemillSettings
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import QueryFailed, ask, read_state
from tidemill.consumers.sink.tables import WATERMARKS, tables
from tidemill.schemas.catalogue import CATALOGUE, Names
from tidemill.schemas.log.reader import LogReader

DRAIN_S = 600.0
POLL_S = 0.5
INSERTED = (
    "SELECT toUnixTimestamp(max(modification_time)) FROM system.parts "
    "WHERE database = currentDatabase() AND active AND level = 0"
)


class SinkTables:
    """The tables of the sink with the given settings."""

    def __init__(self, sink: SinkSettings) -> None:
        self._directory = sink.directory
        self._refusal = ""
        """Why the last query had no answer."""

    def written_at(self, pid: int | None) -> float:
        """Return when the sink with this process id wrote last, in seconds since the epoch, rounded down; 0 if it has
        not, or does not answer. If it were rounded up, a write just before a fault would count as one after it."""
        state = read_state(self._directory)
        rows = self._rows(INSERTED) if state is not None and state.pid == pid else None
        return float(rows[0][0]) if rows else 0.0

    def rows_twice(self, alive: Callable[[], object]) -> int:
        """Count repeated rows in all tables; `alive` is called during the wait. Raises TimeoutError."""
        found, deadline = 0, time.monotonic() + DRAIN_S
        for table in tables().values():
            counted = f"SELECT count() - uniqExact(_topic, _partition, _offset) FROM {table.name}"
            while (rows := self._rows(counted)) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the sink does not count the rows of {table.name}: {self._refusal}")
                alive()
                time.sleep(POLL_S)
            found += int(rows[0][0])
        return found

    def drain(self, settings: TidemillSettings, alive: Callable[[], object]) -> None:
        """Wait for the sink to reach the present end of the log; meanwhile call `alive`. Raises TimeoutError."""
        names = Names(settings.kafka.topic_prefix)
        with LogReader(settings.kafka, CATALOGUE, start="end", client_id="chaos-ends") as reader:
            ends = {(names.of(topic), partition): end for (topic, partition), end in reader.end_offsets().items()}
        deadline = time.monotonic() + DRAIN_S
        while late := [place for place, end in ends.items() if self._watermarks().get(place, 0) < end]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the sink did not reach the end of {late[0]} within {DRAIN_S:.0f} s")
            alive()
            time.sleep(POLL_S)

    def _watermarks(self) -> dict[tuple[str, int], int]:
        rows = self._rows(f"SELECT _topic, _partition, max(next_offset) FROM {WATERMARKS} GROUP BY _topic, _partition")
        return {(topic, int(partition)): int(offset) for topic, partition, offset in rows or []}

    def _rows(self, sql: str) -> list[list[Any]] | None:
        """Return the rows; None if the sink does not answer, as during its restart."""
        state = read_state(self._directory)
        if state is None:
            self._refusal = "it does not run"
            return None
        address = urlsplit(state.url)
        try:
            # As of a server: for its own tables, `ask` opens the directory if the sink does not answer.
            return ask(SinkSettings(host=address.hostname, port=address.port, database=state.database), sql).rows
        except QueryFailed as error:
            self._refusal = str(error)
            return None
