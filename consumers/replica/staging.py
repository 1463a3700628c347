"""Preparation of updates on the CPU, while the engine samples: reads, decodes and checks anchors and deltas.

Runs in a worker thread; nothing here changes the engine. A failed update leaves the mirror unchanged. `join` prepares
the version that a replica starts with: it runs before the engine exists and closes its clients afterwards, so that the
engine core can be forked safely.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.state import ReplicaState, UpdateAction
from tidemill.kernels.weights.delta_fetch import Pieces, open_fetcher
from tidemill.kernels.weights.graph import Delta
from tidemill.kernels.weights.mirror import Draft, ElementChange, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder, RefusedStepError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, Manifest, SkipDelta
from tidemill.schemas.stored_object import StoreUnavailableError

logger = logging.getLogger(__name__)

FOLLOWED = (Topic.MANIFESTS, Topic.GATE)
"""The topics that a replica follows; chunks are fetched by partition and offset."""

DENSE = 4
"""If more than one in this many elements changes, the whole version is written instead of its changes."""

PRIVATE = "tidemill-staging-"
"""First letters of the names of the replicas' own directories."""

FIRST_S = 0.5
LONGEST_S = 30.0


class Backoff:
    """Backoff that doubles after each failure in a row."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._until = float("-inf")

    def failed(self, now: float) -> None:
        self._until = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def succeeded(self) -> None:
        self._wait_s, self._until = FIRST_S, float("-inf")

    def may_try(self, now: float) -> bool:
        return now >= self._until


class StoppedError(RuntimeError):
    """Error that ends the preparation of an update because the replica is stopping."""


def interrupt_if(stopped: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that raises StoppedError if `stopped` returns true."""

    def interrupt() -> None:
        if stopped():
            raise StoppedError("the replica is stopping")

    return interrupt


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """A checked update: the mirror has the target version, the engine not yet."""

    draft: Draft
    changes: tuple[ElementChange, ...]
    """The changes for the engine; empty if `whole`."""
    whole: bool
    """Whether the whole version is written, because many elements change."""
    anchor: Path | None
    """Local directory of the anchor at the start of the path."""
    fetch_ms: float
    decode_ms: float


class UpdateStaging:
    """Prepares updates, with a fetcher of chunks, threads to decode them, and a private directory for checkpoints.

    `interrupt` is called often while an anchor is read; an error that it raises ends the update.
    """

    def __init__(
        self,
        pieces: Pieces,
        directory: Path,
        decode_threads: int = 2,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._rebuilder = Rebuilder(pieces, decode_threads, directory, interrupt)

    def prepare(self, move: UpdateAction, mirror: Mirror) -> PreparedUpdate:
        """Change the mirror to the target version, with a check of each step, and return the changes.

        Raises:
            RefusedStepError: the anchor, or a delta, cannot be used.
            TimeoutError, StoreUnavailableError: bytes did not arrive in time.
            StoppedError: the replica is stopping. After every error the mirror is unchanged.
        """
        started = time.monotonic()
        draft = Draft(mirror)
        anchor, fetch_ms = self._rebuilder.follow(move.path, draft)
        try:
            changes = () if draft.fresh else draft.changes()
        except BaseException:
            draft.revert()
            raise
        whole = draft.fresh or DENSE * sum(change.indices.size for change in changes) > mirror.n_elements
        elapsed = 1e3 * (time.monotonic() - started)
        changes = () if whole else changes
        return PreparedUpdate(draft, changes, whole, anchor, fetch_ms, max(0.0, elapsed - fetch_ms))

    def save(self, mirror: Mirror) -> Path:
        """Write the mirror's version as a checkpoint for the engine, and return its directory."""
        directory = self._directory / "whole"
        mirror.save(directory)
        return directory

    def close(self) -> None:
        self._rebuilder.close()


@contextmanager
def private_directory(parent: Path | None) -> Iterator[Path]:
    """Make a temporary directory in `parent` (None: the system's) that no other replica uses: all write equal names.

    Its lock is held until the process and its engine have ended. Directories of replicas that were killed have no lock
    and are removed first: each may contain a whole checkpoint.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PRIVATE}*"):
        with suppress(OSError), _opened(left) as descriptor:  # in use, of another user, or removed meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    # Another replica looks only for the final name, and finds it locked.
    made = Path(tempfile.mkdtemp(prefix=".tidemill-", dir=parent))
    with _opened(made) as descriptor:
        with suppress(OSError):  # in a file system without locks, no replica removes the directory of another
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        own = made.rename(parent / f"{PRIVATE}{made.name.removeprefix('.tidemill-')}")
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class StartVersion:
    """The version to start with, and the offsets from which the topics are read on."""

    manifest: Manifest
    mirror: Mirror
    directory: Path
    """A whole checkpoint of that version, with its configuration and tokenizer."""
    offsets: dict[tuple[Topic, int], int]
    reason: str = "start"
    """Why and how it was reached."""


def join(
    kafka: KafkaSettings, settings: ReplicaSettings, state: ReplicaState, directory: Path, stopped: Callable[[], bool]
) -> StartVersion | None:
    """Wait for the first version that `state` chooses, and prepare it; None if stopped.

    Raises:
        TimeoutError: no usable anchor was published within `anchor_wait_s`.
    """
    deadline = time.monotonic() + settings.anchor_wait_s if settings.anchor_wait_s else None
    chunks_id, interrupt = f"{settings.replica_id}-join-chunks", interrupt_if(stopped)
    with (
        LogReader(kafka, FOLLOWED, client_id=f"{settings.replica_id}-join") as records,
        open_fetcher(
            kafka, settings.fetch_timeout_s, settings.fetch_connections, chunks_id, settings.fetch_bytes, interrupt
        ) as pieces,
        closing(UpdateStaging(pieces, directory, settings.decode_threads, interrupt)) as staging,
    ):
        found: Iterable[ConsumedRecord] = records.read_to_end()
        warned, patience = False, Backoff()
        while not stopped():
            for located in found:
                # Unreadable records are only skipped here; the subscriber dead-letters those that it reads.
                record = located.record
                if isinstance(record, Manifest | SkipDelta | GateDecision) and (objection := state.observe(record)):
                    logger.warning("%s", objection)
            if patience.may_try(time.monotonic()):
                joined = _build(state, staging, records, directory / "joined", patience)
                if joined is not None:
                    return joined
            if not warned:
                logger.warning(
                    "%s waits for a version with an anchor that the gate lets it serve: is the trainer running?",
                    settings.replica_id,
                )
                warned = True
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"no usable anchor was published within {settings.anchor_wait_s:g} s: start the trainer"
                )
            found = records.poll(settings.poll_interval_s)
    return None


def _build(
    state: ReplicaState, staging: UpdateStaging, records: LogReader, directory: Path, patience: Backoff
) -> StartVersion | None:
    while (move := state.plan()) is not None:
        mirror = Mirror()
        try:
            prepared = staging.prepare(move, mirror)
        except RefusedStepError as error:
            what = "delta to" if isinstance(error.step, Delta) else "anchor of"
            logger.warning("%s version %d cannot be used: %s", what, error.step.version, error)
            state.refused(error.step)
        except (TimeoutError, StoreUnavailableError) as error:
            logger.warning("version %d cannot be reached yet: %s", move.target.version, error)
            patience.failed(time.monotonic())
            return None
        except StoppedError:
            return None
        else:
            prepared.draft.keep()
            logger.warning("version %d: %s", move.target.version, move.reason)
            assert prepared.anchor is not None, "with nothing loaded every path begins with an anchor"
            if move.path.deltas:
                shutil.rmtree(directory, ignore_errors=True)
                mirror.save_whole(directory, prepared.anchor)
            else:
                directory = prepared.anchor
            return StartVersion(move.target, mirror, directory, records.next_offsets(), move.reason)
    return None
