"""The versions of a branch and the ways between them: deltas from parents, skip-deltas and anchors. Pure.

What stays true:

- a way leads over deltas whose base is the version before, from the held version or from an anchor;
- of all ways to a version the one with the fewest bytes is taken; at equal bytes the one with fewer deltas;
- a delta that was refused for its bytes is never on a way again, an anchor neither; ways around them stay open;
- the first contents of a version stand: what the log says of it a second time changes nothing, a late anchor excepted.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidemill.schemas.records import Manifest, ShardPosition, SkipDelta


@dataclass(frozen=True, slots=True)
class Delta:
    """One delta: applied to version `base` it makes `manifest`'s version."""

    manifest: Manifest
    base: int
    shards: tuple[ShardPosition, ...]
    n_bytes: int

    @property
    def version(self) -> int:
        """The version that it makes."""
        return self.manifest.version

    @property
    def skips(self) -> bool:
        """Whether it starts from another version than the parent."""
        return self.base != self.manifest.parent


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach a version: an anchor, or None where the held version is the start, then deltas in order."""

    anchor: Manifest | None
    deltas: tuple[Delta, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes to be read for it."""
        anchor = self.anchor.anchor.n_bytes if self.anchor is not None and self.anchor.anchor is not None else 0
        return anchor + sum(delta.n_bytes for delta in self.deltas)

    def __str__(self) -> str:
        start = "" if self.anchor is None else f"the anchor of version {self.anchor.version} and "
        skips = sum(delta.skips for delta in self.deltas)
        counted = f"{len(self.deltas)} delta{'' if len(self.deltas) == 1 else 's'}"
        return f"{start}{counted}{f' ({skips} of them skip-deltas)' if skips else ''}, {self.n_bytes} bytes"


class _Node(NamedTuple):
    """A place of the search, backwards from the target; compared by bytes, then deltas."""

    n_bytes: int
    n_deltas: int
    from_anchor: bool
    """A whole way, from the anchor of `version`."""
    version: int
    deltas: tuple[Delta, ...]
    """From `version` to the target."""

    def __lt__(self, other: tuple[object, ...]) -> bool:
        assert isinstance(other, _Node)
        return self[:4] < other[:4]


@dataclass(slots=True)
class Lineage:
    """The versions of one branch of one run that the log named, and the ways between them."""

    manifests: dict[int, Manifest] = field(default_factory=dict)
    _skips: dict[int, dict[int, SkipDelta]] = field(default_factory=dict)
    """By the version made, then by base."""
    _bad_deltas: set[tuple[int, int]] = field(default_factory=set)
    """Base and version of each."""
    _bad_anchors: set[int] = field(default_factory=set)

    @property
    def head(self) -> int:
        """Newest version seen; -1 before the first."""
        return max(self.manifests, default=-1)

    def add(self, manifest: Manifest) -> str:
        """Take a manifest in. Returns why it is not taken: it contradicts the one that is held. Else an empty text."""
        held = self.manifests.setdefault(manifest.version, manifest)
        if (held.fingerprint, held.parent) != (manifest.fingerprint, manifest.parent):
            return _fork(held, manifest)
        if held.anchor is None and manifest.anchor is not None:
            self.manifests[manifest.version] = manifest
        return ""

    def add_skip(self, skip: SkipDelta) -> str:
        """Take a skip-delta in. Returns why it is not taken: it does not lead forwards. Else an empty text."""
        if not 0 <= skip.base < skip.version:
            return f"a skip-delta from version {skip.base} to {skip.version} does not lead forwards"
        self._skips.setdefault(skip.version, {}).setdefault(skip.base, skip)
        return ""

    def forget_tensors(self, below: int) -> None:
        """Let go of the tensor lists of the versions before `below` that have no anchor: nearly all of the memory.

        A version whose list is gone is known by its fingerprint alone.
        """
        for version, manifest in self.manifests.items():
            if version < below and manifest.anchor is None and manifest.tensors:
                self.manifests[version] = replace(manifest, tensors=[])

    def refuse_delta(self, base: int, version: int) -> None:
        """The delta from `base` to `version` is wrong, so that trying it again cannot help."""
        self._bad_deltas.add((base, version))

    def refuse_anchor(self, version: int) -> None:
        """An anchor cannot be read or is not what its manifest says."""
        self._bad_anchors.add(version)

    def way(self, target: int, held: int | None) -> Way | None:
        """The way with the fewest bytes to a known version, from `held` or from an anchor; None when there is none."""
        if target not in self.manifests:
            return None
        queue = [_Node(0, 0, False, target, ())]
        done: set[tuple[int, bool]] = set()
        while queue:
            node = heapq.heappop(queue)
            if node.from_anchor or node.version == held:
                return Way(self.manifests[node.version] if node.from_anchor else None, node.deltas)
            if (node.version, node.from_anchor) in done:
                continue
            done.add((node.version, node.from_anchor))
            for further in self._before(node):
                heapq.heappush(queue, further)
        return None

    def _before(self, node: _Node) -> list[_Node]:
        """The node's own anchor, and the bases of the deltas that make its version."""
        found = []
        manifest = self.manifests[node.version]
        if manifest.anchor is not None and node.version not in self._bad_anchors:
            found.append(node._replace(n_bytes=node.n_bytes + manifest.anchor.n_bytes, from_anchor=True))
        for delta in self._deltas_to(manifest):
            if delta.base in self.manifests and (delta.base, delta.version) not in self._bad_deltas:
                n_bytes, deltas = node.n_bytes + delta.n_bytes, (delta, *node.deltas)
                found.append(_Node(n_bytes, len(deltas), False, delta.base, deltas))
        return found

    def _deltas_to(self, manifest: Manifest) -> list[Delta]:
        found = []
        if manifest.parent is not None and manifest.parent < manifest.version:
            found.append(Delta(manifest, manifest.parent, tuple(manifest.shards), manifest.delta_bytes))
        for base, skip in self._skips.get(manifest.version, {}).items():
            if base != manifest.parent:
                found.append(Delta(manifest, base, tuple(skip.shards), skip.n_bytes))
        return found


def _fork(held: Manifest, other: Manifest) -> str:
    return (
        f"fork: version {other.version} was published with parent {held.parent} and fingerprint {held.fingerprint}, "
        f"and again with parent {other.parent} and fingerprint {other.fingerprint}; the first one stands"
    )
