"""How a replica joins: reads the branch's manifests and decisions until a version can be built from an anchor.

Blocking; runs before the engine exists and closes its clients again, so that the engine core can be forked safely.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.staging import Staging
from tidemill.consumers.replica.state import ReplicaState
from tidemill.kernels.weights.delta_fetch import FetchTimeoutError, open_fetcher
from tidemill.kernels.weights.mirror import Mirror
from tidemill.kernels.weights.rebuild import RefusedAnchorError, RefusedDeltaError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, Manifest, SkipDelta

logger = logging.getLogger(__name__)

FOLLOWED = (Topic.MANIFESTS, Topic.GATE)
"""The topics that a replica follows; chunks are fetched where they are named."""


@dataclass(frozen=True, slots=True)
class Joined:
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
) -> Joined | None:
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
        closing(Staging(fetcher, directory, settings.decode_threads)) as staging,
    ):
        for located in records.read_to_end():
            _observe(state, located.record)
        said = False
        while not stopped():
            joined = _build(state, staging, records)
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
            for located in records.poll(settings.poll_interval_s):
                _observe(state, located.record)
    return None


def _observe(state: ReplicaState, record: object) -> None:
    # A record that cannot be read is dead-lettered by the subscriber's own reading, not twice.
    if isinstance(record, Manifest | SkipDelta | GateDecision):
        objection = state.observe(record)
        if objection:
            logger.warning("%s", objection)


def _build(state: ReplicaState, staging: Staging, records: LogReader) -> Joined | None:
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
            directory = staging.checkpoint(mirror, prepared.anchor) if move.path.deltas else prepared.anchor
            return Joined(move.target, mirror, directory, records.next_offsets(), move.reason)
    return None
