"""What a replica does about each record of the weight log: a pure state machine, without a clock, a network or weights.

It holds the version graph of a branch, what the gate lets it serve, and what it serves. The shell hands it the records,
asks it where to go (`plan`), does that and reports: `proved`, `delta_refused`, `anchor_refused`. What stays true:

- it goes to the newest version that the gate permits and that can be reached, over the path with the fewest bytes;
- it goes back only where a roll-back or a rejection says so;
- the same record twice changes nothing; a version published twice with different contents is refused, not followed;
- every version that it sees and does not go to is refused once, with the reason;
- while nothing can be reached, the last proved version goes on being served.

In a pool (`gate.PoolGate`) the gate names what is served, and these replace the first, second and fourth:

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
from tidemill.consumers.replica.gate import PoolGate
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionGraph
from tidemill.schemas.records import GateDecision, Manifest, SkipDelta


@dataclass(frozen=True, slots=True)
class Move:
    """Go to `target` over `path`."""

    target: Manifest
    path: UpdatePath
    reason: str
    """Why, where it is not the next version in the usual way; else empty."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not go to this version, and say why."""

    manifest: Manifest
    reason: str


Said = Manifest | SkipDelta | GateDecision
"""The records that a replica follows."""


class ReplicaState:
    """The versions of one branch of one run, its gate for a pool, and the version served."""

    def __init__(self, run_id: str, branch: str, pool: Pool = Pool.ALL) -> None:
        self._run_id, self._branch, self._pool = run_id, branch, pool
        self._graph = VersionGraph(run_id, branch)
        self._gate = PoolGate(pool)
        self._answered: set[int] = set()
        self._notice = ""
        self._serving: int | None = None

    @property
    def serving(self) -> int | None:
        """The version served; None before the first."""
        return self._serving

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

    def plan(self) -> Move | None:
        """Where to go now; None to stay. The same answer until something is observed or reported."""
        if self._pool is not Pool.ALL:
            return self._plan_in_pool()
        serving = self._serving
        notice = "" if serving is None else self._gate.notice(serving)
        for version in sorted(self._graph.manifests, reverse=True):
            # To an older version only on notice.
            stays = serving is not None and (version == serving if notice else version <= serving)
            path = None if stays or self._gate.objection(version) else self._graph.path(version, serving)
            if path is not None:
                return Move(self._graph.manifests[version], path, notice or _reason(path, serving))
        return None

    def refusals(self) -> list[Refuse]:
        """The messages for the log while `plan` says to stay, each once.

        The versions newer than the served one that cannot or may not be gone to; and the served one, where it should
        be left and nothing leads away from it.
        """
        found = self._passed_over()
        refused = [self._graph.manifests[version] for version in found if version not in self._answered]
        self._answered.update(found)
        served = "nothing" if self._serving is None else f"version {self._serving}"
        told = self._stuck()
        for manifest in refused:
            unreached = (
                f"version {manifest.version} has parent {manifest.parent}, {served} is served, and no usable delta or "
                "anchor leads to it"
            )
            told.append(Refuse(manifest, self._gate.objection(manifest.version) or unreached))
        return told

    def proved(self, version: int) -> None:
        """The live tensors were proved to be `version`, which is served from now on."""
        self._serving = version
        self._answered.add(version)
        self._graph.forget_tensors(version)

    def delta_refused(self, delta: Delta) -> None:
        """A delta is wrong, so that trying it again cannot help."""
        self._graph.refuse_delta(delta.base, delta.version)
        self._answered.add(delta.version)

    def anchor_refused(self, version: int) -> None:
        """An anchor cannot be read or is not what its manifest says."""
        self._graph.refuse_anchor(version)

    def _plan_in_pool(self) -> Move | None:
        for version in self._wanted():
            if version == self._serving:
                return None
            path = self._graph.path(version, self._serving)
            if path is not None:
                back = self._serving is not None and version < self._serving
                left = self._gate.objection(self._serving) if back and self._serving is not None else ""
                return Move(self._graph.manifests[version], path, left or _reason(path, self._serving))
        return None

    def _wanted(self) -> Iterator[int]:
        """What a replica of a pool should serve, the best first; the served one where it should wait."""
        serving = self._serving
        for version in self._gate.preferred(serving):
            if version in self._graph.manifests:
                yield version
            elif serving is not None and version > self.head and not self._gate.notice(serving):
                # The decision came before its version: the two topics are read apart.
                yield serving
        oldest = next((v for v in sorted(self._graph.manifests) if self._graph.path(v, serving) is not None), None)
        if oldest is not None and not self._gate.forbidden(oldest):
            yield oldest

    def _passed_over(self) -> list[int]:
        """The versions that would be gone to if they could or might be."""
        if self._pool is not Pool.ALL:
            better = takewhile(lambda version: version != self._serving, self._gate.preferred(self._serving))
            return sorted(version for version in better if version in self._graph.manifests)
        floor = -1 if self._serving is None else self._serving
        return sorted(version for version in self._graph.manifests if version > floor)

    def _stuck(self) -> list[Refuse]:
        notice = "" if self._serving is None else self._gate.notice(self._serving)
        said, self._notice = self._notice, notice
        if not notice or notice == said or self._serving is None:
            return []
        return [Refuse(self._graph.manifests[self._serving], f"{notice}; no usable anchor leads away from it")]


def _reason(path: UpdatePath, serving: int | None) -> str:
    if serving is None:
        return f"started from {path}"
    if path.anchor is not None:
        return f"re-synced from {path}"
    return "" if len(path.deltas) == 1 and not path.deltas[0].skips else f"caught up from version {serving} over {path}"
