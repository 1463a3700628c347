"""The entries of a machine in memory: found by key, called up by time, written through a journal."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tidemill.streams.machine import Changes
from tidemill.streams.runner.journal import Journal

NEVER = 2**62
"""The time of an entry that no time calls up."""


class Timed(Protocol):
    """Something that is remembered."""

    @property
    def key(self) -> str:
        """Its key in the state topic."""
        ...

    @property
    def due_at(self) -> int:
        """Event time, microseconds, at which it is looked at again without a record."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether something follows when it falls due; what is only forgotten then is no reason to hurry."""
        ...


E = TypeVar("E", bound=Timed)


class TimedEntries(Generic[E]):
    """Everything that one partition remembers. Whoever changes an entry saves it."""

    def __init__(
        self,
        partition: int,
        states: Iterable[tuple[str, bytes]],
        encode: Callable[[E], bytes],
        decode: Callable[[bytes], E],
    ) -> None:
        """`states` is everything of the partition in the state topic. Raises StateError."""
        self._journal = Journal(partition, states)
        self._encode = encode
        self._entries: dict[str, E] = {}
        self._changed: dict[str, None] = {}
        self._timers: list[tuple[int, str]] = []
        self._timed: dict[str, int] = {}
        self._awaited: list[tuple[int, str]] = []
        for body in self._journal.entries.values():
            self.save(decode(body))
        self._changed.clear()

    @property
    def head(self) -> bytes | None:
        """The head that the entries were found at; None when nothing was committed yet."""
        return self._journal.head

    def changes(self, head: bytes) -> Changes:
        """Everything to write since the last call."""
        for key in self._changed:
            entry = self._entries.get(key)
            if entry is None:
                self._journal.delete(key)
            else:
                self._journal.put(key, self._encode(entry))
        self._changed.clear()
        return self._journal.take(head)

    def entries(self) -> Iterator[E]:
        """All of them."""
        yield from self._entries.values()

    def get(self, key: str) -> E | None:
        """The entry of a key."""
        return self._entries.get(key)

    def save(self, entry: E) -> None:
        """An entry is new or has changed."""
        key = entry.key
        self._entries[key] = entry
        self._changed[key] = None
        if entry.due_at != NEVER and self._timed.get(key) != entry.due_at:
            self._timed[key] = entry.due_at
            heapq.heappush(self._timers, (entry.due_at, key))
            if entry.awaited:
                heapq.heappush(self._awaited, (entry.due_at, key))

    def forget(self, entry: E) -> None:
        """An entry is over."""
        del self._entries[entry.key]
        self._timed.pop(entry.key, None)
        self._changed[entry.key] = None

    def due(self, time_us: int) -> Iterator[E]:
        """The entries that fall due up to a time, in order of time; each is changed or forgotten before the next."""
        while self._timers and self._timers[0][0] <= time_us:
            due_at, key = heapq.heappop(self._timers)
            if self._is_due_at(due_at, key):
                yield self._entries[key]

    def next_awaited_us(self) -> int | None:
        """When the next entry falls due that something follows from."""
        while self._awaited and not self._is_due_at(*self._awaited[0]):
            heapq.heappop(self._awaited)
        return self._awaited[0][0] if self._awaited else None

    def _is_due_at(self, time_us: int, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.due_at == time_us
