"""Decodes the shards of a delta at once: reading and checking overlap, blocks are decoded beside each other.

The kernels let go of the interpreter's lock, so that threads are enough. Keeps true: nothing is written; the encoded
blocks in memory are bounded by the number of threads; a delta is given back whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Semaphore

from tidemill.kernels.delta import BlockChange, EncodedBlock, decode_delta
from tidemill.kernels.weights.graph import Delta
from tidemill.schemas.records import Manifest, ShardPosition

SHARDS_AT_ONCE = 4
"""Shards read at once: enough to fill a link whose single streams are slow."""

Pieces = Callable[[Manifest, ShardPosition], Generator[bytes, None, None]]
"""The bytes of a shard, as `ChunkFetcher.pieces`."""

Resolve = Callable[[EncodedBlock], tuple[BlockChange, ...]]
"""What a block changes; called from several threads."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a delta changes, and the milliseconds that its bytes were waited for."""

    changes: tuple[BlockChange, ...]
    fetch_ms: float


@dataclass(slots=True)
class _Attempt:
    """One delta on its way through the threads. The first error ends it."""

    delta: Delta
    resolve: Resolve
    blocks: list[Future[tuple[BlockChange, ...]]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


class Decoder:
    """Threads that decode one delta at a time. Close it before the process forks."""

    def __init__(self, threads: int) -> None:
        self._shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="tidemill-shard")
        self._blocks = ThreadPoolExecutor(threads, thread_name_prefix="tidemill-block")
        self._slots = Semaphore(2 * threads)

    def decode(self, delta: Delta, pieces: Pieces, resolve: Resolve) -> Decoded:
        """Every block of a delta, resolved.

        Raises the errors of `pieces` and `resolve`, and DeltaError for a stream that is no delta from `delta.base`.
        """
        attempt = _Attempt(delta, resolve)
        shards = [self._shards.submit(self._read, attempt, pieces(delta.manifest, shard)) for shard in delta.shards]
        seconds = [shard.result() for shard in shards]
        found = tuple(change for block in attempt.blocks for change in block.result())
        if attempt.errors:
            raise attempt.errors[0]
        return Decoded(found, 1e3 * max(seconds, default=0.0))

    def close(self) -> None:
        """End the threads."""
        self._shards.shutdown(wait=True, cancel_futures=True)
        self._blocks.shutdown(wait=True, cancel_futures=True)

    def _read(self, attempt: _Attempt, pieces: Generator[bytes, None, None]) -> float:
        """Hand the blocks of one shard on; returns the seconds that its bytes took."""
        delta = attempt.delta
        with closing(pieces), _noting(attempt):
            waits = _Waits(pieces)
            for block in decode_delta(waits, delta.version, delta.base):
                if attempt.errors:
                    break
                self._slots.acquire()
                attempt.blocks.append(self._blocks.submit(self._resolve, attempt, block))
            return waits.seconds
        return 0.0

    def _resolve(self, attempt: _Attempt, block: EncodedBlock) -> tuple[BlockChange, ...]:
        try:
            with _noting(attempt):
                return attempt.resolve(block)
            return ()
        finally:
            self._slots.release()


@contextmanager
def _noting(attempt: _Attempt) -> Iterator[None]:
    """Keep an error for `decode` to raise, so that the other threads see it and end."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - `decode` raises any error
        attempt.errors.append(error)


class _Waits:
    """An iterator that counts the seconds that its source takes."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        begun = time.monotonic()
        try:
            return next(self._source)
        finally:
            self.seconds += time.monotonic() - begun
