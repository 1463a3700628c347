"""Outcomes gathered by user: the unit that arms are compared by.

Whole users are assigned to arms, and answers to one user have their taste in common. Taken one by one they would look
like far more evidence than they are, so that an A/A test raises false alarms at any level (`bench_gate.py` shows how
often). A user therefore counts once in a test: by the means of their first outcomes in it. What stays true:

- a user is settled when they have `most` outcomes, or `window_us` of event time after their first; later ones do not
  count, except for corrections of what counted;
- a user belongs to the arm where he was first seen; what he says elsewhere does not count;
- the same outcome twice changes nothing, and a higher revision replaces a lower one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.schemas.records import Outcome


class Settled(NamedTuple):
    """A user's numbers in one arm; a user who comes again is corrected."""

    arm: str
    user_id: str
    means: Mapping[str, float]
    """By measure; without a measure that none of their outcomes has."""


@dataclass(slots=True)
class _User:
    arm: str
    outcomes: dict[str, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    """Revision and measures by interaction."""
    settled: bool = False

    def means(self) -> dict[str, float]:
        every = [found for _, found in self.outcomes.values()]
        names = sorted({name for found in every for name in found})
        return {name: _mean([found[name] for found in every if name in found]) for name in names}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


class Users:
    """The users of one test.

    Args:
        most: outcomes of a user that count.
        window_us: how long after their first outcome a user is waited for, microseconds of event time.
    """

    def __init__(self, most: int, window_us: int) -> None:
        self._most, self._window_us = most, window_us
        self._users: dict[str, _User] = {}
        self._due: list[tuple[int, str]] = []

    def observe(self, arm: str, name: str, outcome: Outcome, found: Mapping[str, float], at_us: int) -> list[Settled]:
        """Take an outcome of the user `name` in, at an event time. Returns who is settled or corrected by it."""
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User(arm)
            heapq.heappush(self._due, (at_us + self._window_us, name))
        if user.arm != arm:
            return []
        known = user.outcomes.get(outcome.interaction_id)
        if (known is None and user.settled) or (known is not None and known[0] >= outcome.revision):
            return []
        user.outcomes[outcome.interaction_id] = (outcome.revision, found)
        if user.settled or len(user.outcomes) == self._most:
            return [self._settle(name)]
        return []

    def advance(self, at_us: int) -> list[Settled]:
        """Event time has come to `at_us`: who is settled by it, in order."""
        found = []
        while self._due and self._due[0][0] <= at_us:
            _, name = heapq.heappop(self._due)
            if name in self._users and not self._users[name].settled:
                found.append(self._settle(name))
        return found

    def settle_all(self) -> list[Settled]:
        """Settle everybody who was seen, in the order of their windows' ends."""
        return self.advance(max((due for due, _ in self._due), default=0))

    def forget(self, name: str) -> None:
        """Let go of a user's outcomes. Their settled means stand: a sum cannot be asked for one of its terms."""
        self._users.pop(name, None)

    def _settle(self, name: str) -> Settled:
        user = self._users[name]
        user.settled = True
        return Settled(user.arm, name, user.means())
