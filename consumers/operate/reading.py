"""Reading a topic whole, however long that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader

SILENCE_S = 60.0
"""A broker that delivers nothing for so long is taken for gone."""

Progress = Callable[[int, int], None]
"""Told how many offsets of how many have been read."""


def no_progress(_done: int, _total: int) -> None:
    """Nobody watches."""


def read_whole(reader: LogReader) -> Iterator[ConsumedRecord]:
    """Every record up to the end of the log as it is now. Raises TimeoutError when the broker falls silent."""
    while True:
        before = reader.next_offsets()
        try:
            yield from reader.read_to_end(SILENCE_S)
            return
        except TimeoutError:
            if reader.next_offsets() == before:
                raise
