"""The entries of the feedback join: found by key and by user, called up by time, written through a journal."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tidemill.streams.join import join_state
from tidemill.streams.join.join_state import NEVER, Activity, Case, Early, Entry, Head, Wishes
from tidemill.streams.journal import Journal
from tidemill.streams.machine import Changes


class JoinStore:
    """Everything that one partition remembers. Whoever changes an entry saves it."""

    def __init__(self, partition: int, states: Iterable[tuple[str, bytes]]) -> None:
        """`states` is everything of the partition in the state topic. Raises StateError."""
        self._partition = partition
        self._journal = Journal(partition, states)
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, None] = {}
        self._of_user: dict[str, set[str]] = defaultdict(set)
        self._timers: list[tuple[int, str]] = []
        self._timed: dict[str, int] = {}
        self._awaited: list[tuple[int, str]] = []
        for body in self._journal.entries.values():
            self.save(join_state.decode(body))
        self._changed.clear()

    @property
    def head(self) -> Head:
        """The head that the entries were found at."""
        return join_state.decode_head(self._journal.head) if self._journal.head is not None else Head({}, {})

    def changes(self, head: Head) -> Changes:
        """Everything to write since the last call."""
        for key in self._changed:
            entry = self._entries.get(key)
            if entry is None:
                self._journal.delete(key)
            else:
                self._journal.put(key, join_state.encode(entry))
        self._changed.clear()
        return self._journal.take(join_state.encode_head(head))

    def entries(self) -> Iterator[Entry]:
        """All of them."""
        yield from self._entries.values()

    def case(self, interaction_id: str) -> Case | None:
        """An interaction, open or ended."""
        entry = self._entries.get(f"case/{interaction_id}")
        return entry if isinstance(entry, Case) else None

    def early(self, interaction_id: str) -> Early | None:
        """The feedback that waits for an interaction."""
        entry = self._entries.get(f"early/{interaction_id}")
        return entry if isinstance(entry, Early) else None

    def wishes(self, user_id: str) -> Wishes:
        """What a user demanded; nothing, where he is not known."""
        entry = self._entries.get(f"wishes/{self._partition}/{user_id}")
        return entry if isinstance(entry, Wishes) else Wishes(self._partition, user_id, NEVER)

    def activity(self, user_id: str, at_us: int) -> Activity:
        """What a user did lately; a window that opens at `at_us`, where he is not known."""
        entry = self._entries.get(f"activity/{self._partition}/{user_id}")
        return entry if isinstance(entry, Activity) else Activity(self._partition, user_id, NEVER, at_us)

    def cases_of(self, user_id: str) -> list[Case]:
        """The interactions of a user, by id."""
        found = [self._entries[key] for key in sorted(self._of_user.get(user_id, ()))]
        return [entry for entry in found if isinstance(entry, Case)]

    def early_of(self, user_id: str) -> list[Early]:
        """Where feedback of a user waits, by interaction."""
        found = [self._entries[key] for key in sorted(self._of_user.get(user_id, ()))]
        return [entry for entry in found if isinstance(entry, Early)]

    def save(self, entry: Entry) -> None:
        """An entry is new or has changed."""
        key = entry.key
        self._entries[key] = entry
        self._changed[key] = None
        for user_id in _users(entry):
            self._of_user[user_id].add(key)
        if entry.due_at != NEVER and self._timed.get(key) != entry.due_at:
            self._timed[key] = entry.due_at
            heapq.heappush(self._timers, (entry.due_at, key))
            if isinstance(entry, Early) or (isinstance(entry, Case) and entry.open):
                heapq.heappush(self._awaited, (entry.due_at, key))

    def forget(self, entry: Entry) -> None:
        """An entry is over."""
        del self._entries[entry.key]
        self._timed.pop(entry.key, None)
        self._changed[entry.key] = None
        for user_id in _users(entry):
            self.release(entry, user_id)

    def release(self, entry: Entry, user_id: str) -> None:
        """An entry holds nothing of a user any more."""
        keys = self._of_user.get(user_id, set())
        keys.discard(entry.key)
        if not keys:
            self._of_user.pop(user_id, None)

    def due(self, time_us: int) -> Iterator[Entry]:
        """The entries that fall due up to a time, in order of time; each is changed or forgotten before the next."""
        while self._timers and self._timers[0][0] <= time_us:
            due_at, key = heapq.heappop(self._timers)
            if self._is_due_at(due_at, key):
                yield self._entries[key]

    def next_awaited_us(self) -> int | None:
        """When the next entry falls due that something follows from; what is only forgotten is no reason to hurry."""
        while self._awaited and not self._is_due_at(*self._awaited[0]):
            heapq.heappop(self._awaited)
        return self._awaited[0][0] if self._awaited else None

    def _is_due_at(self, time_us: int, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.due_at == time_us


def _users(entry: Entry) -> set[str]:
    """Whose data an entry holds, where it must be found by user."""
    match entry:
        case Case():
            return {entry.user_id}
        case Early():
            return {held.user_id for held in entry.held}
        case _:
            return set()
