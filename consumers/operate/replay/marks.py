"""What a replay writes into the headers of its copies: whose they are, of what, and since when.

The first copy of a replay carries its beginning as well: where each partition of the source ended and what was
selected. So a replay that was interrupted is carried on from nothing but what lies in its own topics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidemill.consumers.operate.replay.raw import Header, Lane, RawRecord
from tidemill.schemas.log.replayed import HEADER_REPLAY_ID, HEADER_REPLAY_SOURCE, replay_headers, replay_id_of

HEADER_REPLAY_AT = "tidemill-replay-at"
"""When the replay began, microseconds since the Unix epoch."""
HEADER_REPLAY_BEGAN = "tidemill-replay-began"
"""On the first copy of a replay: its `Beginning`, as JSON."""
OWN = (HEADER_REPLAY_ID, HEADER_REPLAY_SOURCE, HEADER_REPLAY_AT, HEADER_REPLAY_BEGAN)


class MarkError(ValueError):
    """Headers that no replay of this version wrote."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What was settled when a replay began, and holds when it is carried on."""

    replay_id: str
    began_at: int
    """Microseconds since the Unix epoch."""
    selected: str
    """Digest of what was selected."""
    ends: dict[Lane, int]
    """Where each partition of the source ended."""

    def to_json(self) -> str:
        """As it stands in a header."""
        ends = {f"{topic}/{partition}": end for (topic, partition), end in sorted(self.ends.items())}
        return json.dumps(
            {"replay_id": self.replay_id, "began_at": self.began_at, "selected": self.selected, "ends": ends}
        )


def beginning(text: bytes) -> Beginning:
    """The beginning of its JSON. Raises MarkError."""
    try:
        tree = json.loads(text)
        ends = {(place.rsplit("/", 1)[0], int(place.rsplit("/", 1)[1])): end for place, end in tree["ends"].items()}
        return Beginning(tree["replay_id"], tree["began_at"], tree["selected"], ends)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MarkError(f"header {HEADER_REPLAY_BEGAN} cannot be read: {error}") from error


def copy_headers(record: RawRecord, source_prefix: str, begun: Beginning, first: bool) -> list[Header]:
    """Headers of a copy: those of the original, and whose copy it is. A copy of a copy is the last replay's."""
    kept = [(name, value) for name, value in record.headers if name not in OWN]
    marks: dict[str, bytes] = {
        **replay_headers(begun.replay_id, source_prefix + record.topic, record.partition, record.offset),
        HEADER_REPLAY_AT: str(begun.began_at).encode(),
    }
    if first:
        marks[HEADER_REPLAY_BEGAN] = begun.to_json().encode()
    return [*kept, *marks.items()]


def copied_offset(record: RawRecord, replay_id: str) -> int | None:
    """The offset of the original of a copy; None when this replay did not write it. Raises MarkError."""
    if replay_id_of(record.headers) != replay_id:
        return None
    source = header(record, HEADER_REPLAY_SOURCE) or b""
    try:
        return int(source.rsplit(b"/", 1)[1])
    except (IndexError, ValueError) as error:
        raise MarkError(f"{record}: header {HEADER_REPLAY_SOURCE} is {source!r}") from error


def header(record: RawRecord, name: str) -> bytes | None:
    """The value of a header; None without one."""
    return next((value for found, value in record.headers if found == name), None)
