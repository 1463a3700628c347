"""The reaction of a replica to each record of the weight log: a pure state machine, without a clock, a network or
weights.

It holds the version graph of a branch, what the gate lets it serve, and what it serves. The shell hands it the records,
asks it where to go (`plan`), does that and reports: `proved`, `delta_refused`, `anchor_refused`. What stays true:

- it goes to the newest version that the gate permits and that can be reached, over the path with the fewest bytes;
- it goes back only where a roll-back or a rejection says so;
- the same record twice changes nothing; a version published twice with different contents is refused, not followed;
- every version that it sees and does not go to is refused once, with the reason;
- while nothing can be reached, the last proved version goes on being served.

In a pool (`PoolGate`) the gate names what is served, and these replace the first, second and fourth:

- it goes to the best version that the gate names and that can be reached, forwards or back; while that one has not
  been seen in the log, it stays;
- where none of them can be reached it serves the oldest version that can be, and no other unnamed one;
- only named versions that cannot be reached are refused: the others are none of its business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from tidemill.consumers.replica.config import Pool
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionGraph
from tidemill.schemas.gate_decisions import LIMITS, NAMES, BranchDecisions
from tidemill.schemas.records import GateDecision, GateVerdict, Manifest, SkipDelta


@dataclass(frozen=True, slots=True)
class UpdateAction:
    """Go to `target` over `path`."""

    target: Manifest
    path: UpdatePath
    reason: str
    """Why, where it is not the next version in the usual way; else empty."""


Said = Manifest | SkipDelta | GateDecision
"""The records that a replica follows."""


class PoolGate(BranchDecisions):
    """Which versions the operator or the promotion gate lets a replica of a pool serve. Without a decision and a pool,
    every published version may be served.

    In a pool only what was named is: `stable` serves the version that was promoted or rolled back to last, `canary` the
    version under trial while there is one. A hold is a limit there too and names nothing, so that no version comes to
    users by it; a release lifts it and names nothing either.
    """

    def __init__(self, pool: Pool = Pool.ALL) -> None:
        super().__init__()
        self._pool = pool

    def objection(self, version: int) -> str:
        """Why a replica may not go to `version`; empty when it may."""
        unnamed = self._pool is not Pool.ALL and version not in self.named and version != self._tried
        return self.forbidden(version) or (f"version {version} was not promoted" if unnamed else "")

    def forbidden(self, version: int) -> str:
        """Why `version` may not be served even where nothing better can be; empty when it may."""
        limit = self.limit
        if (rejection := self.rejected.get(version)) is not None:
            return f"version {version} was rejected by {rejection.decided_by}: {rejection.reason}"
        if limit is None or limit.version is None or version <= limit.version or version == self._tried:
            return ""
        return f"{LIMITS[limit.verdict]} version {limit.version} by {limit.decided_by}: {limit.reason}"

    def notice(self, version: int | None) -> str:
        """Why a replica that serves `version` must leave it; empty when it may stay.

        A hold limits where a replica goes, not where it is; a rejection and a roll-back do both. So does a promotion in
        a pool, where it names what is served.
        """
        sets_both = (GateVerdict.ROLL_BACK,) if self._pool is Pool.ALL else NAMES
        must_leave = self.limit is not None and self.limit.verdict in sets_both
        return self.forbidden(version) if version is not None and (version in self.rejected or must_leave) else ""

    def preferred(self, serving: int | None) -> list[int]:
        """The versions that a replica of a pool should serve, the best first: the trial, then what was named last.

        What is served above a hold is among them, although a replica might not go there.
        """
        tried, stays = self._tried, not self.notice(serving)
        named = [v for v in reversed(self.named) if not self.objection(v) or (stays and v == serving)]
        return named if tried is None else [tried, *(version for version in named if version != tried)]

    @property
    def _tried(self) -> int | None:
        return self.trial.version if self._pool is Pool.CANARY and self.trial is not None else None


class ReplicaState:
    """The versions of one branch of one run, its gate for a pool, and the version served."""

    def __init__(self, run_id: str, branch: str, pool: Pool = Pool.ALL) -> None:
        self._run_id, self._branch, self._pool = run_id, branch, pool
        self._graph = VersionGraph(run_id, branch)
        self._gate = PoolGate(pool)
        self._answered: set[int] = set()
        self._notice = ""
        self.serving: int | None = None
        """The version served; None before the first."""

    @property
    def head(self) -> int:
        """Newest version seen in the log; -1 before the first."""
        return -1 if self._graph.newest_version is None else self._graph.newest_version

    def incarnation_of(self, version: int) -> str:
        """Which life of the run's version numbers a version is of; empty for one that is not known, or does not say."""
        manifest = self._graph.manifests.get(version)
        return "" if manifest is None else manifest.incarnation

    def observe(self, record: Said) -> str:
        """Take a record in, in log order; one of another run or branch is let pass.

        Returns why it is not taken, a second content for a known version above all; else an empty string.
        """
        if (record.run_id, record.branch) != (self._run_id, self._branch):
            return ""
        match record:
            case Manifest() | SkipDelta():
                return self._graph.observe(record)
            case GateDecision():
                return self._gate.observe(record)

    def plan(self) -> UpdateAction | None:
        """Where to go now; None to stay. The same answer until something is observed or reported."""
        serving, notice = self.serving, self._gate.notice(self.serving)
        for version in self._wanted(notice):
            if version == serving:
                return None
            path = self._graph.path(version, serving)
            if path is None:
                continue
            reason = notice
            if self._pool is not Pool.ALL:
                reason = self._gate.objection(serving) if serving is not None and version < serving else ""
            if not reason and serving is None:
                reason = f"started from {path}"
            elif not reason and path.anchor is not None:
                reason = f"re-synced from {path}"
            elif not reason and (len(path.deltas) != 1 or path.deltas[0].skips):
                reason = f"caught up from version {serving} over {path}"
            return UpdateAction(self._graph.manifests[version], path, reason)
        return None

    def _wanted(self, notice: str) -> Iterator[int]:
        """The versions to go to, the best first; the served one where it should stay."""
        serving = self.serving
        if self._pool is Pool.ALL:
            for version in sorted(self._graph.manifests, reverse=True):
                # To an older version only on notice.
                if not notice and serving is not None and version <= serving:
                    return
                if version != serving and not self._gate.objection(version):
                    yield version
            return
        for version in self._gate.preferred(serving):
            if version in self._graph.manifests:
                yield version
            elif serving is not None and version > self.head and not notice:
                # The decision came before its version: the two topics are read apart.
                yield serving
        oldest = next((v for v in sorted(self._graph.manifests) if self._graph.path(v, serving) is not None), None)
        if oldest is not None and not self._gate.forbidden(oldest):
            yield oldest

    def refusals(self) -> list[tuple[Manifest, str]]:
        """Versions that are not gone to, with the reasons, for the log while `plan` says to stay, each once.

        The versions that would be gone to if they could or might be; and the served one, where it should be left and
        nothing leads away from it.
        """
        serving, notice, manifests = self.serving, self._gate.notice(self.serving), self._graph.manifests
        told = []
        if serving is not None and notice and notice != self._notice:
            told.append((manifests[serving], f"{notice}; no usable anchor leads away from it"))
        self._notice = notice
        if self._pool is Pool.ALL:
            passed_over = {version for version in manifests if serving is None or version > serving}
        else:
            passed_over = manifests.keys() & takewhile(lambda one: one != serving, self._gate.preferred(serving))
        served = "nothing" if serving is None else f"version {serving}"
        for version in sorted(passed_over - self._answered):
            unreached = (
                f"version {version} has parent {manifests[version].parent}, {served} is served, and no usable delta or "
                "anchor leads to it"
            )
            told.append((manifests[version], self._gate.objection(version) or unreached))
        self._answered |= passed_over
        return told

    def proved(self, version: int) -> None:
        """The live tensors were proved to be `version`, which is served from now on."""
        self.serving = version
        self._answered.add(version)
        self._graph.forget_tensors(version)

    def delta_refused(self, delta: Delta) -> None:
        """A delta is wrong, so that trying it again cannot help."""
        self._graph.refuse_delta(delta.base, delta.version)
        self._answered.add(delta.version)

    def anchor_refused(self, version: int) -> None:
        """An anchor cannot be read or is not what its manifest says."""
        self._graph.refuse_anchor(version)
