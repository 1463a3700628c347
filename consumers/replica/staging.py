"""Prepares moves on the CPU, while tokens flow: anchors and deltas are read, decoded and checked against the mirror.

Runs in a worker thread; nothing here touches the engine. A move that fails leaves the mirror as it was. `join` prepares
the version that a replica starts with: it runs before the engine exists and closes its clients again, so that the
engine core can be forked safely.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.state import ReplicaState, UpdateAction
from tidemill.kernels.weights.anchor import MARKER
from tidemill.kernels.weights.delta_fetch import FetchTimeoutError, ShardSource, open_fetcher
from tidemill.kernels.weights.mirror import Draft, ElementChange, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder, RefusedAnchorError, RefusedDeltaError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, Manifest, SkipDelta
from tidemill.schemas.stored_object import StoreUnavailableError

logger = logging.getLogger(__name__)

FOLLOWED = (Topic.MANIFESTS, Topic.GATE)
"""The topics that a replica follows; chunks are fetched where they are named."""

DENSE = 4
"""Where more than one element in so many changes, the whole version is written instead of its changes."""


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """A checked move: the mirror is at its target, the engine not yet."""

    draft: Draft
    changes: tuple[ElementChange, ...]
    """The changes that bring the engine there; empty for `whole`."""
    whole: bool
    """Whether so much changes that the whole version is better written."""
    anchor: Path | None
    """Local directory of the anchor that the move began with."""
    fetch_ms: float
    decode_ms: float


class UpdateStaging:
    """Where moves are prepared: a fetcher of chunks, threads to decode them, a private directory for checkpoints."""

    def __init__(self, fetcher: ShardSource, directory: Path, decode_threads: int = 2) -> None:
        self._directory = directory
        self._rebuilder = Rebuilder(fetcher, decode_threads, directory)

    def prepare(self, move: UpdateAction, mirror: Mirror) -> PreparedUpdate:
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
        return PreparedUpdate(draft, changes, whole, followed.anchor, fetch_ms, max(0.0, elapsed - fetch_ms))

    def save(self, mirror: Mirror) -> Path:
        """Write the mirror's version where the engine can read it whole."""
        directory = self._directory / "whole"
        mirror.save(directory)
        return directory

    def close(self) -> None:
        self._rebuilder.close()


def save_whole(mirror: Mirror, anchor: Path, directory: Path) -> None:
    """A whole checkpoint of the mirror's version in a new directory, with an anchor's configuration and tokenizer."""
    weights = ("*.safetensors", "*.safetensors.index.json", MARKER)
    shutil.copytree(anchor, directory, ignore=shutil.ignore_patterns(*weights))
    mirror.save(directory)


@dataclass(frozen=True, slots=True)
class StartVersion:
    """The version to start with, and where the manifests are to be read on from."""

    manifest: Manifest
    mirror: Mirror
    directory: Path
    """A whole checkpoint of that version, with its configuration and tokenizer."""
    offsets: dict[tuple[Topic, int], int]
    reason: str = "start"
    """How it was reached."""


def join(
    kafka: KafkaSettings, settings: ReplicaSettings, state: ReplicaState, directory: Path, stopped: Callable[[], bool]
) -> StartVersion | None:
    """The version that `state` goes to from nothing, now or as soon as there is one; None when stopped.

    Raises:
        TimeoutError: no anchor that can be used came within `anchor_wait_s`.
    """
    deadline = time.monotonic() + settings.anchor_wait_s if settings.anchor_wait_s else None
    chunks_id = f"{settings.replica_id}-join-chunks"
    with (
        LogReader(kafka, FOLLOWED, client_id=f"{settings.replica_id}-join") as records,
        open_fetcher(
            kafka, settings.fetch_timeout_s, settings.fetch_connections, chunks_id, settings.fetch_bytes
        ) as fetcher,
        closing(UpdateStaging(fetcher, directory, settings.decode_threads)) as staging,
    ):
        found: Iterable[ConsumedRecord] = records.read_to_end()
        said = False
        while not stopped():
            for located in found:
                # A record that cannot be read is dead-lettered by the subscriber's own reading, not twice.
                record = located.record
                if isinstance(record, Manifest | SkipDelta | GateDecision) and (objection := state.observe(record)):
                    logger.warning("%s", objection)
            joined = _build(state, staging, records, directory / "joined")
            if joined is not None:
                return joined
            if not said:
                logger.warning(
                    "%s waits for a version with an anchor that the gate lets it serve: is the trainer running?",
                    settings.replica_id,
                )
                said = True
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"no usable anchor was published within {settings.anchor_wait_s:g} s: start the trainer"
                )
            found = records.poll(settings.poll_interval_s)
    return None


def _build(state: ReplicaState, staging: UpdateStaging, records: LogReader, directory: Path) -> StartVersion | None:
    while (move := state.plan()) is not None:
        mirror = Mirror()
        try:
            prepared = staging.prepare(move, mirror)
        except RefusedAnchorError as error:
            logger.warning("anchor of version %d cannot be used: %s", error.manifest.version, error)
            state.anchor_refused(error.manifest.version)
        except RefusedDeltaError as error:
            logger.warning("delta to version %d cannot be used: %s", error.delta.version, error)
            state.delta_refused(error.delta)
        except FetchTimeoutError as error:
            logger.warning("version %d cannot be reached yet: %s", move.target.version, error)
            return None
        else:
            prepared.draft.keep()
            logger.warning("version %d: %s", move.target.version, move.reason)
            assert prepared.anchor is not None, "with nothing loaded every path begins with an anchor"
            if move.path.deltas:
                shutil.rmtree(directory, ignore_errors=True)
                save_whole(mirror, prepared.anchor, directory)
            else:
                directory = prepared.anchor
            return StartVersion(move.target, mirror, directory, records.next_offsets(), move.reason)
    return None
