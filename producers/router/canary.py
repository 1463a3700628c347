"""Who is in the canary arm: the trial of one branch, as its decisions tell it, and the lot that is drawn for a user.

While a version is tried, the newest CANARY decision's share of the users is in the canary arm, always the same ones.
Another candidate draws other users, so that nobody is the first to get every candidate.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from tidemill.schemas.gate_decisions import BranchDecisions, canary_share
from tidemill.schemas.records import CANARY_SHARE, Arm, GateDecision, GateVerdict


@dataclass(frozen=True, slots=True)
class Lot:
    """The arm that a user is in, and the probability with which they are."""

    arm: Arm
    propensity: float


class CanaryShare:
    """The share of the version under trial on one branch of one run; 0 while there is none."""

    def __init__(self, run_id: str, branch: str) -> None:
        self._of = (run_id, branch)
        self._branch = BranchDecisions()

    @property
    def share(self) -> float:
        """Part of the users, 0 to 1; 0 while nothing is tried."""
        return 0.0 if self._branch.trial is None else self._branch.trial.share

    @property
    def version(self) -> int | None:
        """The version that is tried; None while none is."""
        return None if self._branch.trial is None else self._branch.trial.version

    def observe(self, decision: GateDecision) -> str:
        """Take a decision in, in log order. Returns why it is not taken; else an empty string."""
        if (decision.run_id, decision.branch) != self._of:
            return ""
        objection = self._branch.observe(decision)
        if decision.verdict is GateVerdict.CANARY and canary_share(decision) is None:
            said = decision.numbers.get(CANARY_SHARE, math.nan)
            return (
                f"a canary needs a version and numbers[{CANARY_SHARE!r}] from 0 to 1, not {decision.version} and "
                f"{said:g}"
            )
        return objection

    def lot(self, unit: str, salt: str) -> Lot:
        """The arm of a user.

        Args:
            unit: what is always in the same arm: a pseudonym; without one, a conversation or a single request.
            salt: the experiment's.
        """
        digest = hashlib.sha256(f"{salt}\x00{self.version}\x00{unit}".encode()).digest()
        drawn = int.from_bytes(digest[:7]) / 2**56  # uniform in [0, 1)
        return Lot(Arm.CANARY, self.share) if drawn < self.share else Lot(Arm.STABLE, 1.0 - self.share)
