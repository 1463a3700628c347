"""How satisfied the held-out users are, by weight version: known to the users alone.

A conversation that saw two versions counts for neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tidemill.compose.demo.simulated_users.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Satisfaction:
    """What held-out users thought of one version's answers."""

    version: int
    satisfied: int
    right: int
    """Answers with the right balance, closed as the user likes it or not."""
    answers: int

    @property
    def rate(self) -> float:
        """Share of the answers that satisfied; 0 where there is none."""
        return self.satisfied / self.answers if self.answers else 0.0


class SatisfactionTally:
    """Counts held-out answers."""

    def __init__(self) -> None:
        self._answers: Counter[int] = Counter()
        self._satisfied: Counter[int] = Counter()
        self._right: Counter[int] = Counter()

    def count(self, answer: Conversation, *, satisfied: bool) -> None:
        """Take one held-out user's answer and their opinion."""
        versions = {turn.version for turn in answer.turns}
        if len(versions) != 1:
            return
        (version,) = versions
        self._answers[version] += 1
        self._satisfied[version] += satisfied
        self._right[version] += answer.right

    def by_version(self) -> list[Satisfaction]:
        """The counts so far, oldest version first."""
        return [
            Satisfaction(version, self._satisfied[version], self._right[version], count)
            for version, count in sorted(self._answers.items())
        ]
