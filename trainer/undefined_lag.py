"""Groups set aside by a mistake of settings: counted while no batch fills, and told to the process that waits for one.

Their policy lag is undefined, or they were sampled from another distribution than the model's own. A trainer that is
started over a copy of another run's topics may set every group aside and wait for ever. What is told
says how many, why, and what to do; it is told once and then rarely, and only while these groups would have filled the
batch that does not come. Pure; the clock is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

REMINDED_S = 600.0
"""From one warning to the next."""
NAMED = 3
"""Incarnations that a warning names, those of most groups first."""


@dataclass(slots=True)
class SetAside:
    """Groups since the last batch that were set aside, by why."""

    of_others: int = 0
    incarnations: Counter[str] = field(default_factory=Counter)
    """Groups by the foreign incarnation that they were sampled under."""
    ahead: int = 0
    newest: int = -1
    """The newest version that a group was sampled under and that is yet to be made."""
    otherwise: Counter[str] = field(default_factory=Counter)
    """Groups of another distribution than the model's own, by how they were sampled."""

    @property
    def groups(self) -> int:
        """How many."""
        return self.of_others + self.ahead + self.otherwise.total()

    def take_foreign(self, incarnations: Collection[str]) -> None:
        """A group was sampled under versions of other incarnations."""
        self.of_others += 1
        self.incarnations.update(incarnations)

    def take_ahead(self, version: int) -> None:
        """A group was sampled under a version that is yet to be made."""
        self.ahead += 1
        self.newest = max(self.newest, version)

    def take_other_sampling(self, how: str) -> None:
        """A group was sampled from another distribution than the model's own."""
        self.otherwise[how] += 1

    def told(self, own: str | None, version: int) -> str:
        """How many, why, and what to do, for a trainer of incarnation `own` at `version`."""
        reasons = []
        if self.of_others:
            named = ", ".join(name for name, _ in self.incarnations.most_common(NAMED))
            reasons.append(
                f"{self.of_others} sampled under versions of another incarnation ({named}; this trainer's is "
                f"{own or 'unnamed'}): to train on a copy of another run's topics, begin a fresh chain with "
                "trainer.publish.incarnation set to theirs; else let the replicas follow this trainer's versions"
            )
        if self.ahead:
            reasons.append(
                f"{self.ahead} sampled under versions up to {self.newest}, and this trainer is at {version}: to make "
                "a run again from its groups, set trainer.in_order; else let the replicas follow this trainer's "
                "versions"
            )
        causes = [f"their policy lag is undefined: {'; and '.join(reasons)}"] if reasons else []
        if self.otherwise:
            how = " or ".join(name for name, _ in self.otherwise.most_common(NAMED))
            causes.append(
                f"{self.otherwise.total()} were sampled with {how} and cannot be trained exactly, as replicas report "
                "the logprobs of the model's own distribution: set rollout.temperature to 1, or "
                "trainer.accept_other_sampling to train them all the same"
            )
        return f"{self.groups} groups were set aside, since {'; and '.join(causes)}"


@dataclass(slots=True)
class Reminder:
    """When to warn of what lasts: at once, then no sooner than `every_s` after the time before."""

    every_s: float = REMINDED_S
    _not_before: float | None = None

    def due(self, now: float) -> bool:
        """Whether to warn at time `now`, in seconds of a clock that only rises."""
        if self._not_before is not None and now < self._not_before:
            return False
        self._not_before = now + self.every_s
        return True
