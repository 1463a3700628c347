"""The state of a stream machine: keyed entries with a timer each, and a head with the decided positions of its inputs.

A machine returns its changes as bytes (`Changes`) and continues from the stored changes (`MachineState`); only runners
know how the bytes are written. Invariants:

- entries and head of one `Changes` are stored together or not at all;
- `decode` returns the same entry for `encode`d bytes under the entry's key, and raises `StateError` for other bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from tidemill.schemas import avro_code
from tidemill.schemas.record_class import record

NEVER = 2**62
"""The `due_at` of an entry that is never due."""
NO_IDENTIFIER = "\x00"
"""Prefix of keys that Tidemill reserves for itself; no entry has such a key."""
LONGEST_IDENTIFIER = 256
"""Most characters of an identifier that a machine keeps, so that its entries and its outputs fit into a record."""

_AVRO_NAMES: Mapping[type, str] = {bool: "boolean", int: "long", float: "double", bytes: "bytes", str: "string"}


class StateError(ValueError):
    """Bytes in the state topic that are not a valid state of this version."""


@record(frozen=True, slots=True)
class Changes:
    """The changes in a machine's state since the last call of `take_changes`."""

    entries: Mapping[str, bytes | None]
    """New values by key; None deletes. A key is unique over all partitions of a processor."""
    head: bytes


@record(frozen=True, slots=True)
class MachineState:
    """The state from which a machine continues: all changes that it returned, up to the newest head."""

    entries: Mapping[str, bytes] = field(default_factory=dict)
    head: bytes | None = None
    """None: no record is decided."""


def _schema_of(kind: type) -> dict[str, Any]:
    """Return the Avro schema of a record class: its fields in order, with the types of their annotations."""
    hints = get_type_hints(kind)
    listed = [{"name": each.name, "type": _avro_type(hints[each.name])} for each in fields(kind)]
    return {"type": "record", "name": kind.__name__, "fields": listed}


def _avro_type(hint: Any) -> Any:  # noqa: ANN401 - a type, and an Avro type
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part not in (NoneType, ...)]
    if origin is UnionType:  # of a type and None
        return ["null", _avro_type(parts[0])]
    if origin in (list, tuple):
        return {"type": "array", "items": _avro_type(parts[0])}
    if origin in (dict, Mapping):
        return {"type": "map", "values": _avro_type(parts[1])}
    if isinstance(hint, type) and is_dataclass(hint):
        return _schema_of(hint)
    return next(name for base, name in _AVRO_NAMES.items() if issubclass(hint, base))


T = TypeVar("T")


class StateBytes(Generic[T]):
    """The encoding of a record class of the state: Avro without the schema, which follows from the annotations."""

    def __init__(self, kind: type[T]) -> None:
        schema = _schema_of(kind)
        self._name = kind.__name__
        self._write = avro_code.writer(schema)
        self._read: Callable[[bytes, int], T] = avro_code.reader(schema, kind)

    def write(self, value: T, begin: bytes = b"") -> bytes:
        """Return `begin` followed by the bytes of a value."""
        return self._write(value, begin)

    def read(self, data: bytes, place: int = 0) -> T:
        """Return the value whose bytes are `data` from `place` to the end. Raises StateError."""
        try:
            return self._read(data, place)
        except Exception as error:  # a reader raises errors of many types on hostile bytes; callers get one
            raise StateError(f"unreadable {self._name}: {type(error).__name__}: {error}") from error


def too_long(*identifiers: str | None) -> str:
    """Return why a machine cannot keep identifiers; empty if it can."""
    longest = max(len(identifier or "") for identifier in identifiers)
    if longest <= LONGEST_IDENTIFIER:
        return ""
    return f"it has an identifier of {longest} characters, more than {LONGEST_IDENTIFIER}"


class TimedEntry(Protocol):
    """An entry of a machine's state."""

    @property
    def key(self) -> str:
        """Key of the entry in the state topic."""
        ...

    @property
    def due_at(self) -> int:
        """Event time, microseconds, at which the entry is processed again without a record."""
        ...


E = TypeVar("E", bound=TimedEntry)
Head = TypeVar("Head")


class EntryBytes(Generic[E, Head]):
    """The encoding of one machine's entries and head: dataclasses as Avro; an entry begins with a kind byte.

    Args:
        entries: type of each entry, by kind byte.
        head: type of the head.
    """

    def __init__(self, entries: Mapping[bytes, type[E]], head: type[Head]) -> None:
        self._entries: dict[bytes, StateBytes[E]] = {kind: StateBytes(entry) for kind, entry in entries.items()}
        self._kinds = {entry: (kind, self._entries[kind]) for kind, entry in entries.items()}
        self.head = StateBytes(head)

    def encode(self, entry: E) -> bytes:
        kind, known = self._kinds[type(entry)]
        return known.write(entry, kind)

    def decode(self, key: str, data: bytes) -> E:
        """Return the entry from `encode`d bytes that were stored under `key`. Raises StateError."""
        known = self._entries.get(data[:1])
        if known is None:
            raise StateError(f"an entry begins with one of {sorted(self._entries)}, not {data[:1]!r}")
        entry = known.read(data, 1)
        if entry.key != key:
            raise StateError(f"the entry of {entry.key!r} is stored under the key {key!r}")
        return entry


class TimedEntries(Generic[E, Head]):
    """All entries of one machine in memory, by key and by due time. The caller saves changed entries.

    Args:
        state: the state from which the machine continues; None: an empty state.
        awaited: whether an output follows when an entry is due; an entry that is only deleted then is not awaited.

    Raises StateError.
    """

    def __init__(
        self, state: MachineState | None, entry_bytes: EntryBytes[E, Head], awaited: Callable[[E], bool]
    ) -> None:
        state = state or MachineState()
        self._bytes, self._is_awaited = entry_bytes, awaited
        self.head = entry_bytes.head.read(state.head) if state.head is not None else None
        """The head from which the machine continues; None: no record is decided."""
        self._entries: dict[str, E] = {}
        self._changed: dict[str, None] = {}
        self._timed: dict[str, tuple[int, bool]] = {}
        """The due time of each entry, and whether it is awaited."""
        self._timers: list[tuple[int, str]] = []
        self._awaited: list[tuple[int, str]] = []
        """The timers of awaited entries; `_timers` contains those of the others."""
        for key, body in state.entries.items():
            self.save(entry_bytes.decode(key, body))
        self._changed.clear()

    def changes(self, head: Head) -> Changes:
        """Return all changes since the last call, with a head."""
        entries, encode = self._entries, self._bytes.encode
        changed = {key: encode(entries[key]) if key in entries else None for key in self._changed}
        self._changed = {}
        return Changes(changed, self._bytes.head.write(head))

    def entries(self) -> Iterator[E]:
        yield from self._entries.values()

    def get(self, key: str) -> E | None:
        return self._entries.get(key)

    def save(self, entry: E) -> None:
        """Store a new or changed entry."""
        key, due_at = entry.key, entry.due_at
        self._entries[key] = entry
        self._changed[key] = None
        if due_at == NEVER:
            self._timed.pop(key, None)
        else:
            awaited = self._is_awaited(entry)
            if self._timed.get(key) != (due_at, awaited):
                self._timed[key] = due_at, awaited
                heapq.heappush(self._awaited if awaited else self._timers, (due_at, key))

    def forget(self, entry: E) -> None:
        key = entry.key
        del self._entries[key]
        self._timed.pop(key, None)
        self._changed[key] = None

    def due(self, time_us: int) -> Iterable[E]:
        """Return the entries due up to a time, in order of time. The caller changes or deletes each before the next."""
        awaited, timers = self._awaited, self._timers
        # Called for each record; usually no entry is due.
        if (awaited and awaited[0][0] <= time_us) or (timers and timers[0][0] <= time_us):
            return self._due(time_us)
        return ()

    def _due(self, time_us: int) -> Iterator[E]:
        awaited, timers = self._awaited, self._timers
        while awaited or timers:
            queue = awaited if awaited and not (timers and timers[0] < awaited[0]) else timers
            if queue[0][0] > time_us:
                return
            due_at, key = heapq.heappop(queue)
            entry = self._entries.get(key)
            if entry is not None and entry.due_at == due_at:
                yield entry

    def next_awaited_us(self) -> int | None:
        """Return the time at which the next awaited entry is due; None if there is none."""
        while self._awaited:
            due_at, key = self._awaited[0]
            if self._timed.get(key) == (due_at, True):
                return due_at
            heapq.heappop(self._awaited)
        return None
