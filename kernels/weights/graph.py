"""The versions of a branch and the paths between them: deltas from parents, skip-deltas and anchors. Pure.

Publisher, replica and operator's commands use this graph to find the path to a version. Invariants:

- a path starts at the held version or at an anchor; the base of each delta is the version before it on the path;
- the path with the fewest bytes is chosen; at equal bytes, the path with fewer deltas;
- a delta or an anchor that was refused is on no path again; other paths remain possible;
- a delta whose chunks the log has deleted is on no path;
- the first contents of a version are kept: a second record of it changes nothing, except that it may add an anchor.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from tidemill.schemas.records import Manifest, Record, ShardPosition, SkipDelta


class VersionError(ValueError):
    """Error for a request that the versions of a branch do not allow; the message says what they contain."""


class Unreachable(VersionError):
    """Error for a version that cannot be reached from any anchor over usable deltas."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One delta: applied to version `base`, it makes `manifest`'s version."""

    manifest: Manifest
    base: int
    shards: tuple[ShardPosition, ...]
    n_bytes: int

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def skips(self) -> bool:
        """Whether it starts from another version than the parent."""
        return self.base != self.manifest.parent


PathStep = Manifest | Delta
"""A step of an update path: the manifest of its first anchor, or a delta."""


@dataclass(frozen=True, slots=True)
class UpdatePath:
    """Path to a version: an anchor (None if the held version is the start), then deltas in order."""

    anchor: Manifest | None
    deltas: tuple[Delta, ...]

    @property
    def steps(self) -> tuple[PathStep, ...]:
        return self.deltas if self.anchor is None else (self.anchor, *self.deltas)

    @property
    def n_bytes(self) -> int:
        """Number of bytes to read."""
        anchor = self.anchor.anchor.n_bytes if self.anchor is not None and self.anchor.anchor is not None else 0
        return anchor + sum(delta.n_bytes for delta in self.deltas)

    def __str__(self) -> str:
        start = "" if self.anchor is None else f"the anchor of version {self.anchor.version} and "
        skips = sum(delta.skips for delta in self.deltas)
        counted = f"{len(self.deltas)} delta{'' if len(self.deltas) == 1 else 's'}"
        return f"{start}{counted}{f' ({skips} of them skip-deltas)' if skips else ''}, {self.n_bytes} bytes"


class VersionGraph:
    """The versions of one branch of one run, from the records of the log.

    Args:
        kept_from: first offset that the log still has, by partition of the deltas; partitions that are not named
            have all offsets.
        keep_tensors: whether versions before the newest keep their tensor lists, which need most of the memory.
    """

    def __init__(
        self, run_id: str, branch: str, kept_from: Mapping[int, int] | None = None, keep_tensors: bool = True
    ) -> None:
        self.run_id, self.branch = run_id, branch
        self.kept_from, self._keep_tensors = kept_from or {}, keep_tensors
        self.manifests: dict[int, Manifest] = {}
        """By version; if one was published twice, its first contents."""
        self.forks: dict[int, str] = {}
        """Versions that were published twice with different contents, with a description of the difference."""
        self.newest_version: int | None = None
        self._skips: dict[int, dict[int, SkipDelta]] = {}
        """By target version, then by base."""
        self._bad_deltas: set[tuple[int, int]] = set()
        """Base and version of each delta."""
        self._bad_anchors: set[int] = set()

    @property
    def newest(self) -> Manifest | None:
        """The newest version; None before the first."""
        return None if self.newest_version is None else self.manifests[self.newest_version]

    @property
    def incarnation(self) -> str:
        """The incarnation of the version numbers; empty if there is no version, or none is recorded."""
        return "" if self.newest is None else self.newest.incarnation

    def observe(self, record: Record | None) -> str:
        """Add a manifest or a skip-delta; ignore records of other runs, branches and kinds.

        Returns why the record is rejected (it contradicts an earlier one, or does not lead forwards), or an empty text.
        """
        if not isinstance(record, Manifest | SkipDelta) or (record.run_id, record.branch) != (self.run_id, self.branch):
            return ""
        if isinstance(record, SkipDelta):
            if not 0 <= record.base < record.version:
                return f"a skip-delta from version {record.base} to {record.version} does not lead forwards"
            self._skips.setdefault(record.version, {}).setdefault(record.base, record)
            return ""
        held = self.manifests.setdefault(record.version, record)
        if (held.fingerprint, held.parent) != (record.fingerprint, record.parent):
            fork = (
                f"fork: version {record.version} was published with parent {held.parent} and fingerprint "
                f"{held.fingerprint}, and again with parent {record.parent} and fingerprint {record.fingerprint}; "
                "the first one is used"
            )
            self.forks.setdefault(record.version, fork)
            return fork
        if held.anchor is None and record.anchor is not None:
            # The anchor is checked against the tensors, which may have been released meanwhile.
            tensors = held.tensors or record.tensors
            self.manifests[record.version] = replace(held, anchor=record.anchor, tensors=tensors)
        previous = self.newest_version
        self.newest_version = record.version if previous is None else max(previous, record.version)
        if not self._keep_tensors:
            for version in {v for v in (previous, record.version) if v is not None and v != self.newest_version}:
                self.manifests[version] = replace(self.manifests[version], tensors=[], tensor_table=None)
        return ""

    def forget_tensors(self, below: int) -> None:
        """Release the tensor lists of the versions before `below` that have no anchor: nearly all of the memory.

        Afterwards such a version has only its fingerprint.
        """
        for version, manifest in self.manifests.items():
            if version < below and manifest.anchor is None and manifest.tensors:
                self.manifests[version] = replace(manifest, tensors=[])

    def refuse(self, step: PathStep) -> None:
        """Exclude a wrong delta, or an anchor that cannot be read or does not match its manifest, from all paths."""
        if isinstance(step, Delta):
            self._bad_deltas.add((step.base, step.version))
        else:
            self._bad_anchors.add(step.version)

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest. Raises VersionError, which names the nearest versions."""
        if version in self.manifests:
            return self.manifests[version]
        known = "it has none"
        if self.manifests:
            nearest = sorted(self.manifests, key=lambda held: (abs(held - version), held))[:3]
            known = f"it has {min(self.manifests)} to {max(self.manifests)}, the nearest {', '.join(map(str, nearest))}"
        raise VersionError(f"version {version} is not on branch {self.branch} of run {self.run_id}: {known}")

    def delta(self, version: int) -> Delta | None:
        """Return the delta from a version's parent; None for a version without a parent. Raises VersionError."""
        manifest = self.manifest(version)
        if manifest.parent is None:
            return None
        return Delta(manifest, manifest.parent, tuple(manifest.shards), manifest.delta_bytes)

    def skip_deltas(self) -> list[Delta]:
        """Return every skip-delta to a known version, ordered by base, then by target version."""
        found = [
            Delta(self.manifests[version], base, tuple(skip.shards), skip.n_bytes)
            for version, skips in self._skips.items()
            if version in self.manifests
            for base, skip in skips.items()
        ]
        return sorted(found, key=lambda delta: (delta.base, delta.version))

    def expired(self, shards: Iterable[ShardPosition]) -> str:
        """Describe the first chunk that the log's retention has deleted; empty if the log has all chunks."""
        for shard in shards:
            kept_from = self.kept_from.get(shard.partition, 0)
            if shard.uri is None and shard.offsets and min(shard.offsets) < kept_from:
                return (
                    f"expired: its chunk at {shard.partition}:{min(shard.offsets)} is past the log's retention, "
                    f"partition {shard.partition} begins at {kept_from}"
                )
        return ""

    def path(self, target: int, held: int | None = None) -> UpdatePath | None:
        """Return the path with the fewest bytes to a version, from `held` or from an anchor; None if there is none."""
        # Search backwards from the target. An entry: bytes; number of deltas; whether the path is complete (starts at
        # the version's anchor); version; a number that decides between equals; the deltas from version to target.
        order = count()
        queue: list[tuple[int, int, bool, int, int, tuple[Delta, ...]]] = []
        if target in self.manifests:
            queue.append((0, 0, False, target, next(order), ()))
        done: set[int] = set()
        while queue:
            n_bytes, _, from_anchor, version, _, deltas = heapq.heappop(queue)
            manifest = self.manifests[version]
            if from_anchor or version == held:
                return UpdatePath(manifest if from_anchor else None, deltas)
            if version in done:
                continue
            done.add(version)
            if manifest.anchor is not None and version not in self._bad_anchors:
                total = n_bytes + manifest.anchor.n_bytes
                heapq.heappush(queue, (total, len(deltas), True, version, next(order), deltas))
            own, skips = self.delta(version), self._skips.get(version, {}).items()
            further = [own] if own is not None and own.base < version else []
            further += [Delta(manifest, b, tuple(s.shards), s.n_bytes) for b, s in skips if b != manifest.parent]
            for delta in further:
                bad = (delta.base, version) in self._bad_deltas or self.expired(delta.shards)
                if delta.base in self.manifests and not bad:
                    way, total = (delta, *deltas), n_bytes + delta.n_bytes
                    heapq.heappush(queue, (total, len(way), False, delta.base, next(order), way))
        return None

    def require_path(self, version: int, anchor_exists: Callable[[Manifest], bool] = lambda _: True) -> UpdatePath:
        """Return the path with the fewest bytes from an anchor to a version.

        Args:
            anchor_exists: returns whether a manifest's anchor can be used; if not, it is on no later path.

        Raises VersionError for an unknown version, Unreachable with the first obstacle.
        """
        self.manifest(version)
        while (path := self.path(version)) is not None:
            assert path.anchor is not None
            if anchor_exists(path.anchor):
                return path
            self.refuse(path.anchor)
        raise Unreachable(f"version {version} cannot be built: {self._obstacle(version)}")

    def ancestor(self, version: int, steps: int) -> Manifest | None:
        """Return the ancestor `steps` versions before `version`; None if the branch is not that long."""
        at = self.manifests.get(version)
        for _ in range(steps):
            at = None if at is None else self._parent(at)
        return at

    def since_anchor(self, version: int | None) -> tuple[int, int, int]:
        """Return the versions, and the bytes of deltas, after the newest anchor before `version`; the anchor's bytes.

        Without an anchor, everything is counted, and its bytes are 0.
        """
        versions = delta_bytes = 0
        at = None if version is None else self.manifests[version]
        while at is not None:
            if at.anchor is not None:
                return versions, delta_bytes, at.anchor.n_bytes
            versions, delta_bytes = versions + 1, delta_bytes + at.delta_bytes
            at = self._parent(at)
        return versions, delta_bytes, 0

    def _parent(self, manifest: Manifest) -> Manifest | None:
        if manifest.parent is None or manifest.parent >= manifest.version:
            return None
        return self.manifests.get(manifest.parent)

    def _obstacle(self, version: int) -> str:
        at = version
        while (delta := self.delta(at)) is not None:
            if expired := self.expired(delta.shards):
                return f"the delta of version {at} is {expired}; there is no usable anchor after it"
            if delta.base not in self.manifests:
                return f"its ancestor {delta.base} is not in the log, and there is no usable anchor after it"
            if delta.base >= at:
                return f"version {at} names the later version {delta.base} as its parent"
            at = delta.base
        return f"it needs the anchor of version {at}, which is missing or damaged"


def require_same(published: Manifest, fingerprint: str) -> None:
    """Raise VersionError unless the published version has this fingerprint; the message says what to do."""
    if published.fingerprint == fingerprint:
        return
    at = f"ForkPoint({published.branch!r}, {published.parent})"
    fork = "" if published.parent is None else f"; open a new branch with fork_from={at} to train on from there"
    raise VersionError(
        f"version {published.version} of run {published.run_id}, branch {published.branch}, is in the log with "
        f"fingerprint {published.fingerprint}, not {fingerprint}: two trainers on one run, a step that was not "
        f"repeatable, or a trainer that went back to an older checkpoint. The version in the log is not changed{fork}"
    )
