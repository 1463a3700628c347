"""Who is in the canary arm: a pure reading of `gate.decisions` for one branch, and the lot that is drawn for a user.

What holds: while a version is tried, the newest CANARY decision's share of the users is in the canary arm, always the
same ones; any later decision about what is served ends it, the rejection of another version excepted. Another
candidate draws other users, so that nobody is the first to get every candidate.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum

from tidemill.schemas.records import CANARY_SHARE, GateDecision, GateVerdict


class Arm(StrEnum):
    """An arm of the experiment, which is a pool of replicas; and who is in none."""

    STABLE = "stable"
    CANARY = "canary"
    FALLBACK = "fallback"
    """Drawn for the canary arm and answered by the stable pool, since no canary replica answered: no answer of either
    arm. Counted as the stable arm's, it would take its user from the canary arm for the whole of a comparison."""


@dataclass(frozen=True, slots=True)
class Lot:
    """The arm that a user is in, and the probability with which he is."""

    arm: Arm
    propensity: float


class CanaryShare:
    """The share of the version under trial on one branch of one run; 0 while there is none."""

    def __init__(self, run_id: str, branch: str) -> None:
        self._run_id, self._branch = run_id, branch
        self.share = 0.0
        self.version: int | None = None

    def observe(self, decision: GateDecision) -> str:
        """Take a decision in, in log order. Returns why it is not taken; else an empty string."""
        if (decision.run_id, decision.branch) != (self._run_id, self._branch) or decision.verdict is GateVerdict.ADMIT:
            return ""
        if decision.verdict is GateVerdict.CANARY:
            return self._begin(decision)
        if decision.verdict is not GateVerdict.REJECT or decision.version == self.version:
            self.share, self.version = 0.0, None
        return ""

    def lot(self, unit: str, salt: str) -> Lot:
        """The arm of a user.

        Args:
            unit: what is always in the same arm: a pseudonym; without one, a conversation or a single request.
            salt: the experiment's.
        """
        canary = _fraction(f"{salt}\x00{self.version}\x00{unit}") < self.share
        return Lot(Arm.CANARY, self.share) if canary else Lot(Arm.STABLE, 1.0 - self.share)

    def _begin(self, decision: GateDecision) -> str:
        share = decision.numbers.get(CANARY_SHARE, math.nan)
        if decision.version is None or not 0.0 <= share <= 1.0:
            self.share, self.version = 0.0, None
            return (
                f"a canary needs a version and numbers[{CANARY_SHARE!r}] from 0 to 1, not {decision.version} and "
                f"{share:g}"
            )
        self.share, self.version = share, decision.version
        return ""


def _fraction(text: str) -> float:
    """Uniform in [0, 1) over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56
