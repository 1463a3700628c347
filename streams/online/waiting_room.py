"""Members waiting for a batch: those that it would have if it closed now, with no user above their share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tidemill.streams.online.batch_state import Waiting


class WaitingRoom:
    """Rewarded interactions by version, in the order of their outcomes; corrections apart, since any batch has them."""

    def __init__(self, waiting: Iterable[Waiting] = ()) -> None:
        self._of_version: dict[int, dict[str, Waiting]] = defaultdict(dict)
        self._corrections: dict[str, Waiting] = {}
        for one in sorted(waiting, key=lambda w: w.order):
            self.add(one)

    def __len__(self) -> int:
        return len(self._corrections) + sum(map(len, self._of_version.values()))

    def add(self, one: Waiting) -> None:
        """One more, after all that came before."""
        queue = self._corrections if one.correction else self._of_version[one.version_max]
        queue[one.interaction_id] = one

    def remove(self, one: Waiting) -> None:
        """It waits no longer."""
        if one.correction:
            del self._corrections[one.interaction_id]
            return
        queue = self._of_version[one.version_max]
        del queue[one.interaction_id]
        if not queue:
            del self._of_version[one.version_max]

    def of_version(self, version: int) -> list[Waiting]:
        """Who waits for the batch of a version."""
        return list(self._of_version.get(version, {}).values())

    def corrections(self, most: int) -> list[Waiting]:
        """The first corrections."""
        return list(self._corrections.values())[:most]

    def of_user(self, user_id: str) -> list[Waiting]:
        """All that a user is behind."""
        everyone = [*self._corrections.values(), *(one for q in self._of_version.values() for one in q.values())]
        return [one for one in everyone if one.user_id == user_id]


def within_share(waiting: Sequence[Waiting], share: float) -> list[Waiting]:
    """The first of each user, as many as keep them at `share` of the result; one of each at the least."""
    members = Counter(one.user_id for one in waiting)
    most = max(members.values(), default=0)
    # Fewer of one user make the whole smaller, and with it every share: the largest number that fits is looked for.
    while most > 1 and most > share * sum(min(n, most) for n in members.values()):
        most -= 1
    taken: Counter[str] = Counter()
    kept = []
    for one in waiting:
        if taken[one.user_id] < most:
            taken[one.user_id] += 1
            kept.append(one)
    return kept
