"""The chain of versions of one branch, as the log has it: what is published, and how a version is reached.

Pure: manifests in, answers out. What stays true: a version stands for one set of weights, whoever publishes it and
however often; a version's parent is an older one. The next version continues the newest, or an older one that the
trainer went back to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tidemill.schemas.records import Manifest


class ChainError(ValueError):
    """A version does not continue the chain of versions in the log."""


@dataclass(frozen=True, slots=True)
class SinceAnchor:
    """What has come since the newest anchor."""

    versions: int
    delta_bytes: int
    anchor_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """How to make a version: an anchor, then deltas in order."""

    anchor: Manifest
    deltas: tuple[Manifest, ...]


class VersionChain:
    """The versions of one branch of one run. Manifests of others are left alone; all but the newest lose their tensors,
    which would be most of the memory."""

    def __init__(self, run_id: str, branch: str, manifests: Iterable[Manifest] = ()) -> None:
        self.run_id, self.branch = run_id, branch
        self._published: dict[int, Manifest] = {}
        self._newest: Manifest | None = None
        self._head: int | None = None
        for manifest in manifests:
            self.observe(manifest)

    @property
    def newest(self) -> Manifest | None:
        """The newest version, with its tensors."""
        return self._newest

    @property
    def newest_version(self) -> int | None:
        """The number of the newest version."""
        return None if self._newest is None else self._newest.version

    @property
    def incarnation(self) -> str:
        """Which life of the version numbers this chain is; empty where it has no version, or is from before there was
        one."""
        return "" if self._newest is None else self._newest.incarnation

    @property
    def head(self) -> int | None:
        """The version that the next one continues."""
        return self.newest_version if self._head is None else self._head

    def go_back(self, version: int) -> None:
        """The next version continues `version`. Raises ChainError when the log does not have it."""
        if version not in self._published:
            raise ChainError(f"run {self.run_id}, branch {self.branch}, has no version {version} to go back to")
        self._head = None if version == self.newest_version else version

    @property
    def oldest(self) -> Manifest | None:
        """The version that the branch begins with."""
        return self._published[min(self._published)] if self._published else None

    def get(self, version: int) -> Manifest | None:
        """What the log has of a version; only the newest one's tensors are kept."""
        return self._published.get(version)

    def observe(self, manifest: Manifest) -> None:
        """Take a manifest in. Raises ChainError when its version is there with other weights."""
        if (manifest.run_id, manifest.branch) != (self.run_id, self.branch):
            return
        held = self._published.get(manifest.version)
        if held is not None:
            require_same(held, manifest.fingerprint)
        else:
            self._published[manifest.version] = replace(manifest, tensors=[], tensor_table=None)
        if self._newest is None or manifest.version > self._newest.version:
            self._newest, self._head = manifest, None

    def require_next(self, version: int, parent: int | None) -> None:
        """Raise ChainError unless `version` may be the next one; it continues the head, which `parent` then is."""
        newest = self.newest_version
        if parent != self.head:
            head = "newest version" if self._head is None else "version gone back to"
            raise ChainError(
                f"version {version} names parent {parent}, the {head} of run {self.run_id}, branch "
                f"{self.branch}, in the log is {self.head}"
            )
        if newest is not None and version <= newest:
            raise ChainError(f"version {version} is not in the log and would come after {newest}: numbers only rise")

    def since_anchor(self) -> SinceAnchor:
        """What has come since the newest anchor that leads to the head; everything where there is none."""
        versions = delta_bytes = 0
        at = None if self.head is None else self._published[self.head]
        while at is not None:
            if at.anchor is not None:
                return SinceAnchor(versions, delta_bytes, at.anchor.n_bytes)
            versions, delta_bytes = versions + 1, delta_bytes + at.delta_bytes
            at = self._parent(at)
        return SinceAnchor(versions, delta_bytes, 0)

    def __len__(self) -> int:
        """Versions of the branch."""
        return len(self._published)

    def ancestor(self, version: int, steps: int) -> Manifest | None:
        """The version that lies `steps` versions before `version`; None where the branch is not that long."""
        at = self._published.get(version)
        for _ in range(steps):
            at = None if at is None else self._parent(at)
        return at

    def way_to(self, version: int) -> Way | None:
        """From the nearest anchor to `version`; None when no anchor leads there."""
        deltas: list[Manifest] = []
        at = self._published.get(version)
        while at is not None:
            if at.anchor is not None:
                return Way(at, tuple(reversed(deltas)))
            deltas.append(at)
            at = self._parent(at)
        return None

    def _parent(self, manifest: Manifest) -> Manifest | None:
        if manifest.parent is None or manifest.parent >= manifest.version:
            return None
        return self._published.get(manifest.parent)


def require_same(published: Manifest, fingerprint: str) -> None:
    """Raise ChainError unless the published version has this fingerprint; the message says what to do."""
    if published.fingerprint == fingerprint:
        return
    at = f"ForkPoint({published.branch!r}, {published.parent})"
    fork = "" if published.parent is None else f"; open a new branch with fork_from={at} to train on from there"
    raise ChainError(
        f"version {published.version} of run {published.run_id}, branch {published.branch}, is in the log with "
        f"fingerprint {published.fingerprint}, not {fingerprint}: two trainers on one run, a step that was not "
        f"repeatable, or a trainer that went back to an older checkpoint. What the log has stays{fork}"
    )
