"""Prepares versions on the CPU, while tokens flow: deltas checked against the mirror, whole versions from an anchor.

Runs in a worker thread; nothing here touches the engine.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.anchor import AnchorError, fetch_anchor
from tidemill.consumers.replica.fetch import ChunkFetcher, CorruptDeltaError
from tidemill.consumers.replica.mirror import Mirror, Staged
from tidemill.consumers.replica.state import Resync
from tidemill.kernels.container import decode_delta
from tidemill.kernels.delta import DeltaError
from tidemill.schemas.records import Manifest


class RefusedDeltaError(ValueError):
    """A delta's bytes are wrong, or do not lead from the mirror's version to the manifest's."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        super().__init__(reason)
        self.manifest = manifest


class RefusedAnchorError(ValueError):
    """An anchor cannot be read, or is not the version that its manifest names."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        super().__init__(reason)
        self.manifest = manifest


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked delta, and how long fetching and checking it took."""

    staged: Staged
    fetch_ms: float
    decode_ms: float


class Staging:
    """Where versions are prepared: a fetcher of chunks and a private directory for whole checkpoints."""

    def __init__(self, fetcher: ChunkFetcher, directory: Path) -> None:
        self._fetcher = fetcher
        self._directory = directory

    def prepare(self, manifest: Manifest, mirror: Mirror) -> Prepared:
        """Fetch a delta and check it against the mirror.

        Raises:
            RefusedDeltaError: its bytes are wrong or do not fit.
            FetchTimeoutError: its chunks did not arrive in time.
        """
        begun = time.monotonic()
        try:
            shards = self._fetcher.fetch(manifest)
            fetched = time.monotonic()
            parent = -1 if manifest.parent is None else manifest.parent
            blocks = (block for pieces in shards for block in decode_delta(pieces, manifest.version, parent))
            staged = mirror.stage(blocks, manifest)
        except (CorruptDeltaError, DeltaError) as error:
            raise RefusedDeltaError(manifest, str(error)) from error
        return Prepared(staged, 1e3 * (fetched - begun), 1e3 * (time.monotonic() - fetched))

    def build(self, plan: Resync) -> tuple[Mirror, Path]:
        """A mirror of the plan's last version, and the anchor's local directory.

        Raises:
            RefusedAnchorError: the anchor cannot be used.
            RefusedDeltaError, FetchTimeoutError: as `prepare`.
        """
        if plan.anchor.anchor is None:
            raise RefusedAnchorError(plan.anchor, f"version {plan.anchor.version} has no anchor")
        try:
            directory = fetch_anchor(plan.anchor.anchor.uri, self._directory)
            mirror = Mirror.from_anchor(directory, plan.anchor)
        except AnchorError as error:
            raise RefusedAnchorError(plan.anchor, str(error)) from error
        for manifest in plan.deltas:
            mirror.commit(self.prepare(manifest, mirror).staged)
        return mirror, directory

    def checkpoint(self, mirror: Mirror, anchor: Path) -> Path:
        """A whole checkpoint of the mirror's version, with the configuration and tokenizer of an anchor."""
        directory = self._directory / "joined"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(anchor, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
        mirror.save(directory)
        return directory

    def save(self, mirror: Mirror) -> Path:
        """Write the mirror's version where the engine can read it whole."""
        directory = self._directory / "whole"
        mirror.save(directory)
        return directory
