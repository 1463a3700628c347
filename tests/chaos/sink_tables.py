"""Reads the tables of the running sink, only over HTTP: to open its directory would itself be a fault."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from tidemill.compose.config import TidemillSettings
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import read_state
from tidemill.consumers.sink.tables import WATERMARKS, tables
from tidemill.schemas.catalogue import CATALOGUE, Names
from tidemill.schemas.log.reader import LogReader

ANSWER_S = 10.0
DRAIN_S = 180.0
POLL_S = 0.5
INSERTED = (
    "SELECT toUnixTimestamp(max(modification_time)) FROM system.parts "
    "WHERE database = currentDatabase() AND active AND level = 0"
)


class SinkTables:
    """The tables of the sink with the given settings."""

    def __init__(self, sink: SinkSettings) -> None:
        self._directory = sink.directory
        # A loopback address: no proxy, and no certificates to load.
        self._client = httpx.Client(timeout=ANSWER_S, trust_env=False, verify=False)
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
            ends = {(names.of(topic), str(partition)): end for (topic, partition), end in reader.end_offsets().items()}
        deadline = time.monotonic() + DRAIN_S
        while late := [place for place, end in ends.items() if self._watermarks().get(place, 0) < end]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the sink did not reach the end of {'/'.join(late[0])} within {DRAIN_S:.0f} s")
            alive()
            time.sleep(POLL_S)

    def _watermarks(self) -> dict[tuple[str, str], int]:
        rows = self._rows(f"SELECT _topic, _partition, max(next_offset) FROM {WATERMARKS} GROUP BY _topic, _partition")
        return {(topic, partition): int(offset) for topic, partition, offset in rows or []}

    def _rows(self, sql: str) -> list[list[str]] | None:
        """Return rows of text; None if the sink does not answer, as during its restart."""
        state = read_state(self._directory)
        if state is None:
            self._refusal = "it does not run"
            return None
        try:
            address, database = state.url, {"database": state.database}
            answer = self._client.post(address, params=database, content=f"{sql} FORMAT TabSeparated")
        except httpx.HTTPError as error:
            self._refusal = repr(error)
            return None
        self._refusal = "" if answer.is_success else answer.text
        return [line.split("\t") for line in answer.text.splitlines()] if answer.is_success else None
