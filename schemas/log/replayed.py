"""Headers of a replayed record: which replay wrote it, and where the record that it copies lies.

A consumer that acts on records, the trainer above all, refuses those that carry a replay id unless it was told of it.
"""

from __future__ import annotations

from collections.abc import Iterable

HEADER_REPLAY_ID = "tidemill-replay-id"
HEADER_REPLAY_SOURCE = "tidemill-replay-source"
"""`topic/partition/offset` of the record that was copied, under its full name."""

Headers = Iterable[tuple[str, bytes | None]]


def replay_id_of(headers: Headers | None) -> str:
    """The id of the replay that wrote a record; empty for a record that no replay wrote."""
    return next((_text(value) for name, value in headers or () if name == HEADER_REPLAY_ID), "")


def replay_headers(replay_id: str, full_topic: str, partition: int, offset: int) -> dict[str, bytes]:
    """What a replay adds to the headers of a record that it copies."""
    return {
        HEADER_REPLAY_ID: replay_id.encode(),
        HEADER_REPLAY_SOURCE: f"{full_topic}/{partition}/{offset}".encode(),
    }


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
