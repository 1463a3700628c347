"""How a replica joins: reads the branch's manifests until a version can be built from an anchor.

Blocking; runs before the engine exists and closes its clients again, so that the engine core can be forked safely.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.fetch import ChunkFetcher
from tidemill.consumers.replica.mirror import Mirror
from tidemill.consumers.replica.staging import RefusedAnchorError, RefusedDeltaError, Staging
from tidemill.consumers.replica.state import ReplicaState, Resync
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """The version to start with, and where the manifests are to be read on from."""

    manifest: Manifest
    mirror: Mirror
    directory: Path
    """A whole checkpoint of that version, with its configuration and tokenizer."""
    offsets: dict[tuple[Topic, int], int]


def join(
    kafka: KafkaSettings, settings: ReplicaSettings, state: ReplicaState, directory: Path, stopped: Callable[[], bool]
) -> Joined | None:
    """The newest version that can be reached now, or as soon as there is one; None when stopped before.

    Raises:
        TimeoutError: no anchor that can be used came within `anchor_wait_s`.
    """
    deadline = time.monotonic() + settings.anchor_wait_s if settings.anchor_wait_s else None
    with (
        LogReader(kafka, [Topic.MANIFESTS], client_id=f"{settings.replica_id}-join") as manifests,
        LogReader(kafka, [Topic.DELTAS], start="end", client_id=f"{settings.replica_id}-join-chunks") as chunks,
    ):
        staging = Staging(ChunkFetcher(chunks, settings.fetch_timeout_s), directory)
        for located in manifests.read_to_end():
            _remember(state, located.record)
        waiting = False
        while not stopped():
            built = _build(state, staging)
            if built is not None:
                return Joined(*built, manifests.next_offsets())
            waiting = waiting or _say_waiting(settings)
            _check_deadline(deadline, settings)
            for located in manifests.poll(settings.poll_interval_s, 1):
                _remember(state, located.record)
    return None


def _remember(state: ReplicaState, record: object) -> None:
    # A record that cannot be read is dead-lettered by the subscriber's own reading, not twice.
    if isinstance(record, Manifest):
        state.remember(record)


def _build(state: ReplicaState, staging: Staging) -> tuple[Manifest, Mirror, Path] | None:
    while (plan := state.catch_up()) is not None:
        try:
            mirror, anchor = staging.build(plan)
        except RefusedAnchorError as error:
            logger.warning("anchor of version %d cannot be used: %s", error.manifest.version, error)
            state.anchor_refused(error.manifest.version)
        except RefusedDeltaError as error:
            logger.warning("delta of version %d cannot be used: %s", error.manifest.version, error)
            state.delta_refused(error.manifest.version)
        else:
            return plan.target, mirror, _checkpoint(plan, mirror, anchor, staging)
    return None


def _checkpoint(plan: Resync, mirror: Mirror, anchor: Path, staging: Staging) -> Path:
    return staging.checkpoint(mirror, anchor) if plan.deltas else anchor


def _say_waiting(settings: ReplicaSettings) -> bool:
    logger.warning("%s waits for a manifest with an anchor: is the trainer running?", settings.replica_id)
    return True


def _check_deadline(deadline: float | None, settings: ReplicaSettings) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise TimeoutError(f"no usable anchor was published within {settings.anchor_wait_s:g} s: start the trainer")
