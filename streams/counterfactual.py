"""What if: changes to the records that a replayed stage reads. Pure; the log is not touched.

Each is a `Change` of `tidemill.streams.offline`: it gives the same record where it has nothing to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Rollout
from tidemill.streams.offline import Change


@dataclass(frozen=True, slots=True)
class DeadlineShift:
    """Every rollout's deadline is later by `by_us` microseconds; earlier where it is negative."""

    by_us: int

    def __call__(self, located: ConsumedRecord) -> ConsumedRecord:
        """The record with its deadline moved."""
        record = located.record
        if not isinstance(record, Rollout):
            return located
        return replace(located, record=replace(record, deadline_at=record.deadline_at + self.by_us))


@dataclass(frozen=True, slots=True)
class Reweighted:
    """A rollout's reward is summed again from its recorded components, some of which weigh otherwise.

    A component that `weights` does not name keeps the weight of the record. A rollout without a reward keeps none.
    """

    weights: Mapping[str, float]
    """By name of a component."""
    version: str = ""
    """Only rollouts whose reward has this version are summed again; empty: all."""
    applied: Counter[str] = field(default_factory=Counter)
    """How many rollouts had each component that was given a weight."""
    seen: dict[str, set[str]] = field(default_factory=dict)
    """The components that there are, by the version of the reward."""

    def __call__(self, located: ConsumedRecord) -> ConsumedRecord:
        """The record with its reward summed again."""
        record = located.record
        if not isinstance(record, Rollout) or record.reward is None:
            return located
        self.seen.setdefault(record.reward_version, set()).update(part.name for part in record.rewards)
        if self.version not in ("", record.reward_version):
            return located
        self.applied.update(part.name for part in record.rewards if part.name in self.weights)
        parts = [replace(part, weight=self.weights.get(part.name, part.weight)) for part in record.rewards]
        # Summed as the scorer did: in the order of the components, from the left.
        reward = sum(part.value * part.weight for part in parts) if parts else record.reward
        return replace(located, record=replace(record, rewards=parts, reward=reward))

    def check(self) -> None:
        """Raises ValueError, after a replay, for a version or a component that no rollout had."""
        if self.version and self.version not in self.seen:
            raise ValueError(f"no rollout has a reward of version {self.version!r}; there is {sorted(self.seen)}")
        unknown = sorted(set(self.weights) - set(self.applied))
        if unknown:
            there = sorted(set[str]().union(*self.seen.values()))
            raise ValueError(f"no rollout has a reward component {', '.join(unknown)}; there is {', '.join(there)}")


def chained(changes: Sequence[Change]) -> Change:
    """One change after the other."""

    def change(located: ConsumedRecord) -> ConsumedRecord:
        for one in changes:
            located = one(located)
        return located

    return change
