"""One shard of a delta on its way to the log: encoded once, kept aside, sent in chunks.

A chunk names how many there are, so the shard is encoded in full before the first chunk leaves. What is encoded waits
in memory, and above a limit in a temporary file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import xxhash

from tidemill.kernels.delta import StreamWriter, TensorChange, encode_tensor
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.located import Position
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import DeltaChunk, ShardPosition

CHUNK_BYTES = (1 << 20) - 4096
"""Payload of a chunk: with its other fields it stays below Kafka's default limit of 1,048,588 bytes a batch."""

MEMORY_BYTES = 64 << 20
"""Encoded bytes kept in memory; what is above goes to a temporary file."""

CHUNKS_IN_FLIGHT = 32
"""Chunks handed to the producer before their acknowledgements are awaited."""


class DeltaShard:
    """The encoded step from `parent` to `version` of the tensors of one shard; a context manager."""

    def __init__(self, version: int, parent: int, changes: Iterable[TensorChange], shard: int = 0) -> None:
        self._version = version
        self._shard = shard
        self._spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by __exit__
        self._digest = xxhash.xxh3_128()
        self._writer = StreamWriter(version, parent)
        self._write(self._writer.header())
        for change in changes:
            for block in encode_tensor(*change):
                self._write(self._writer.block(block))
        self._write(self._writer.trailer())
        self.n_bytes = self._spool.tell()

    @property
    def n_changed(self) -> int:
        """Changed elements."""
        return self._writer.changed

    @property
    def change(self) -> Fingerprint:
        """Fingerprint of the change: what it adds to the fingerprint of the parent."""
        return self._writer.change

    def send(self, producer: RecordProducer, run: RunSettings) -> ShardPosition:
        """Write the chunks to the log and wait for it. Raises DeliveryError."""
        offsets: list[int] = []
        partitions: set[int] = set()
        for batch in self._batches(run):
            for position in self._send(producer, batch):
                offsets.append(position.offset)
                partitions.add(position.partition)
        (partition,) = partitions
        return ShardPosition(
            self._shard, Topic.DELTAS.value, partition, offsets, self.n_bytes, self._digest.hexdigest()
        )

    def _send(self, producer: RecordProducer, batch: list[DeltaChunk]) -> list[Position]:
        return producer.send_acked(Topic.DELTAS, [(str(self._shard), chunk) for chunk in batch])

    def _batches(self, run: RunSettings) -> Iterator[list[DeltaChunk]]:
        batch: list[DeltaChunk] = []
        for chunk in self._chunks(run):
            batch.append(chunk)
            if len(batch) == CHUNKS_IN_FLIGHT:
                yield batch
                batch = []
        if batch:
            yield batch

    def _chunks(self, run: RunSettings) -> Iterator[DeltaChunk]:
        total = -(-self.n_bytes // CHUNK_BYTES)
        self._spool.seek(0)
        for sequence in range(total):
            payload = self._spool.read(CHUNK_BYTES)
            digest = xxhash.xxh3_128_hexdigest(payload)
            yield DeltaChunk(run.run_id, run.branch, self._version, self._shard, sequence, total, digest, payload)

    def _write(self, data: bytes) -> None:
        self._spool.write(data)
        self._digest.update(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()
