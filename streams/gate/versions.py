"""The versions of one branch, what was decided of each, and the one that everyone is served. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.schemas.gate_decisions import BranchDecisions
from tidemill.schemas.records import Manifest


class BranchVersions(BranchDecisions):
    """Versions of a branch and what was decided of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = -1
        """The newest version; -1 before the first."""
        self._anchored: set[int] = set()

    @property
    def baseline(self) -> int:
        """The version that everyone is served: the one named last, before that the oldest with an anchor. -1: none."""
        return self.named[-1] if self.named else self._first

    def publish(self, manifest: Manifest) -> None:
        """A version exists; of one that is published twice the first contents stand."""
        version, parent = manifest.version, manifest.parent
        if version not in self.versions:
            self.made(version, parent if parent is not None and parent < version else None)
            self.head = max(self.head, version)
        if manifest.anchor is not None:
            self._anchored.add(version)

    def fallback(self, version: int, proved: Iterable[int]) -> int | None:
        """The version to go back to: the newest one named before `version`, proved where one is. None: nothing."""
        choices = [known for known in (self._first, *self.named) if known not in (-1, version, *self.rejected)]
        sure = set(proved)
        return next((known for known in reversed(choices) if known in sure), choices[-1] if choices else None)

    @property
    def _first(self) -> int:
        return min(self._anchored, default=min(self.versions, default=-1))
