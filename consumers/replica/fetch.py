"""Reads the chunks that a manifest names, by partition and offset, and checks them before anything is decoded.

The reader follows `weights.deltas` as it grows, so that a version's chunks are usually here when its manifest arrives;
it goes back where they are not. Keeps true: what is returned is every byte of the delta, in order, and of no other
version; the chunks held ahead of their manifest stay below a limit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import xxhash

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.located import Located
from tidemill.schemas.records import DeltaChunk, Manifest, ShardPosition

Place = tuple[int, int]
"""Partition and offset in `weights.deltas`."""

_HELD_BYTES = 256 << 20
_POLL_S = 0.2


class CorruptDeltaError(ValueError):
    """The bytes in the log are not the delta that the manifest names, or are gone: trying again cannot help."""


class FetchTimeoutError(TimeoutError):
    """The chunks did not arrive in time; they may still come."""


class ChunkLog(Protocol):
    """The part of a `LogReader` on `weights.deltas` that is used here."""

    def poll(self, timeout_s: float, max_records: int) -> list[Located]:
        """The next records."""

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Go to an offset."""


class ChunkFetcher:
    """Chunks by their place in the log, read ahead and kept until they are used."""

    def __init__(self, log: ChunkLog, timeout_s: float) -> None:
        self._log = log
        self._timeout_s = timeout_s
        self._held: OrderedDict[Place, Located] = OrderedDict()
        self._held_bytes = 0
        self._read_to: dict[int, int] = {}

    def fetch(self, manifest: Manifest) -> list[list[bytes]]:
        """The payloads of a delta's chunks, in order, one list a shard.

        Raises:
            CorruptDeltaError: a chunk is not what the manifest says, or the log no longer keeps it.
            FetchTimeoutError: the chunks did not arrive in time.
        """
        wanted = {(shard.partition, offset) for shard in manifest.shards for offset in shard.offsets}
        self._go_back_for(wanted)
        self._read_until(wanted)
        pieces = [list(self._payloads(manifest, shard)) for shard in manifest.shards]
        for shard, payloads in zip(manifest.shards, pieces, strict=True):
            _check_shard(manifest, shard, payloads)
        self._drop(wanted)
        return pieces

    def _go_back_for(self, wanted: set[Place]) -> None:
        missing: dict[int, int] = {}
        for partition, offset in wanted - self._held.keys():
            if offset < self._read_to.get(partition, 0) or partition not in self._read_to:
                missing[partition] = min(offset, missing.get(partition, offset))
        for partition, offset in missing.items():
            self._log.seek(Topic.DELTAS, partition, offset)
            self._read_to[partition] = offset

    def _read_until(self, wanted: set[Place]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while missing := wanted - self._held.keys():
            gone = sorted(place for place in missing if place[1] < self._read_to[place[0]])
            if gone:
                raise CorruptDeltaError(f"the log no longer keeps the chunk at {gone[0]}: only an anchor can help")
            if time.monotonic() > deadline:
                raise FetchTimeoutError(f"{len(missing)} chunks did not arrive within {self._timeout_s:g} s")
            for located in self._log.poll(_POLL_S, 1):
                self._hold(located)

    def _hold(self, located: Located) -> None:
        place = (located.partition, located.offset)
        self._read_to[located.partition] = located.offset + 1
        if place not in self._held:
            self._held_bytes += len(located.value or b"")
        self._held[place] = located
        while self._held_bytes > _HELD_BYTES and len(self._held) > 1:
            self._forget(next(iter(self._held)))

    def _forget(self, place: Place) -> None:
        self._held_bytes -= len(self._held.pop(place).value or b"")

    def _drop(self, used: set[Place]) -> None:
        # Chunks below the used ones belong to versions that are behind, or to other runs.
        last = {partition: max(o for p, o in used if p == partition) for partition, _ in used}
        for place in [place for place in self._held if place[1] <= last.get(place[0], -1)]:
            self._forget(place)

    def _payloads(self, manifest: Manifest, shard: ShardPosition) -> Iterator[bytes]:
        for sequence, offset in enumerate(shard.offsets):
            yield _payload(manifest, shard, sequence, self._held[(shard.partition, offset)])


def _payload(manifest: Manifest, shard: ShardPosition, sequence: int, located: Located) -> bytes:
    where = f"chunk {sequence} of version {manifest.version} at {located.partition}:{located.offset}"
    chunk = located.record
    if not isinstance(chunk, DeltaChunk):
        raise CorruptDeltaError(f"{where} is not a delta chunk: {located.error or type(chunk).__name__}")
    named = (manifest.run_id, manifest.branch, manifest.version, shard.shard, sequence, len(shard.offsets))
    if (chunk.run_id, chunk.branch, chunk.version, chunk.shard, chunk.sequence, chunk.total) != named:
        raise CorruptDeltaError(f"{where} is of version {chunk.version}, shard {chunk.shard}, place {chunk.sequence}")
    if xxhash.xxh3_128_hexdigest(chunk.payload) != chunk.digest:
        raise CorruptDeltaError(f"{where} does not have the digest that it states")
    return chunk.payload


def _check_shard(manifest: Manifest, shard: ShardPosition, payloads: list[bytes]) -> None:
    digest = xxhash.xxh3_128()
    for payload in payloads:
        digest.update(payload)
    if digest.hexdigest() != shard.digest or sum(map(len, payloads)) != shard.n_bytes:
        raise CorruptDeltaError(f"shard {shard.shard} of version {manifest.version} is not what its manifest names")
