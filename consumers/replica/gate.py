"""Which versions the operator or the promotion gate lets a replica serve: a view of the branch's decisions. Pure.

Without a pool every published version within the limit may be served. In a pool only what was named is: `stable` serves
the version that was promoted or rolled back to last, `canary` the version under trial while there is one. A hold is a
limit there too and names nothing, so that no version comes to users by it; a release lifts it and names nothing either.
"""

from __future__ import annotations

from tidemill.consumers.replica.config import Pool
from tidemill.schemas.gate_decisions import LIMITS, NAMES, BranchDecisions
from tidemill.schemas.records import GateDecision, GateVerdict


class PoolGate(BranchDecisions):
    """What the decisions of one branch amount to for one pool. Without a decision and a pool, every version may be
    served."""

    def __init__(self, pool: Pool = Pool.ALL) -> None:
        super().__init__()
        self._pool = pool

    def objection(self, version: int) -> str:
        """Why a replica may not go to `version`; empty when it may."""
        unnamed = self._pool is not Pool.ALL and version not in self.named and version != self._tried()
        return self.forbidden(version) or (f"version {version} was not promoted" if unnamed else "")

    def forbidden(self, version: int) -> str:
        """Why `version` may not be served even where nothing better can be; empty when it may."""
        if version in self.rejected:
            return _said(f"version {version} was rejected", self.rejected[version])
        limit = self.limit
        if limit is None or limit.version is None or version <= limit.version or version == self._tried():
            return ""
        return _said(f"{LIMITS[limit.verdict]} version {limit.version}", limit)

    def notice(self, version: int) -> str:
        """Why a replica that serves `version` must leave it; empty when it may stay.

        A hold limits where a replica goes, not where it is; a rejection and a roll-back do both. So does a promotion in
        a pool, where it names what is served.
        """
        sets_both = (GateVerdict.ROLL_BACK,) if self._pool is Pool.ALL else NAMES
        must_leave = self.limit is not None and self.limit.verdict in sets_both
        return self.forbidden(version) if version in self.rejected or must_leave else ""

    def preferred(self, serving: int | None) -> list[int]:
        """The versions that a replica of a pool should serve, the best first: the trial, then what was named last.

        What is served above a hold is among them, although a replica might not go there.
        """
        tried, stays = self._tried(), serving is not None and not self.notice(serving)
        named = [v for v in reversed(self.named) if not self.objection(v) or (stays and v == serving)]
        return named if tried is None else [tried, *(version for version in named if version != tried)]

    def _tried(self) -> int | None:
        return self.trial.version if self._pool is Pool.CANARY and self.trial is not None else None


def _said(what: str, decision: GateDecision) -> str:
    return f"{what} by {decision.decided_by}: {decision.reason}"
