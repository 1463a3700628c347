"""What is measured of one outcome: its reward, and beside it what a reward cannot be trusted to show.

Rates are counted over every outcome that came, excluded ones as well and whether the product reported the signal or
not: an answer must not leave a guardrail by being left out of the reward.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tidemill.schemas.records import Outcome, OutcomeExclusion, SignalKind

REWARD = "reward"
EDIT_RATE = "edit_rate"
QUESTION_RATE = "question_rate"
TOOL_ERROR_RATE = "tool_error_rate"
TOKENS = "tokens"
LATENCY_MS = "latency_ms"
EXCLUDED = "excluded/"
"""Before the reason of an exclusion."""

_SIGNALS = {
    EDIT_RATE: SignalKind.EDIT_MADE,
    QUESTION_RATE: SignalKind.QUESTION_ASKED,
    TOOL_ERROR_RATE: SignalKind.TOOL_ERROR,
}


class Harm(Enum):
    """Which way a guardrail must not move."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"


class Guardrail(NamedTuple):
    """A measure that is watched beside the reward."""

    name: str
    harm: Harm
    ratio: bool
    """Compared by ratio, as a positive quantity; else by difference, as a rate from 0 to 1."""


GUARDRAILS = (
    Guardrail(EDIT_RATE, Harm.DOWN, ratio=False),
    Guardrail(QUESTION_RATE, Harm.UP, ratio=False),
    Guardrail(TOOL_ERROR_RATE, Harm.UP, ratio=False),
    Guardrail(TOKENS, Harm.EITHER, ratio=True),
    Guardrail(LATENCY_MS, Harm.UP, ratio=True),
    *(Guardrail(EXCLUDED + reason, Harm.EITHER, ratio=False) for reason in OutcomeExclusion),
)
"""What is watched beside the reward."""


def measures(outcome: Outcome, low: float, high: float) -> dict[str, float]:
    """The measures of one outcome, by name; no reward for an excluded one.

    Args:
        low: least reward; a lower one counts as this.
        high: greatest reward.
    """
    found = {name: min(1.0, max(0.0, outcome.observed.get(kind.value, 0.0))) for name, kind in _SIGNALS.items()}
    found |= {EXCLUDED + reason: float(outcome.exclusion == reason) for reason in OutcomeExclusion}
    found |= {TOKENS: float(outcome.sampled_tokens), LATENCY_MS: outcome.latency_ms}
    if outcome.reward is not None:
        found[REWARD] = min(high, max(low, outcome.reward))
    return found
