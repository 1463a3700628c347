"""A version rebuilt from the log: an anchor if the path begins with one, then the deltas, with a check of each step.

Used for every update path: by a publisher without a copy, a replica that joins, follows or rolls back, and the
operator's commands. Invariants:

- after each step the mirror is a version whose fingerprint equals its manifest's; at the end, and with `recount` after
  each step, also for each tensor; every block of a delta is checked against exactly the weights that it changes;
- a delta is decoded whole or not at all: its shards are read concurrently, reading and checking overlap, and blocks
  are decoded in parallel. The kernels release the interpreter's lock, so that threads are sufficient;
- if a path cannot be followed, the mirror is not changed, and the error names the anchor or the delta;
- memory, if the mirror was empty: one copy of the weights, the encoded blocks in progress, which the number of threads
  limits, and the fetcher's chunks; otherwise also the previous values of the changed elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Semaphore

from tidemill.kernels.block import EncodedBlock
from tidemill.kernels.delta import BlockChange, decode_delta
from tidemill.kernels.weights.anchor import anchor_weights, discard_copy, fetch_anchor
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.kernels.weights.delta_fetch import Pieces, open_fetcher
from tidemill.kernels.weights.graph import Delta, PathStep, UpdatePath, VersionError
from tidemill.kernels.weights.held import HeldVersion
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.kernels.weights.tensor_parts import TensorPart
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.kernels.wire import DeltaError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Manifest, ShardPosition, TensorInfo
from tidemill.schemas.stored_object import StoredObjectError

SHARDS_AT_ONCE = 4
"""Shards read at the same time: enough to fill a link on which a single stream is slow."""

Resolve = Callable[[EncodedBlock], tuple[BlockChange, ...]]
"""Returns the changes of a block; called from several threads."""


class Decoder:
    """Threads that decode one delta at a time. Close it before the process forks."""

    def __init__(self, threads: int) -> None:
        self._shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="tidemill-shard")
        self._blocks = ThreadPoolExecutor(threads, thread_name_prefix="tidemill-block")
        self._slots = Semaphore(2 * threads)

    def decode(self, delta: Delta, pieces: Pieces, resolve: Resolve) -> tuple[tuple[BlockChange, ...], float]:
        """Return every block of a delta, resolved; and the wait for its bytes, in milliseconds.

        Raises the errors of `pieces` and `resolve`, and DeltaError if the stream is not a delta from `delta.base`.
        """
        blocks: list[Future[tuple[BlockChange, ...]]] = []
        # The first error ends the delta: the other threads see it here.
        errors: list[Exception] = []

        def resolved(block: EncodedBlock) -> tuple[BlockChange, ...]:
            try:
                return resolve(block)
            except Exception as error:  # noqa: BLE001 - any error is raised below
                errors.append(error)
                return ()
            finally:
                self._slots.release()

        def read(shard: ShardPosition) -> float:
            """Submit the blocks of one shard for decoding; return the wait for its bytes, in seconds."""
            waited = [0.0]
            try:
                with closing(pieces(delta.manifest, shard)) as source:
                    for block in decode_delta(_timed(source, waited), delta.version, delta.base):
                        if errors:
                            break
                        self._slots.acquire()
                        blocks.append(self._blocks.submit(resolved, block))
            except Exception as error:  # noqa: BLE001 - any error is raised below
                errors.append(error)
            return waited[0]

        seconds = [shard.result() for shard in [self._shards.submit(read, shard) for shard in delta.shards]]
        found = tuple(change for block in blocks for change in block.result())
        if errors:
            raise errors[0]
        return found, 1e3 * max(seconds, default=0.0)

    def close(self) -> None:
        self._shards.shutdown(wait=True, cancel_futures=True)
        self._blocks.shutdown(wait=True, cancel_futures=True)


def _timed(source: Iterator[bytes], waited: list[float]) -> Iterator[bytes]:
    """Yield the pieces of a shard; add the wait for each to `waited[0]`, in seconds."""
    while True:
        started = time.monotonic()
        piece = next(source, None)
        waited[0] += time.monotonic() - started
        if piece is None:
            return
        yield piece


CHUNK_WAIT_S = 60.0
"""Longest wait of a publisher for one chunk that is in the log, in seconds."""


class RefusedStepError(ValueError):
    """Error for a step of a path that cannot be used, for which a retry cannot help: an anchor that is missing, damaged
    or not the version that its manifest names; a delta whose bytes are wrong, deleted, or do not lead from its base to
    its version."""

    def __init__(self, step: PathStep, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class Rebuilder:
    """Follows update paths, one at a time. Close it before the process forks.

    Args:
        pieces: source of the bytes of deltas.
        threads: number of threads that decode the blocks of a delta.
        directory: directory to which the files of remote anchors are copied, with configuration and tokenizer. If
            None, they are read file by file, and at most one of them is on the disk.
        interrupt: called often while an anchor is read; an error that it raises ends the update.
    """

    def __init__(
        self,
        pieces: Pieces,
        threads: int,
        directory: Path | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._pieces, self._directory, self._interrupt = pieces, directory, interrupt
        self._decoder = Decoder(threads)

    def follow(
        self,
        path: UpdatePath,
        draft: Draft,
        *,
        recount: bool = False,
        outline: Sequence[TensorInfo] = (),
        progress: Callable[[PathStep], None] = lambda _: None,
    ) -> tuple[Path | None, float]:
        """Change a mirror to the last version of a path. The caller keeps or reverts the draft afterwards.

        Returns the local directory of the path's anchor (None without an anchor, or if its files are not kept), and the
        wait for the bytes of deltas, in milliseconds.

        Args:
            recount: compare every tensor of every version of the path, and compute the fingerprints of changed tensors
                from the weights; otherwise compare only the last version's, with the deltas' fingerprints.
            outline: names, types and shapes of the tensors, for an anchor whose manifest does not list them.
            progress: called before each step.

        Raises:
            RefusedStepError: a step cannot be used.
            TimeoutError, StoreUnavailableError: the log or the store does not answer. The draft is reverted after
                every error.
        """
        anchor, fetch_ms, kept = None, 0.0, False
        try:
            for step in path.steps:
                progress(step)
                try:
                    if isinstance(step, Delta):
                        compare = recount or step is path.deltas[-1]
                        fetch_ms += self._advance(step, draft, compare=compare, recount=recount)
                    else:
                        anchor = self._load(step, draft, outline)
                except (WeightFilesError, DeltaError, StoredObjectError) as error:
                    raise RefusedStepError(step, str(error)) from error
            # An engine that starts with the version reads the anchor's files.
            kept = draft.fresh
        except BaseException:
            draft.revert()
            raise
        finally:
            if not kept and self._directory and path.anchor is not None and path.anchor.anchor is not None:
                discard_copy(path.anchor.anchor.uri, self._directory)
        return anchor, fetch_ms

    def close(self) -> None:
        self._decoder.close()

    def _load(self, manifest: Manifest, draft: Draft, outline: Sequence[TensorInfo]) -> Path | None:
        if manifest.anchor is None:
            raise WeightFilesError(f"version {manifest.version} has no anchor")
        uri, files = manifest.anchor.uri, None
        if self._directory is not None:
            files = fetch_anchor(uri, self._directory, self._interrupt)
        weights = anchor_weights(uri) if files is None else map_checkpoint(files).items()

        def interruptible() -> Iterator[tuple[str, Weight]]:
            for named in weights:
                self._interrupt()
                yield named

        draft.load(interruptible(), uri, with_tensors(manifest), outline)
        return files

    def _advance(self, delta: Delta, draft: Draft, *, compare: bool, recount: bool) -> float:
        if draft.mirror.version != delta.base:
            raise DeltaError(f"it starts from version {delta.base}, version {draft.mirror.version} is held")
        changes, fetch_ms = self._decoder.decode(delta, self._pieces, draft.resolve)
        draft.advance(changes, delta.manifest)
        if compare:
            draft.check(with_tensors(delta.manifest))
        if recount:
            draft.recount(change.name for change in changes)
        return fetch_ms


def rebuild(kafka: KafkaSettings, path: UpdatePath, tensors: Sequence[TensorInfo]) -> HeldVersion:
    """Rebuild the whole last version of `path`, which starts at an anchor, for a publisher that continues it.

    Args:
        tensors: tensors of any version of the chain, for their types: the file format has fewer types than a version
            can have. Their fingerprints are not read.

    Raises VersionError if the anchor or a delta is missing or damaged, TimeoutError or StoreUnavailableError if the
    log or the store does not answer.
    """
    assert path.anchor is not None
    last = path.deltas[-1].manifest if path.deltas else path.anchor
    mirror = Mirror()
    # One thread: this runs at the same time as a training step.
    with (
        open_fetcher(kafka, CHUNK_WAIT_S, 1, "tidemill-publisher-deltas") as pieces,
        closing(Rebuilder(pieces, threads=1)) as rebuilder,
    ):
        try:
            rebuilder.follow(path, Draft(mirror), outline=tensors)
        except RefusedStepError as error:
            raise VersionError(
                f"version {last.version} of run {last.run_id}, branch {last.branch}, cannot be rebuilt: {error}"
            ) from error
    parts = {one.name: TensorPart(one.name, one.dtype, tuple(one.shape), 0, mirror.bits(one.name)) for one in tensors}
    return HeldVersion(last.version, parts)
