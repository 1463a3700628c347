"""Which versions the operator or the promotion gate lets a replica serve. Pure.

The newest decision that sets a limit holds (hold, roll back, promote, release); a rejection stands for good and leaves
the limit as it is, so that rejecting a version never lets go of a hold.

Without a pool every published version within the limit may be served. In a pool only what was named is: `stable` serves
the version that was promoted or rolled back to last, `canary` the version under trial while there is one. A hold is a
limit there too and names nothing, so that no version comes to users by it; a release lifts it and names nothing either.
A trial ends with the next decision that sets or lifts a limit, and with the rejection of the version tried.
"""

from __future__ import annotations

from tidemill.consumers.replica.config import Pool
from tidemill.schemas.records import GateDecision, GateVerdict

_LIMITED = {
    GateVerdict.HOLD: "held at",
    GateVerdict.ROLL_BACK: "rolled back to",
    GateVerdict.PROMOTE: "promoted no further than",
}
_NAMED = (GateVerdict.PROMOTE, GateVerdict.ROLL_BACK)
"""Verdicts that name what everyone is served."""


class Gate:
    """What the decisions of one branch amount to for one pool. Without a decision and a pool, every version may be
    served."""

    def __init__(self, pool: Pool = Pool.ALL) -> None:
        self._pool = pool
        self._limit: GateDecision | None = None
        self._trial: GateDecision | None = None
        self._named: list[int] = []
        """In order of the last decision that named each."""
        self._rejected: dict[int, GateDecision] = {}

    def observe(self, decision: GateDecision) -> str:
        """Take a decision in, in log order. Returns why it is not taken; else an empty string."""
        if decision.verdict is GateVerdict.RELEASE:
            self._limit = self._trial = None
        elif decision.version is None:
            return f"a decision to {decision.verdict.value} names no version"
        elif decision.verdict is GateVerdict.REJECT:
            self._reject(decision, decision.version)
        elif decision.verdict is GateVerdict.CANARY:
            self._trial = decision
        elif decision.verdict is not GateVerdict.ADMIT:
            self._limit, self._trial = decision, None
            if decision.verdict in _NAMED:
                self._named = [*(known for known in self._named if known != decision.version), decision.version]
        return ""

    def objection(self, version: int) -> str:
        """Why a replica may not go to `version`; empty when it may."""
        unnamed = self._pool is not Pool.ALL and version not in self._named and version != self._tried()
        return self.forbidden(version) or (f"version {version} was not promoted" if unnamed else "")

    def forbidden(self, version: int) -> str:
        """Why `version` may not be served even where nothing better can be; empty when it may."""
        if version in self._rejected:
            return _said(f"version {version} was rejected", self._rejected[version])
        limit = self._limit
        if limit is None or limit.version is None or version <= limit.version or version == self._tried():
            return ""
        return _said(f"{_LIMITED[limit.verdict]} version {limit.version}", limit)

    def notice(self, version: int) -> str:
        """Why a replica that serves `version` must leave it; empty when it may stay.

        A hold limits where a replica goes, not where it is; a rejection and a roll-back do both. So does a promotion in
        a pool, where it names what is served.
        """
        sets_both = (GateVerdict.ROLL_BACK,) if self._pool is Pool.ALL else _NAMED
        must_leave = self._limit is not None and self._limit.verdict in sets_both
        return self.forbidden(version) if version in self._rejected or must_leave else ""

    def preferred(self, serving: int | None) -> list[int]:
        """The versions that a replica of a pool should serve, the best first: the trial, then what was named last.

        What is served above a hold is among them, although a replica might not go there.
        """
        tried, stays = self._tried(), serving is not None and not self.notice(serving)
        named = [v for v in reversed(self._named) if not self.objection(v) or (stays and v == serving)]
        return named if tried is None else [tried, *(version for version in named if version != tried)]

    def _tried(self) -> int | None:
        return self._trial.version if self._pool is Pool.CANARY and self._trial is not None else None

    def _reject(self, decision: GateDecision, version: int) -> None:
        self._rejected[version] = decision
        if self._trial is not None and self._trial.version == version:
            self._trial = None


def _said(what: str, decision: GateDecision) -> str:
    return f"{what} by {decision.decided_by}: {decision.reason}"
