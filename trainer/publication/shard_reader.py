"""Reads the bytes of a delta's shards back, from the log or from the store.

What it keeps true: what is read to its end is every byte of a shard, in order, and of no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import xxhash

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.located import Located
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import DeltaChunk, ShardPosition
from tidemill.schemas.stored_object import StoredObject, StoredObjectError, object_pieces

DEADLINE_S = 60.0
"""Longest wait for one chunk that the log holds."""


class ShardLostError(LookupError):
    """The bytes of a shard are gone or were changed."""


class ShardReader:
    """The shards of a run's deltas; a context manager. Not safe for several threads."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._log = LogReader(kafka, [Topic.DELTAS], start="end", client_id="tidemill-publisher-deltas")
        self._ready: list[Located] = []

    def pieces(self, shard: ShardPosition) -> Iterator[bytes]:
        """The bytes of a shard in order; whole when the iterator ends.

        Raises ShardLostError, TimeoutError when the log does not deliver, StoreUnavailableError when the store fails.
        """
        if shard.uri is None:
            yield from self._logged(shard)
            return
        try:
            yield from object_pieces(StoredObject(shard.uri, shard.n_bytes, shard.digest))
        except StoredObjectError as error:
            raise ShardLostError(str(error)) from error

    def _logged(self, shard: ShardPosition) -> Iterator[bytes]:
        digest = xxhash.xxh3_128()
        for sequence, offset in enumerate(shard.offsets):
            if sequence == 0 or self._next(shard.partition) > offset:
                self._ready = []
                self._log.seek(Topic.DELTAS, shard.partition, offset)
            chunk = self._chunk(shard.partition, offset).record
            if not isinstance(chunk, DeltaChunk):
                raise ShardLostError(f"{Topic.DELTAS}[{shard.partition}] holds no delta chunk at offset {offset}")
            digest.update(chunk.payload)
            yield chunk.payload
        if digest.hexdigest() != shard.digest:
            raise ShardLostError(f"shard {shard.shard} at {shard.partition}:{shard.offsets[:1]} is not what was sent")

    def _next(self, partition: int) -> int:
        """The next offset of a partition that is not used."""
        waiting = [found.offset for found in self._ready if found.partition == partition]
        return min(waiting, default=self._log.next_offsets()[Topic.DELTAS, partition])

    def _chunk(self, partition: int, offset: int) -> Located:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while self._ready:
                found = self._ready.pop(0)
                if (found.partition, found.offset) == (partition, offset):
                    return found
                if found.partition == partition and found.offset > offset:
                    raise ShardLostError(f"{Topic.DELTAS}[{partition}] no longer holds offset {offset}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{Topic.DELTAS}[{partition}] offset {offset} not delivered in {DEADLINE_S:g} s")
            self._ready = self._log.poll(0.2, 8)

    def close(self) -> None:
        """Give the connections back."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
