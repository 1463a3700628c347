"""State that a restart meets as it was at the head: a redo log inside of the state topic.

A machine whose decisions read several entries at once must not meet some of them newer than others, while a crash may
cut off what a batch writes anywhere. So the head is a commit record. Invariants:

- what a batch changed is written twice: as parts of the journal before the head of that batch, and as entries of their
  own before the head of the next;
- so every entry that a restart finds was committed by a head, and the journal of the newest head makes them exact;
- parts of two batches in a row have different keys, so that parts without a head spoil nothing.

Each value begins with its kind and the partition that it belongs to; bodies are the owner's own bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fastavro

from tidemill.streams.machine import Changes

PART_BYTES = 262_144
"""Size from which a part of the journal is closed: well below what one record may hold."""

_MARK = "\x00"
_ENVELOPE = struct.Struct(">cI")
_ENTRY, _HEAD, _PART = b"e", b"h", b"j"
_HEAD_SCHEMA: Any = fastavro.parse_schema(
    {
        "type": "record",
        "name": "JournalHead",
        "fields": [
            {"name": "sequence", "type": "long"},
            {"name": "parts", "type": "long"},
            {"name": "body", "type": "bytes"},
        ],
    }
)
_PART_SCHEMA: Any = fastavro.parse_schema(
    {
        "type": "record",
        "name": "JournalPart",
        "fields": [
            {"name": "sequence", "type": "long"},
            {"name": "entries", "type": {"type": "map", "values": ["null", "bytes"]}},
        ],
    }
)


class StateError(ValueError):
    """Bytes of the state topic that are no state of this version."""


def partition_of_state(value: bytes) -> int:
    """The partition that a written value belongs to. Raises StateError."""
    return _opened(value)[1]


def write_avro(schema: Any, body: Mapping[str, Any]) -> bytes:  # noqa: ANN401 - a parsed Avro schema
    """The Avro bytes of a state, without a schema."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, body)
    return buffer.getvalue()


def read_avro(schema: Any, data: bytes) -> dict[str, Any]:  # noqa: ANN401 - a parsed Avro schema
    """What `write_avro` was given. Raises StateError."""
    try:
        body: Any = fastavro.schemaless_reader(io.BytesIO(data), schema, None)
    except Exception as error:  # hostile bytes raise whatever fastavro trips over; one clear error leaves
        raise StateError(f"unreadable state: {type(error).__name__}: {error}") from error
    return dict(body)


class Journal:
    """The entries of one partition's machine: found at the start, then only written."""

    def __init__(self, partition: int, written: Iterable[tuple[str, bytes]] = ()) -> None:
        """`written` is every key and value of the partition in the state topic. Raises StateError."""
        self._partition = partition
        self._sequence = -1
        self._committed: dict[str, bytes] = {}
        self._changed: dict[str, bytes | None] = {}
        self._parts = {0: 0, 1: 0}
        self.head: bytes | None = None
        """The body of the newest head at the start; None when nothing was committed yet."""
        self.entries: dict[str, bytes] = {}
        """Bodies of the entries at the start, as of that head."""
        self._recover(dict(written))

    def put(self, key: str, body: bytes) -> None:
        """Set an entry. Keys do not begin with a zero character."""
        self._changed[key] = body

    def delete(self, key: str) -> None:
        """Delete an entry."""
        self._changed[key] = None

    def take(self, head: bytes) -> Changes:
        """Everything to write for the batch that ends here; `head` is the body of its head."""
        self._sequence += 1
        states = {key: self._sealed(_ENTRY, body) for key, body in self._committed.items()}
        forgotten = [key for key, body in self._changed.items() if body is None]
        parts = list(self._split(self._changed))
        states |= {self._part_key(index): part for index, part in enumerate(parts)}
        forgotten += [self._part_key(index) for index in range(len(parts), self._parts[self._sequence % 2])]
        self._parts[self._sequence % 2] = len(parts)
        body = write_avro(_HEAD_SCHEMA, {"sequence": self._sequence, "parts": len(parts), "body": head})
        # Deletions are written by this batch already; entries only once this head has committed them.
        self._committed = {key: entry for key, entry in self._changed.items() if entry is not None}
        self._changed = {}
        return Changes(states, {self._head_key: self._sealed(_HEAD, body)}, forgotten)

    @property
    def _head_key(self) -> str:
        return f"{_MARK}head/{self._partition}"

    def _part_key(self, index: int) -> str:
        return f"{_MARK}part/{self._partition}/{self._sequence % 2}/{index}"

    def _sealed(self, kind: bytes, body: bytes) -> bytes:
        return _ENVELOPE.pack(kind, self._partition) + body

    def _split(self, entries: Mapping[str, bytes | None]) -> Iterator[bytes]:
        part: dict[str, bytes | None] = {}
        size = 0
        for key, body in entries.items():
            part[key] = body
            size += len(key) + len(body or b"")
            if size >= PART_BYTES:
                yield self._encoded_part(part)
                part, size = {}, 0
        if part:
            yield self._encoded_part(part)

    def _encoded_part(self, entries: Mapping[str, bytes | None]) -> bytes:
        return self._sealed(_PART, write_avro(_PART_SCHEMA, {"sequence": self._sequence, "entries": entries}))

    def _recover(self, written: dict[str, bytes]) -> None:
        bodies = {key: _opened(value) for key, value in written.items()}
        head = bodies.get(self._head_key)
        for parity in self._parts:
            self._parts[parity] = sum(key.startswith(f"{_MARK}part/{self._partition}/{parity}/") for key in bodies)
        if head is None:
            return
        found = read_avro(_HEAD_SCHEMA, head[2])
        self._sequence, self.head = found["sequence"], found["body"]
        self.entries = {key: body for key, (kind, _, body) in bodies.items() if kind == _ENTRY}
        for index in range(found["parts"]):
            for key, change in self._part(bodies, index).items():
                if change is not None:
                    self.entries[key] = self._committed[key] = change
                    continue
                # Whether the deletion was written is not known: the next head commits it again.
                self.entries.pop(key, None)
                self._changed[key] = None

    def _part(self, bodies: Mapping[str, tuple[bytes, int, bytes]], index: int) -> dict[str, bytes | None]:
        key = self._part_key(index)
        part: dict[str, Any] = read_avro(_PART_SCHEMA, bodies[key][2]) if key in bodies else {"sequence": "none"}
        if part["sequence"] != self._sequence:
            raise StateError(
                f"partition {self._partition}: head {self._sequence} needs part {index} of its journal, but the state "
                f"topic has that of {part['sequence']}: records of the state topic are missing"
            )
        return dict(part["entries"])


def _opened(value: bytes) -> tuple[bytes, int, bytes]:
    """Kind, partition and body of a written value. Raises StateError."""
    if value[:1] not in (_ENTRY, _HEAD, _PART) or len(value) < _ENVELOPE.size:
        raise StateError(f"a state begins with its kind and its partition, not with {value[:8]!r}")
    kind, partition = _ENVELOPE.unpack_from(value)
    return kind, partition, value[_ENVELOPE.size :]
