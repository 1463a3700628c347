"""What a replica does about each manifest: a pure state machine, without a clock, a network or weights.

It holds the lineage of a branch (manifests by version, linked by parent) and what the replica serves, and answers each
manifest with a plan. The shell carries the plan out and reports back: `proved`, `delta_refused`, `anchor_refused`.
What stays true:

- a plan only ever leads from the served version to a newer one over an unbroken chain of parents, or from an anchor;
- a delta that was refused for its bytes is never tried again, an anchor neither; a newer anchor leads past both;
- the same record twice changes nothing; a version published twice with different contents is refused, not followed;
- while nothing can be reached, the last proved version goes on being served.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.schemas.records import Manifest


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this delta to the served version."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Resync:
    """Write the first manifest's anchor over everything, then apply the others' deltas in order."""

    anchor: Manifest
    deltas: tuple[Manifest, ...]
    reason: str

    @property
    def target(self) -> Manifest:
        """The version that it leads to."""
        return self.deltas[-1] if self.deltas else self.anchor


@dataclass(frozen=True, slots=True)
class Refuse:
    """Stay on the served version and say why."""

    manifest: Manifest
    reason: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing to do, nothing to say in the ledger."""

    reason: str


Plan = Apply | Resync | Refuse | Ignore


class ReplicaState:
    """The lineage of one branch of one run, and the version served."""

    def __init__(self, run_id: str, branch: str) -> None:
        self._run_id, self._branch = run_id, branch
        self._known: dict[int, Manifest] = {}
        self._bad_deltas: set[int] = set()
        self._bad_anchors: set[int] = set()
        self._serving: int | None = None

    @property
    def serving(self) -> int | None:
        """The version served; None before the first."""
        return self._serving

    @property
    def head(self) -> int:
        """Newest version seen in the log; -1 before the first."""
        return max(self._known, default=-1)

    def remember(self, manifest: Manifest) -> str:
        """Take a manifest into the lineage; returns why it is not taken, or an empty string."""
        if (manifest.run_id, manifest.branch) != (self._run_id, self._branch):
            return f"belongs to run {manifest.run_id}, branch {manifest.branch}"
        held = self._known.get(manifest.version)
        if held is None:
            self._known[manifest.version] = manifest
            return ""
        if held.fingerprint != manifest.fingerprint or held.parent != manifest.parent:
            return _fork(held, manifest)
        if held.anchor is None and manifest.anchor is not None:
            self._known[manifest.version] = manifest
        return f"version {manifest.version} is known"

    def observe(self, manifest: Manifest) -> Plan:
        """The plan for one manifest, in log order."""
        foreign = (manifest.run_id, manifest.branch) != (self._run_id, self._branch)
        fork = not foreign and self._is_fork(manifest)
        objection = self.remember(manifest)
        if fork:
            return Refuse(manifest, objection)
        if foreign:
            return Ignore(objection)
        if not self._behind(manifest.version):
            return Ignore(f"version {manifest.version} is not newer than the served {self._serving}")
        return self._advance(manifest)

    def start(self) -> Resync | None:
        """How to reach the newest reachable version with nothing loaded; None while there is no usable anchor."""
        return self._best_chain(-1, "start")

    def catch_up(self) -> Resync | None:
        """A way from an anchor to a newer version than the served one; None while there is none."""
        return self._best_chain(-1 if self._serving is None else self._serving + 1, "catch up from an anchor")

    def proved(self, version: int) -> None:
        """The live tensors were proved to be `version`, which is served from now on."""
        self._serving = version

    def delta_refused(self, version: int) -> None:
        """The delta that makes `version` is wrong, so that trying it again cannot help."""
        self._bad_deltas.add(version)

    def anchor_refused(self, version: int) -> None:
        """An anchor cannot be read or is not what its manifest says."""
        self._bad_anchors.add(version)

    def _is_fork(self, manifest: Manifest) -> bool:
        held = self._known.get(manifest.version)
        return held is not None and (held.fingerprint, held.parent) != (manifest.fingerprint, manifest.parent)

    def _behind(self, version: int) -> bool:
        return self._serving is None or version > self._serving

    def _advance(self, manifest: Manifest) -> Plan:
        direct = manifest.parent is not None and manifest.parent == self._serving
        if direct and manifest.version not in self._bad_deltas:
            return Apply(manifest)
        reason = f"version {manifest.version} has parent {manifest.parent}, version {self._serving} is served"
        return self.catch_up() or Refuse(manifest, f"{reason}, and no usable anchor leads to it")

    def _best_chain(self, floor: int, reason: str) -> Resync | None:
        for version in sorted(self._known, reverse=True):
            if version < floor:
                return None
            chain = self._chain(version)
            if chain is not None:
                return Resync(chain[0], chain[1:], reason)
        return None

    def _chain(self, version: int) -> tuple[Manifest, ...] | None:
        """Manifests from the nearest usable anchor to `version`, by parent links; None when one is missing or bad."""
        links: list[Manifest] = []
        at: int | None = version
        while at is not None and at in self._known:
            manifest = self._known[at]
            links.append(manifest)
            if manifest.anchor is not None and at not in self._bad_anchors:
                return tuple(reversed(links))
            if at in self._bad_deltas or manifest.parent is None or manifest.parent >= at:
                return None
            at = manifest.parent
        return None


def _fork(held: Manifest, other: Manifest) -> str:
    return (
        f"fork: version {other.version} was published with parent {held.parent} and fingerprint {held.fingerprint}, "
        f"and again with parent {other.parent} and fingerprint {other.fingerprint}; the first one stands"
    )
