"""Prepares moves on the CPU, while tokens flow: anchors and deltas are read, decoded and checked against the mirror.

Runs in a worker thread; nothing here touches the engine. A move that fails leaves the mirror as it was.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.state import Move
from tidemill.kernels.delta import DeltaError
from tidemill.kernels.weights.anchor import MARKER, discard_copy, fetch_anchor
from tidemill.kernels.weights.checkpoint import WeightFilesError
from tidemill.kernels.weights.decode import Decoder
from tidemill.kernels.weights.delta_fetch import CorruptDeltaError, FetchTimeoutError, ShardSource
from tidemill.kernels.weights.graph import Delta
from tidemill.kernels.weights.mirror import Draft, ElementChange, Mirror
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.records import Manifest
from tidemill.schemas.stored_object import StoredObjectError, StoreUnavailableError

DENSE = 4
"""Where more than one element in so many changes, the whole version is written instead of its changes."""


class RefusedDeltaError(ValueError):
    """A delta's bytes are wrong, or do not lead from its base to its version."""

    def __init__(self, delta: Delta, reason: str) -> None:
        super().__init__(reason)
        self.delta = delta


class RefusedAnchorError(ValueError):
    """An anchor cannot be read, or is not the version that its manifest names."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        super().__init__(reason)
        self.manifest = manifest


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked move: the mirror is at its target, the engine not yet."""

    draft: Draft
    changes: tuple[ElementChange, ...]
    """What leads the engine there; empty for `whole`."""
    whole: bool
    """Whether so much changes that the whole version is better written."""
    anchor: Path | None
    """Local directory of the anchor that the move began with."""
    fetch_ms: float
    decode_ms: float


class Staging:
    """Where moves are prepared: a fetcher of chunks, threads to decode them, a private directory for checkpoints."""

    def __init__(self, fetcher: ShardSource, directory: Path, decode_threads: int = 2) -> None:
        self._fetcher = fetcher
        self._directory = directory
        self._decoder = Decoder(decode_threads)

    def prepare(self, move: Move, mirror: Mirror) -> Prepared:
        """Take the mirror to the move's target, checked step by step, and say what that changes.

        Raises:
            RefusedAnchorError: the anchor cannot be used.
            RefusedDeltaError: a delta's bytes are wrong or do not fit.
            FetchTimeoutError: something did not arrive in time. The mirror is as it was after every error.
        """
        begun, fetch_ms = time.monotonic(), 0.0
        draft = Draft(mirror)
        fresh = draft.fresh
        try:
            anchor = self._load(draft, move)
            for delta in move.path.deltas:
                fetch_ms += self._advance(draft, mirror, delta)
            self._check(draft, move)
            changes = () if fresh else draft.changes()
        except BaseException:
            draft.revert()
            raise
        whole = fresh or DENSE * sum(change.indices.size for change in changes) > mirror.n_elements
        elapsed = 1e3 * (time.monotonic() - begun)
        return Prepared(draft, () if whole else changes, whole, anchor, fetch_ms, max(0.0, elapsed - fetch_ms))

    def checkpoint(self, mirror: Mirror, anchor: Path) -> Path:
        """A whole checkpoint of the mirror's version, with the configuration and tokenizer of an anchor."""
        directory = self._directory / "joined"
        shutil.rmtree(directory, ignore_errors=True)
        weights = ("*.safetensors", "*.safetensors.index.json", MARKER)
        shutil.copytree(anchor, directory, ignore=shutil.ignore_patterns(*weights))
        mirror.save(directory)
        return directory

    def save(self, mirror: Mirror) -> Path:
        """Write the mirror's version where the engine can read it whole."""
        directory = self._directory / "whole"
        mirror.save(directory)
        return directory

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()

    def _load(self, draft: Draft, move: Move) -> Path | None:
        manifest = move.path.anchor
        if manifest is None or manifest.anchor is None:
            return None
        fresh = draft.fresh
        try:
            directory = fetch_anchor(manifest.anchor.uri, self._directory)
            draft.load(directory, with_tensors(manifest))
            if not fresh:
                discard_copy(manifest.anchor.uri, directory)
        except (WeightFilesError, StoredObjectError) as error:
            raise RefusedAnchorError(manifest, str(error)) from error
        except StoreUnavailableError as error:
            raise FetchTimeoutError(str(error)) from error
        return directory

    def _advance(self, draft: Draft, mirror: Mirror, delta: Delta) -> float:
        try:
            decoded = self._decoder.decode(delta, self._fetcher.pieces, mirror.resolve)
            draft.advance(decoded.changes, delta.manifest)
        except (CorruptDeltaError, DeltaError) as error:
            raise RefusedDeltaError(delta, str(error)) from error
        return decoded.fetch_ms

    def _check(self, draft: Draft, move: Move) -> None:
        """The target tensor by tensor; the versions before it are known by the sum alone."""
        if not move.path.deltas:
            return
        try:
            draft.check(with_tensors(move.target))
        except (StoredObjectError, DeltaError) as error:
            raise RefusedDeltaError(move.path.deltas[-1], str(error)) from error
        except StoreUnavailableError as error:
            raise FetchTimeoutError(str(error)) from error
