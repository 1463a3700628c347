"""How the interactions that are trained differ from those that were served.

Short answers and angry users come back first, and some users consent more than others: a batch is a selection. A tally
sums one side; its figures are means and shares, so that both sides can be put beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.schemas.records import Outcome


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared of one interaction."""

    tokens: int
    latency_ms: float
    reward: float | None
    arm: str
    kinds: tuple[str, ...]
    """The kinds of signals that were seen."""

    @classmethod
    def of(cls, outcome: Outcome) -> Figures:
        """Those of an outcome."""
        kinds = tuple(sorted(outcome.observed))
        return cls(outcome.sampled_tokens, outcome.latency_ms, outcome.reward, outcome.arm, kinds)


@dataclass(slots=True)
class Tally:
    """Sums over interactions."""

    interactions: int = 0
    rewarded: int = 0
    tokens: int = 0
    latency_ms: float = 0.0
    reward: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    arms: dict[str, int] = field(default_factory=dict)

    def add(self, figures: Figures) -> None:
        """Count one interaction."""
        self.interactions += 1
        self.tokens += figures.tokens
        self.latency_ms += figures.latency_ms
        if figures.reward is not None:
            self.rewarded += 1
            self.reward += figures.reward
        for kind in figures.kinds:
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.arms[figures.arm] = self.arms.get(figures.arm, 0) + 1

    def numbers(self, users: int) -> dict[str, float]:
        """Number of interactions and distinct users; means; shares by signal and arm. Nothing is 0 for want of data."""
        found: dict[str, float] = {"interactions": self.interactions, "users": users}
        if self.interactions:
            found["mean_tokens"] = self.tokens / self.interactions
            found["mean_latency_ms"] = self.latency_ms / self.interactions
            found["rewarded_share"] = self.rewarded / self.interactions
        if self.rewarded:
            found["mean_reward"] = self.reward / self.rewarded
        found |= {f"signal_share/{kind}": n / self.interactions for kind, n in sorted(self.kinds.items())}
        found |= {f"arm_share/{arm}": n / self.interactions for arm, n in sorted(self.arms.items())}
        return found


def compared(served: Mapping[str, float], trained: Mapping[str, float]) -> dict[str, float]:
    """Both sides' numbers, as `served/...` and `trained/...`."""
    return {
        **{f"served/{name}": value for name, value in served.items()},
        **{f"trained/{name}": value for name, value in trained.items()},
    }
