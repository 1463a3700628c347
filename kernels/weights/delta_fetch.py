"""Reader of a delta's bytes, from the log by partition and offset or from the object store, with checks.

The reader follows `weights.deltas` as it grows, so that a version's chunks are usually in memory when its manifest
arrives. It seeks back to chunks that are not, and seeks past chunks that no caller wants. Invariants:

- a shard that is read to its end gives all of its bytes, in order, and no bytes of another version;
- the chunks in memory stay below a limit for a delta of any size: they are returned and released one by one;
- several shards may be read at the same time, each by its own thread. Those of one partition are read one after the
  other: each would seek away from the chunks that another one waits for.

`open_fetcher` reads over several connections, each for its share of the partitions: a client has one connection to a
broker, whose window grows with every round trip and shrinks with every loss, so that one connection is slow over a
long or lossy link. A connection is idle for a round trip between two responses: a response should have several chunks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock

import xxhash

from tidemill.kernels.wire import DeltaError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Claim, DeltaChunk, Manifest, ShardPosition
from tidemill.schemas.stored_object import object_pieces

Place = tuple[int, int]
"""Partition and offset in `weights.deltas`."""

HELD_BYTES = 256 << 20
"""Limit of the chunks that are read ahead, in bytes."""

FAR_AHEAD = 16
"""Chunks that are skipped by reading them; if more are skipped, the reader seeks to the offset. A seek discards the
client's prefetched records, which is useful only if most of them are not wanted."""

_POLL_S = 0.2


Pieces = Callable[[Manifest, ShardPosition], Generator[bytes, None, None]]
"""Yields the bytes of one shard of a delta that makes the manifest's version, in order, as `ChunkFetcher.pieces`."""


class ChunkFetcher:
    """Reader of the shards of deltas, piece by piece.

    Args:
        log: reader of `weights.deltas`; only this object uses it.
        timeout_s: longest time between the last wanted chunk and the next, in seconds.
        held_bytes: limit of the chunks in memory, in bytes.
        interrupt: called often; an error that it raises ends the read of a shard, also while it waits for a chunk.
    """

    def __init__(
        self,
        log: LogReader,
        timeout_s: float,
        held_bytes: int = HELD_BYTES,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._log, self._timeout_s, self._limit, self._interrupt = log, timeout_s, held_bytes, interrupt
        self._held: OrderedDict[Place, ConsumedRecord] = OrderedDict()
        self._held_bytes = 0
        # Known before the first chunk: a seek would discard prefetched records and pending responses.
        self._read_to = {partition: offset for (_, partition), offset in log.next_offsets().items()}
        self._wanted: set[Place] = set()
        self._arrived = 0.0
        self._lock = Condition()
        self._turns: dict[int, Lock] = {}
        """By partition; held while a shard of it is read."""

    def pieces(self, manifest: Manifest, shard: ShardPosition) -> Generator[bytes, None, None]:
        """Yield the bytes of one shard of a delta that makes `manifest`'s version, in order; all, unless it raises.

        Raises:
            DeltaError, StoredObjectError: the bytes do not match the record, or are deleted; possibly after some were
                yielded. A retry cannot help.
            TimeoutError, StoreUnavailableError: the bytes did not arrive in time; a retry may help.
        """
        if shard.uri is not None:
            for piece in object_pieces(Claim(shard.uri, shard.n_bytes, shard.digest)):
                self._interrupt()
                yield piece
            return
        digest, n_bytes = xxhash.xxh3_128(), 0
        for piece in self._logged(manifest, shard):
            self._interrupt()
            digest.update(piece)
            n_bytes += len(piece)
            yield piece
        if digest.hexdigest() != shard.digest or n_bytes != shard.n_bytes:
            raise DeltaError(f"shard {shard.shard} of version {manifest.version} does not match its record")

    def _logged(self, manifest: Manifest, shard: ShardPosition) -> Iterator[bytes]:
        places = [(shard.partition, offset) for offset in shard.offsets]
        with self._lock:
            self._wanted.update(places)
            turn = self._turns.setdefault(shard.partition, Lock())
        try:
            while not turn.acquire(timeout=_POLL_S):
                self._interrupt()
            try:
                for sequence, place in enumerate(places):
                    yield _payload(manifest, shard, sequence, self._take(place))
            finally:
                turn.release()
        finally:
            with self._lock:
                self._wanted.difference_update(places)
                # Chunks before the used ones belong to older versions or to other runs.
                last = max(shard.offsets, default=-1)
                for place in [(p, at) for p, at in self._held if p == shard.partition and at <= last]:
                    if place not in self._wanted:
                        self._forget(place)

    def _take(self, place: Place) -> ConsumedRecord:
        """Wait for one chunk, remove it from the held ones, and return it."""
        began, sought = time.monotonic(), False
        while True:
            self._interrupt()
            with self._lock:
                if place in self._held:
                    return self._forget(place)
                sought = self._seek(place, sought) or sought
                self._read()
                waited = time.monotonic() - max(began, self._arrived)
            if waited > self._timeout_s:
                raise TimeoutError(f"the chunk at {place[0]}:{place[1]} did not arrive within {self._timeout_s:g} s")

    def _seek(self, place: Place, sought: bool) -> bool:
        """Seek to a chunk that is before the reader or far after it; return whether it sought."""
        partition, offset = place
        at = self._read_to.get(partition)
        if at is not None and at <= offset <= at + FAR_AHEAD:
            return False
        if at is not None and sought and offset < at:
            raise DeltaError(f"the log no longer keeps the chunk at {partition}:{offset}: only an anchor helps")
        self._log.seek(Topic.DELTAS, partition, offset)
        self._read_to[partition] = offset
        return True

    def _read(self) -> None:
        if self._held_bytes > self._limit:
            # Other threads want the held chunks: further reading would only use more memory.
            self._lock.wait(_POLL_S)
        try:
            found = self._log.poll(_POLL_S, 1)
        except RetentionGap as gap:
            # The reader is now at the log's first offset; `_seek` raises if a caller wants a chunk before it.
            self._read_to[gap.partition] = gap.first
            return
        for located in found:
            place = (located.partition, located.offset)
            self._read_to[located.partition] = located.offset + 1
            if place in self._wanted:
                self._arrived = time.monotonic()
            if place not in self._held:
                self._held_bytes += len(located.value or b"")
            self._held[place] = located
            for unwanted in [place for place in self._held if place not in self._wanted]:
                if self._held_bytes <= self._limit:
                    break
                self._forget(unwanted)

    def _forget(self, place: Place) -> ConsumedRecord:
        located = self._held.pop(place)
        self._held_bytes -= len(located.value or b"")
        self._lock.notify_all()
        return located


def _payload(manifest: Manifest, shard: ShardPosition, sequence: int, located: ConsumedRecord) -> bytes:
    where = f"chunk {sequence} of version {manifest.version} at {located.partition}:{located.offset}"
    chunk = located.record
    if not isinstance(chunk, DeltaChunk):
        raise DeltaError(f"{where} is not a delta chunk: {located.error or type(chunk).__name__}")
    named = (manifest.run_id, manifest.branch, manifest.version, shard.shard, sequence, len(shard.offsets))
    if (chunk.run_id, chunk.branch, chunk.version, chunk.shard, chunk.sequence, chunk.total) != named:
        raise DeltaError(
            f"{where} is chunk {chunk.sequence} of {chunk.total} of shard {chunk.shard} of version {chunk.version}"
        )
    if xxhash.xxh3_128_hexdigest(chunk.payload) != chunk.digest:
        raise DeltaError(f"{where} does not have the digest in its record")
    return chunk.payload


@contextmanager
def open_fetcher(
    kafka: KafkaSettings,
    timeout_s: float,
    connections: int,
    client_id: str,
    fetch_bytes: int | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> Iterator[Pieces]:
    """Open a fetcher of deltas over several connections, which follows the log from its present end.

    Args:
        timeout_s: longest time between the last wanted chunk and the next, in seconds.
        fetch_bytes: limit of one response of the log over a connection; `LogReader`'s default if None.
        interrupt: called often; an error that it raises ends the read of a shard.

    Raises LookupError if the topic does not exist.
    """
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                LogReader(
                    kafka,
                    [Topic.DELTAS],
                    start="end",
                    client_id=f"{client_id}-{n}",
                    share=(n, connections),
                    fetch_bytes=fetch_bytes,
                )
            )
            for n in range(connections)
        ]
        fetchers = [ChunkFetcher(reader, timeout_s, interrupt=interrupt) for reader in readers]
        # Connection n reads the partitions whose number modulo the number of connections is n.
        yield lambda manifest, shard: fetchers[shard.partition % connections].pieces(manifest, shard)
