"""Prepares moves on the CPU, while tokens flow: anchors and deltas are read, decoded and checked against the mirror.

Runs in a worker thread; nothing here touches the engine. A move that fails leaves the mirror as it was.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.state import Move
from tidemill.kernels.weights.anchor import MARKER
from tidemill.kernels.weights.delta_fetch import FetchTimeoutError, ShardSource
from tidemill.kernels.weights.mirror import Draft, ElementChange, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder
from tidemill.schemas.stored_object import StoreUnavailableError

DENSE = 4
"""Where more than one element in so many changes, the whole version is written instead of its changes."""


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
        self._directory = directory
        self._rebuilder = Rebuilder(fetcher, decode_threads, directory)

    def prepare(self, move: Move, mirror: Mirror) -> Prepared:
        """Take the mirror to the move's target, checked step by step, and say what that changes.

        Raises:
            RefusedAnchorError: the anchor cannot be used.
            RefusedDeltaError: a delta's bytes are wrong or do not fit.
            FetchTimeoutError: something did not arrive in time. The mirror is as it was after every error.
        """
        begun = time.monotonic()
        draft = Draft(mirror)
        try:
            followed = self._rebuilder.follow(move.path, draft)
        except StoreUnavailableError as error:
            raise FetchTimeoutError(str(error)) from error
        try:
            changes = () if draft.fresh else draft.changes()
        except BaseException:
            draft.revert()
            raise
        whole = draft.fresh or DENSE * sum(change.indices.size for change in changes) > mirror.n_elements
        fetch_ms, elapsed = followed.fetch_ms, 1e3 * (time.monotonic() - begun)
        changes = () if whole else changes
        return Prepared(draft, changes, whole, followed.anchor, fetch_ms, max(0.0, elapsed - fetch_ms))

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
        self._rebuilder.close()
