"""The entries and the head of a machine's state as bytes: dataclasses as Avro, a kind byte before those of an entry.

Invariant: what `decode` gives for `encode`d bytes is the same entry, and bytes that are none raise `StateError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import cattrs

from tidemill.streams.runner.journal import StateError, read_avro, write_avro

Entry = TypeVar("Entry")
Head = TypeVar("Head")
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


class EntryBytes(Generic[Entry, Head]):
    """How one machine writes its state down.

    Args:
        entries: type and parsed Avro schema of each entry, by its kind byte.
        head: type and parsed Avro schema of the head.
    """

    def __init__(self, entries: Mapping[bytes, tuple[type[Entry], Any]], head: tuple[type[Head], Any]) -> None:
        self._entries, self._head = entries, head
        self._kinds = {entry: kind for kind, (entry, _) in entries.items()}

    def encode(self, entry: Entry) -> bytes:
        """The bytes of an entry."""
        kind = self._kinds[type(entry)]
        return kind + write_avro(self._entries[kind][1], _CONVERTER.unstructure(entry))

    def decode(self, data: bytes) -> Entry:
        """The entry of `encode`d bytes. Raises StateError."""
        known = self._entries.get(data[:1])
        if known is None:
            raise StateError(f"an entry begins with one of {sorted(self._entries)}, not {data[:1]!r}")
        entry: Entry = _structured(read_avro(known[1], data[1:]), known[0])
        return entry

    def encode_head(self, head: Head) -> bytes:
        """The bytes of a head."""
        return write_avro(self._head[1], _CONVERTER.unstructure(head))

    def decode_head(self, data: bytes) -> Head:
        """The head of `encode_head`'s bytes. Raises StateError."""
        head: Head = _structured(read_avro(self._head[1], data), self._head[0])
        return head


def _structured(body: dict[str, Any], kind: Any) -> Any:  # noqa: ANN401 - the dataclass that `kind` is
    try:
        return _CONVERTER.structure(body, kind)
    except Exception as error:  # cattrs raises groups of whatever did not fit; one clear error leaves
        raise StateError(f"unreadable {kind.__name__}: {error}") from error
