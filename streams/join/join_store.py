"""The entries of the feedback join: by interaction and by user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from tidemill.streams.join import join_state
from tidemill.streams.join.join_state import Activity, Case, Early, Entry, Wishes
from tidemill.streams.state import NEVER, MachineState, TimedEntries


class JoinStore(TimedEntries[Entry]):
    """What one partition remembers of interactions, feedback and users."""

    def __init__(self, partition: int, state: MachineState) -> None:
        """Raises StateError."""
        self._partition = partition
        self._of_user: dict[str, set[str]] = defaultdict(set)
        super().__init__(state, join_state.encode, join_state.decode)

    def case(self, interaction_id: str) -> Case | None:
        """An interaction, open or ended."""
        entry = self.get(f"case/{interaction_id}")
        return entry if isinstance(entry, Case) else None

    def early(self, interaction_id: str) -> Early | None:
        """The feedback that waits for an interaction."""
        entry = self.get(f"early/{interaction_id}")
        return entry if isinstance(entry, Early) else None

    def wishes(self, user_id: str) -> Wishes:
        """What a user demanded; nothing, where he is not known."""
        entry = self.get(f"wishes/{self._partition}/{user_id}")
        return entry if isinstance(entry, Wishes) else Wishes(self._partition, user_id, NEVER)

    def activity(self, user_id: str, at_us: int) -> Activity:
        """What a user did lately; a window that opens at `at_us`, where he is not known."""
        entry = self.get(f"activity/{self._partition}/{user_id}")
        return entry if isinstance(entry, Activity) else Activity(self._partition, user_id, NEVER, at_us)

    def cases_of(self, user_id: str) -> list[Case]:
        """The interactions of a user, by id."""
        return [entry for entry in self._data_of(user_id) if isinstance(entry, Case)]

    def early_of(self, user_id: str) -> list[Early]:
        """Where feedback of a user waits, by interaction."""
        return [entry for entry in self._data_of(user_id) if isinstance(entry, Early)]

    def save(self, entry: Entry) -> None:
        """An entry is new or has changed."""
        super().save(entry)
        for user_id in _users(entry):
            self._of_user[user_id].add(entry.key)

    def forget(self, entry: Entry) -> None:
        """An entry is over."""
        super().forget(entry)
        for user_id in _users(entry):
            self.release(entry, user_id)

    def release(self, entry: Entry, user_id: str) -> None:
        """An entry holds nothing of a user any more."""
        keys = self._of_user.get(user_id, set())
        keys.discard(entry.key)
        if not keys:
            self._of_user.pop(user_id, None)

    def _data_of(self, user_id: str) -> list[Entry | None]:
        return [self.get(key) for key in sorted(self._of_user.get(user_id, ()))]


def _users(entry: Entry) -> Collection[str]:
    """Whose data an entry holds, where it must be found by user."""
    match entry:
        case Case():
            return (entry.user_id,)
        case Early():
            return {held.user_id for held in entry.held}
        case _:
            return ()
