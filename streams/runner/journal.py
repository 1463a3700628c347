"""The state topic: how the changes of a partition's machine are written, and found again.

Keys are those of the entries; each value begins with its kind and the partition that it belongs to, and ends with the
machine's own bytes. The head is a commit record. There are two ways to write a `Changes`:

- `commit`, for a writer whose writes of one batch are in the log whole or not at all;
- `redo`, for one that a crash may cut off between any two writes: a redo log inside of the state topic.

Invariants of `redo`:

- what a batch changed is written twice: as parts of the journal before the head of that batch, and as entries of their
  own before the head of the next;
- so every entry that a restart finds was committed by a head, and the journal of the newest head makes them exact;
- parts of two batches in a row have different keys, so that parts without a head spoil nothing.

A topic that was written in one way is read, and written on, in the other. Values of group assembly from before there
was one format for all processors are read as they are: they bear no envelope, and name their partition themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from tidemill.schemas.avro_code import read_long
from tidemill.schemas.record_class import record
from tidemill.streams.state import NO_IDENTIFIER, Changes, MachineState, StateBytes, StateError

PART_BYTES = 262_144
"""Size from which a part of the journal is closed: well below what one record may hold."""

Written = Mapping[str, bytes | None]
"""Values by key; None deletes."""

_HEAD_PREFIX = f"{NO_IDENTIFIER}head/"
_PART_PREFIX = f"{NO_IDENTIFIER}part/"
_ENVELOPE = struct.Struct(">cI")
_ENTRY, _HEAD, _PART = b"e", b"h", b"j"
_BARE_ENTRIES = frozenset({b"o", b"d"})


@record(frozen=True, slots=True)
class JournalHead:
    """The newest batch: its number, in how many parts it is written, and the machine's own head."""

    sequence: int
    parts: int
    body: bytes


@record(frozen=True, slots=True)
class JournalPart:
    """Changes of a batch; None deletes."""

    sequence: int
    entries: Mapping[str, bytes | None]


_HEADS, _PARTS = StateBytes(JournalHead), StateBytes(JournalPart)


def partition_of_state(key: str, value: bytes) -> int:
    """The partition that a written value belongs to. Raises StateError."""
    return _opened(key, value)[1]


def _opened(key: str, value: bytes) -> tuple[bytes, int, bytes]:
    """Kind, partition and body of a written value. Raises StateError."""
    kind = value[:1]
    if kind in _BARE_ENTRIES:
        try:
            return _ENTRY, read_long(value, 1)[0], value
        except (IndexError, OverflowError) as error:
            raise StateError(f"a state of group assembly names no partition: {value[:12]!r}") from error
    if kind not in (_ENTRY, _HEAD, _PART) or len(value) < (_ENVELOPE.size if kind != _HEAD else 2):
        raise StateError(f"a state begins with its kind and its partition, not with {value[:8]!r}")
    if kind == _HEAD:
        number = key.removeprefix(_HEAD_PREFIX)
        if not (key.startswith(_HEAD_PREFIX) and number.isdecimal()):
            raise StateError(f"a head lies under the key {key!r}")
        if value[1 : _ENVELOPE.size] != _ENVELOPE.pack(kind, int(number))[1:]:
            return kind, int(number), _HEADS.write(JournalHead(-1, 0, value[1:]))
    return kind, _ENVELOPE.unpack_from(value)[1], value[_ENVELOPE.size :]


class Journal:
    """The written state of one partition's machine: read at the start, then only written."""

    def __init__(self, partition: int, written: Iterable[tuple[str, bytes]] = ()) -> None:
        """`written` is every key and value of the partition in the state topic. Raises StateError."""
        self._partition = partition
        self._head_key = f"{_HEAD_PREFIX}{partition}"
        self._sequence = -1
        self._committed: dict[str, bytes] = {}
        """Entries that lie in the journal of the newest head, and perhaps nowhere else."""
        self._deleted: dict[str, None] = {}
        """Deletions of that head that were perhaps not written."""
        self._parts = {0: 0, 1: 0}
        self.state = self._recovered({key: _opened(key, value) for key, value in written})
        """The machine's state at the start."""

    def commit(self, changes: Changes) -> Written:
        """The writes of a batch, of which the log keeps all or none."""
        self._sequence += 1
        writes: dict[str, bytes | None] = {key: self._sealed(_ENTRY, body) for key, body in self._committed.items()}
        for parity, count in self._parts.items():
            writes |= dict.fromkeys((self._part_key(parity, index) for index in range(count)), None)
        writes |= dict.fromkeys(self._deleted, None)
        self._committed, self._deleted, self._parts = {}, {}, {0: 0, 1: 0}
        for key, body in changes.entries.items():
            writes[key] = None if body is None else self._sealed(_ENTRY, body)
        writes[self._head_key] = self._sealed_head(0, changes.head)
        return writes

    def redo(self, changes: Changes) -> tuple[Written, Written, Written]:
        """The writes of a batch in three steps: each is to be acknowledged by the log before the next is sent."""
        self._sequence += 1
        parity = self._sequence % 2
        changed = {**dict.fromkeys(self._deleted, None), **changes.entries}
        parts = list(self._split(changed))
        states: dict[str, bytes | None] = {key: self._sealed(_ENTRY, body) for key, body in self._committed.items()}
        states |= {self._part_key(parity, index): part for index, part in enumerate(parts)}
        forgotten = [key for key, body in changed.items() if body is None]
        forgotten += [self._part_key(parity, index) for index in range(len(parts), self._parts[parity])]
        self._parts[parity] = len(parts)
        # Deletions are written by this batch already; entries only once this head has committed them.
        self._committed = {key: entry for key, entry in changed.items() if entry is not None}
        self._deleted = {}
        return states, {self._head_key: self._sealed_head(len(parts), changes.head)}, dict.fromkeys(forgotten, None)

    def _part_key(self, parity: int, index: int) -> str:
        return f"{_PART_PREFIX}{self._partition}/{parity}/{index}"

    def _sealed(self, kind: bytes, body: bytes) -> bytes:
        return _ENVELOPE.pack(kind, self._partition) + body

    def _sealed_head(self, parts: int, body: bytes) -> bytes:
        return _HEADS.write(JournalHead(self._sequence, parts, body), self._sealed(_HEAD, b""))

    def _split(self, entries: Written) -> Iterator[bytes]:
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

    def _encoded_part(self, entries: Written) -> bytes:
        return _PARTS.write(JournalPart(self._sequence, entries), self._sealed(_PART, b""))

    def _recovered(self, bodies: Mapping[str, tuple[bytes, int, bytes]]) -> MachineState:
        for parity in self._parts:
            self._parts[parity] = sum(key.startswith(self._part_key(parity, 0)[:-1]) for key in bodies)
        head = bodies.get(self._head_key)
        if head is None:
            return MachineState()
        found = _HEADS.read(head[2])
        self._sequence = found.sequence
        entries = {key: body for key, (kind, _, body) in bodies.items() if kind == _ENTRY}
        for index in range(found.parts):
            part_key = self._part_key(self._sequence % 2, index)
            part = _PARTS.read(bodies[part_key][2]) if part_key in bodies else None
            if part is None or part.sequence != self._sequence:
                raise StateError(
                    f"partition {self._partition}: head {self._sequence} needs part {index} of its journal, but the "
                    f"state topic has that of {part.sequence if part else 'none'}: records of the state topic are "
                    "missing"
                )
            for key, change in part.entries.items():
                if change is not None:
                    entries[key] = self._committed[key] = change
                    continue
                # Whether the deletion was written is not known: the next head commits it again.
                entries.pop(key, None)
                self._deleted[key] = None
        return MachineState(entries, found.body)
