"""The reaction of a replica to each record of the weight log: a pure state machine, without a clock, a network or
weights.

It contains the version graph of a branch, the gate's decisions and the served version. The caller passes records, asks
for the next update (`plan`), does it and reports `proved` or `refused`. Invariants:

- the target is the newest reachable version that the gate permits, over the path with the fewest bytes;
- the target is an older version only after a roll-back or a rejection;
- a repeated record changes nothing; a version published twice with different contents is refused, not followed;
- every version that is seen but not chosen is refused once, with the reason;
- while no version can be reached, the last proved version is still served;
- a version with other `serving_activations` than the served one is refused: the engine would have to be started again.

In a pool (`PoolGate`) the gate names the served version; these replace the first, second and fourth invariant:

- the target is the best reachable version that the gate names, newer or older; while it has not been seen in the log,
  the replica keeps its version;
- if no named version can be reached, the target is the oldest reachable version, and no other unnamed version;
- only named versions that cannot be reached are refused: the replica ignores all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from tidemill.consumers.replica.config import Pool
from tidemill.kernels.weights.graph import Delta, PathStep, UpdatePath, VersionGraph
from tidemill.schemas.gate_decisions import LIMITS, NAMES, BranchDecisions
from tidemill.schemas.records import GateDecision, GateVerdict, Manifest, SkipDelta


@dataclass(frozen=True, slots=True)
class UpdateAction:
    target: Manifest
    path: UpdatePath
    reason: str
    """Reason for an update other than to the next version by its delta; otherwise empty."""


Said = Manifest | SkipDelta | GateDecision
"""The records that a replica follows."""


class PoolGate(BranchDecisions):
    """The versions that the operator or the gate permits a replica of a pool to serve. Without a decision and a pool,
    every published version may be served.

    In a pool only named versions are served: `stable` serves the version that was promoted or rolled back to last,
    `canary` the version on trial if there is one. A hold is a limit in a pool too, but names no version, so that it
    brings no version to users; a release ends it and names no version either.
    """

    def __init__(self, pool: Pool = Pool.ALL) -> None:
        super().__init__()
        self._pool = pool

    def objection(self, version: int) -> str:
        """Return why a replica may not change to `version`; empty if it may."""
        unnamed = self._pool is not Pool.ALL and version not in self.named and version != self._tried
        return self.forbidden(version) or (f"version {version} was not promoted" if unnamed else "")

    def forbidden(self, version: int) -> str:
        """Return why `version` may not be served even if no better version can be; empty if it may."""
        limit = self.limit
        if (rejection := self.rejected.get(version)) is not None:
            return f"version {version} was rejected by {rejection.decided_by}: {rejection.reason}"
        if limit is None or limit.version is None or version <= limit.version or version == self._tried:
            return ""
        return f"{LIMITS[limit.verdict]} version {limit.version} by {limit.decided_by}: {limit.reason}"

    def notice(self, version: int | None) -> str:
        """Return why a replica must stop serving `version`; empty if it may keep it.

        A hold limits new targets, not the served version; a rejection and a roll-back limit both. In a pool, a
        promotion also does, because it names the served version.
        """
        sets_both = (GateVerdict.ROLL_BACK,) if self._pool is Pool.ALL else NAMES
        must_leave = self.limit is not None and self.limit.verdict in sets_both
        return self.forbidden(version) if version is not None and (version in self.rejected or must_leave) else ""

    def preferred(self, serving: int | None) -> list[int]:
        """Return the versions that a replica of a pool should serve, best first: the trial, then the last named ones.

        A served version above a hold is included, although a replica might not change to it.
        """
        tried, stays = self._tried, not self.notice(serving)
        named = [v for v in reversed(self.named) if not self.objection(v) or (stays and v == serving)]
        return named if tried is None else [tried, *(version for version in named if version != tried)]

    @property
    def _tried(self) -> int | None:
        return self.trial.version if self._pool is Pool.CANARY and self.trial is not None else None


class ReplicaState:
    """The versions of one branch of one run, the gate's decisions for a pool, and the served version."""

    def __init__(self, run_id: str, branch: str, pool: Pool = Pool.ALL) -> None:
        self._run_id, self._branch, self._pool = run_id, branch, pool
        self._graph = VersionGraph(run_id, branch)
        self._gate = PoolGate(pool)
        self._answered: set[int] = set()
        self._notice = ""
        self.serving: int | None = None
        """The served version; None before the first."""

    @property
    def head(self) -> int:
        """Newest version seen in the log; -1 before the first."""
        return -1 if self._graph.newest_version is None else self._graph.newest_version

    def incarnation_of(self, version: int) -> str:
        """Return a version's incarnation; empty if the version is unknown or has none."""
        manifest = self._graph.manifests.get(version)
        return "" if manifest is None else manifest.incarnation

    def observe(self, record: Said) -> str:
        """Add a record, in log order; ignore records of another run or branch.

        Returns why it is rejected (usually other contents for a known version), or an empty string.
        """
        if (record.run_id, record.branch) != (self._run_id, self._branch):
            return ""
        match record:
            case Manifest() | SkipDelta():
                return self._graph.observe(record)
            case GateDecision():
                return self._gate.observe(record)

    def plan(self) -> UpdateAction | None:
        """Return the next update; None for no change. The same answer until something is observed or reported."""
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
        """Yield the possible targets, best first; the served version if it should be kept."""
        serving = self.serving
        if self._pool is Pool.ALL:
            for version in sorted(self._graph.manifests, reverse=True):
                # An older version only if the served one must be left.
                if not notice and serving is not None and version <= serving:
                    return
                if version != serving and not self._objection(version):
                    yield version
            return
        for version in self._gate.preferred(serving):
            if version in self._graph.manifests and not self._other_inputs(version):
                yield version
            elif serving is not None and version > self.head and not notice:
                # The decision was read before its version: the two topics are read independently.
                yield serving
        served_alike = (v for v in sorted(self._graph.manifests) if not self._other_inputs(v))
        oldest = next((v for v in served_alike if self._graph.path(v, serving) is not None), None)
        if oldest is not None and not self._gate.forbidden(oldest):
            yield oldest

    def _objection(self, version: int) -> str:
        """Return why the replica may not change to `version`; empty if it may."""
        return self._other_inputs(version) or self._gate.objection(version)

    def _other_inputs(self, version: int) -> str:
        """Return why the engine cannot compute `version`: the rounding of inputs is fixed when it starts."""
        if self.serving is None:
            return ""
        wanted, own = (self._graph.manifests[v].serving_activations or "none" for v in (version, self.serving))
        if wanted == own:
            return ""
        return (
            f"version {version} has serving_activations {wanted}, and this engine computes version {self.serving} with "
            f"{own}: start the replica again"
        )

    def refusals(self) -> list[tuple[Manifest, str]]:
        """Return refused versions with the reasons, each once, for the log; call it while `plan` returns None.

        These are versions that would be targets if they were reachable and permitted; and the served version, if it
        should be left and no path leads away from it.
        """
        serving, notice, manifests = self.serving, self._gate.notice(self.serving), self._graph.manifests
        notices = []
        if serving is not None and notice and notice != self._notice:
            notices.append((manifests[serving], f"{notice}; no usable anchor leads away from it"))
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
            notices.append((manifests[version], self._objection(version) or unreached))
        self._answered |= passed_over
        return notices

    def proved(self, version: int) -> None:
        """Record that the live tensors were proved to be `version`, which is now served."""
        self.serving = version
        self._answered.add(version)
        self._graph.forget_tensors(version)

    def refused(self, step: PathStep) -> None:
        """Exclude a step that cannot be used, for which a retry cannot help.

        The caller acknowledges the version of a refused delta, except before a version is served: no acknowledgement
        can be written then, so `refusals` returns it later.
        """
        self._graph.refuse(step)
        if isinstance(step, Delta) and self.serving is not None:
            self._answered.add(step.version)
