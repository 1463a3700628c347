"""When a batch is flushed, full by rows, full by bytes, or old, and how it is cut. Pure; the clock is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.rows import Row
from tidemill.schemas.log.consumed import Partition


def cut(rows: Sequence[Row], most_bytes: int) -> Iterator[Sequence[Row]]:
    """The rows in their order, in runs of at most `most_bytes`; a longer row is a run of its own."""
    first, held = 0, 0
    for place, row in enumerate(rows):
        if held and held + row.n_bytes > most_bytes:
            yield rows[first:place]
            first, held = place, 0
        held += row.n_bytes
    if first < len(rows):
        yield rows[first:]


@dataclass
class Batch:
    """Rows that wait for the next flush."""

    settings: SinkSettings
    rows: list[Row] = field(default_factory=list)
    n_bytes: int = 0
    opened_at: float = 0.0
    """Time of the first row, in seconds of the caller's clock."""

    def add(self, rows: Iterable[Row], now: float) -> None:
        """Take rows in."""
        for row in rows:
            if not self.rows:
                self.opened_at = now
            self.rows.append(row)
            self.n_bytes += row.n_bytes

    def due(self, now: float) -> bool:
        """Whether to flush now."""
        if not self.rows:
            return False
        full = len(self.rows) >= self.settings.flush_rows or self.n_bytes >= self.settings.flush_bytes
        return full or now - self.opened_at >= self.settings.flush_seconds

    def next_offsets(self) -> dict[Partition, int]:
        """One past the last row of each partition."""
        return {(row.topic, row.partition): row.offset + 1 for row in self.rows}

    def clear(self) -> None:
        """The rows are written."""
        self.rows, self.n_bytes = [], 0
