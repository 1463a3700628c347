"""Which versions the operator or the promotion gate lets a replica serve. Pure.

The newest decision that sets a limit holds (hold, roll back, promote, release); a rejection stands for good and leaves
the limit as it is, so that rejecting a version never lets go of a hold.
"""

from __future__ import annotations

from tidemill.schemas.records import GateDecision, GateVerdict

_LIMITED = {
    GateVerdict.HOLD: "held at",
    GateVerdict.ROLL_BACK: "rolled back to",
    GateVerdict.PROMOTE: "promoted no further than",
}


class Gate:
    """What the decisions of one branch amount to. Without a decision every version may be served."""

    def __init__(self) -> None:
        self._limit: GateDecision | None = None
        self._rejected: dict[int, GateDecision] = {}

    def observe(self, decision: GateDecision) -> str:
        """Take a decision in, in log order. Returns why it is not taken; else an empty string."""
        if decision.verdict is GateVerdict.RELEASE:
            self._limit = None
        elif decision.version is None:
            return f"a decision to {decision.verdict.value} names no version"
        elif decision.verdict is GateVerdict.REJECT:
            self._rejected[decision.version] = decision
        else:
            self._limit = decision
        return ""

    def objection(self, version: int) -> str:
        """Why a replica may not go to `version`; empty when it may."""
        if version in self._rejected:
            return _said(f"version {version} was rejected", self._rejected[version])
        limit = self._limit
        if limit is None or limit.version is None or version <= limit.version:
            return ""
        return _said(f"{_LIMITED[limit.verdict]} version {limit.version}", limit)

    def notice(self, version: int) -> str:
        """Why a replica that serves `version` must leave it; empty when it may stay.

        A hold or a promotion limits where a replica goes, not where it is; a rejection and a roll-back do both.
        """
        rolled_back = self._limit is not None and self._limit.verdict is GateVerdict.ROLL_BACK
        return self.objection(version) if version in self._rejected or rolled_back else ""


def _said(what: str, decision: GateDecision) -> str:
    return f"{what} by {decision.decided_by}: {decision.reason}"
