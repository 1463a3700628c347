"""How satisfied the held-out users are, by weight version and pool of replicas: known to the users alone.

A conversation that saw two versions counts for neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tidemill.producers.users.conversation import Answer


@dataclass(frozen=True, slots=True)
class Satisfaction:
    """What held-out users thought of the answers of one version in one pool."""

    version: int
    arm: str
    satisfied: int
    right: int
    """Answers with the right balance, closed as the user likes it or not."""
    answers: int

    @property
    def rate(self) -> float:
        """Share of the answers that satisfied; 0 where there is none."""
        return self.satisfied / self.answers if self.answers else 0.0


class Tally:
    """Counts held-out answers."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[int, str]] = Counter()
        self._satisfied: Counter[tuple[int, str]] = Counter()
        self._right: Counter[tuple[int, str]] = Counter()

    def count(self, answer: Answer, *, satisfied: bool) -> None:
        """Take one held-out user's answer and what he thought of it."""
        served = {(turn.served.version, turn.served.arm) for turn in answer.turns}
        if len(served) != 1:
            return
        (key,) = served
        self._answers[key] += 1
        self._satisfied[key] += satisfied
        self._right[key] += answer.right

    def by_version(self) -> list[Satisfaction]:
        """The counts so far, by version and then pool."""
        return [
            Satisfaction(*key, self._satisfied[key], self._right[key], count)
            for key, count in sorted(self._answers.items())
        ]
