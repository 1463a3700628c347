"""The state topic: the encoding of the changes of a partition's machine, and their recovery.

Keys are those of the entries; each value begins with its kind and the partition that it belongs to, and ends with the
machine's own bytes. The head is a commit record. There are two ways to write a `Changes`:

- `commit`, for a writer that writes a batch atomically (in a transaction);
- `redo`, for a writer that may crash between any two writes: a redo log within the state topic.

Invariants of `redo`:

- the changes of a batch are written twice: as parts of the journal before the head of that batch, and as separate
  entries before the head of the next;
- so every entry that a restart finds was committed by a head, and the journal of the newest head makes them exact;
- parts of two consecutive batches have different keys, so that parts without a head do no harm.

A topic that was written in one way can be read, and continued, in the other. Values of group assembly that are older
than the common format of all processors can still be read: they have no envelope, and contain their partition.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from tidemill.schemas.avro_code import read_long
from tidemill.schemas.record_class import record
from tidemill.streams.state import NO_IDENTIFIER, Changes, MachineState, StateBytes, StateError

PART_BYTES = 262_144
"""Size at which a part of the journal is closed: well below the largest record."""

Written = Mapping[str, bytes | None]
"""Values by key; None deletes."""

_HEAD_PREFIX = f"{NO_IDENTIFIER}head/"
_PART_PREFIX = f"{NO_IDENTIFIER}part/"
_ENVELOPE = struct.Struct(">cI")
_ENTRY, _HEAD, _PART = b"e", b"h", b"j"
_BARE_ENTRIES = frozenset({b"o", b"d"})


@record(frozen=True, slots=True)
class JournalHead:
    """The newest batch: its number, its number of parts, and the machine's own head."""

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
    """Return the partition to which a written value belongs. Raises StateError."""
    return _opened(key, value)[1]


def _opened(key: str, value: bytes) -> tuple[bytes, int, bytes]:
    """Return kind, partition and body of a written value. Raises StateError."""
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
            raise StateError(f"a head is stored under the key {key!r}")
        if value[1 : _ENVELOPE.size] != _ENVELOPE.pack(kind, int(number))[1:]:
            return kind, int(number), _HEADS.write(JournalHead(-1, 0, value[1:]))
    return kind, _ENVELOPE.unpack_from(value)[1], value[_ENVELOPE.size :]


class Journal:
    """The written state of one partition's machine: read at the start, then only written."""

    def __init__(self, partition: int, written: Iterable[tuple[str, bytes]] = ()) -> None:
        """`written` contains all keys and values of the partition in the state topic. Raises StateError."""
        self._partition = partition
        self._head_key = f"{_HEAD_PREFIX}{partition}"
        self._sequence = -1
        self._committed: dict[str, bytes] = {}
        """Entries in the journal of the newest head that may not be written as separate entries yet."""
        self._deleted: dict[str, None] = {}
        """Deletions of that head that may not be written yet."""
        self._parts = {0: 0, 1: 0}
        self.state = self._recovered({key: _opened(key, value) for key, value in written})
        """The machine's state at the start."""

    def commit(self, changes: Changes) -> Written:
        """Return the writes of a batch that is written atomically."""
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
        """Return the writes of a batch in three steps: the broker must acknowledge each before the next is sent."""
        self._sequence += 1
        parity = self._sequence % 2
        changed = {**dict.fromkeys(self._deleted, None), **changes.entries}
        parts: list[bytes] = []
        part, size = dict[str, bytes | None](), 0
        for n, (key, body) in enumerate(changed.items(), 1):
            part[key] = body
            size += len(key) + len(body or b"")
            if size >= PART_BYTES or n == len(changed):
                parts.append(_PARTS.write(JournalPart(self._sequence, part), self._sealed(_PART, b"")))
                part, size = {}, 0
        states: dict[str, bytes | None] = {key: self._sealed(_ENTRY, body) for key, body in self._committed.items()}
        states |= {self._part_key(parity, index): sealed for index, sealed in enumerate(parts)}
        forgotten = [key for key, body in changed.items() if body is None]
        forgotten += [self._part_key(parity, index) for index in range(len(parts), self._parts[parity])]
        self._parts[parity] = len(parts)
        # This batch writes its deletions itself; its entries are written only after this head has committed them.
        self._committed = {key: entry for key, entry in changed.items() if entry is not None}
        self._deleted = {}
        return states, {self._head_key: self._sealed_head(len(parts), changes.head)}, dict.fromkeys(forgotten, None)

    def _part_key(self, parity: int, index: int) -> str:
        return f"{_PART_PREFIX}{self._partition}/{parity}/{index}"

    def _sealed(self, kind: bytes, body: bytes) -> bytes:
        return _ENVELOPE.pack(kind, self._partition) + body

    def _sealed_head(self, parts: int, body: bytes) -> bytes:
        return _HEADS.write(JournalHead(self._sequence, parts, body), self._sealed(_HEAD, b""))

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
                # It is not known whether the deletion was written: the next head commits it again.
                entries.pop(key, None)
                self._deleted[key] = None
        return MachineState(entries, found.body)
