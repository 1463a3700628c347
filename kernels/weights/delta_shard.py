"""One shard of a delta on its way to its readers: encoded once, kept aside, sent to the log or, where large, stored.

A chunk names how many there are, so the shard is encoded in full before the first chunk leaves. What is encoded waits
in memory, and above a limit in a temporary file. A version is committed from the reports of all of its shards alone:
changes are linear fingerprints, so those of the shards add up to the tensor's wherever the tensor was cut.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import xxhash

from tidemill.kernels.delta import CodecSettings, DeltaEncoder, StreamWriter, TensorChange
from tidemill.kernels.fingerprint import ZERO, Bits, Fingerprint
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import DeltaChunk, ShardPosition
from tidemill.schemas.stored_object import PIECE_BYTES, put_object

CHUNK_BYTES = (1 << 20) - 4096
"""Payload of a chunk: with its other fields it stays below Kafka's default limit of 1,048,588 bytes a batch."""

MEMORY_BYTES = 64 << 20
"""Encoded bytes kept in memory; what is above goes to a temporary file."""

CHUNKS_IN_FLIGHT = 32
"""Chunks handed to the producer before their acknowledgements are awaited."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One shard of a version, acknowledged by the log or whole in the store."""

    position: ShardPosition
    n_bytes: int
    """Encoded bytes."""
    n_changed: int
    """Changed elements."""
    tensor_changes: Mapping[str, Fingerprint]
    """What the shard adds to the fingerprint of each tensor that it changes, by name."""


class Covered(NamedTuple):
    """What the blocks of a shard cover of a tensor: those in which nothing changed are left out."""

    n: int
    """Elements."""
    fingerprint: Fingerprint
    """Of these elements after the change."""


class PartChange(NamedTuple):
    """A run of a tensor's elements before and after a step: what one shard holds of the tensor."""

    name: str
    dtype: str
    old_bits: Bits
    new_bits: Bits
    """uN, of `old_bits`' shape."""
    start: int = 0
    """Flat element of the tensor that the run begins with."""
    total: int | None = None
    """Elements of the tensor; None where the run is its end."""


@dataclass(frozen=True, slots=True)
class ShardClaims:
    """Where shards lie that are too large for the log."""

    folder: str
    """An fsspec URL or a directory."""
    limit_bytes: int
    """A shard of more encoded bytes is stored as one object."""


class DeltaShard:
    """The encoded step from `parent` to `version` of the tensors of one shard; a context manager.

    Raises DeltaError for a change that cannot be encoded, and what `changes` raises.
    """

    def __init__(
        self,
        version: int,
        parent: int,
        changes: Iterable[TensorChange | PartChange],
        shard: int = 0,
        settings: CodecSettings | None = None,
    ) -> None:
        self._version = version
        self._shard = shard
        self._spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by __exit__
        self._digest = xxhash.xxh3_128()
        self._writer = StreamWriter(version, parent)
        self._tensor_changes: dict[str, Fingerprint] = {}
        self._covered: dict[str, Covered] = {}
        try:
            self._encode(changes, settings or CodecSettings())
        except BaseException:
            self._spool.close()
            raise
        self.n_bytes = self._spool.tell()

    @property
    def n_changed(self) -> int:
        """Changed elements."""
        return self._writer.changed

    @property
    def change(self) -> Fingerprint:
        """Fingerprint of the change: what it adds to the fingerprint of the parent."""
        return self._writer.change

    @property
    def tensor_changes(self) -> Mapping[str, Fingerprint]:
        """What the shard adds to the fingerprint of each tensor that it changes, by name."""
        return self._tensor_changes

    @property
    def covered(self) -> Mapping[str, Covered]:
        """What the shard covers of each tensor that it changes, by name."""
        return self._covered

    def send(self, producer: RecordProducer, run: RunSettings, claims: ShardClaims | None = None) -> ShardPosition:
        """Write the shard to the log, or to the store where `claims` says so, and wait until it is there.

        Raises DeliveryError when the log does not take it, StoreUnavailableError when the store fails.
        """
        if claims is not None and self.n_bytes > claims.limit_bytes:
            return self._store(claims.folder)
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

    def report(self, position: ShardPosition) -> ShardReport:
        """What the committer needs to know of the shard, once it has been sent."""
        return ShardReport(position, self.n_bytes, self.n_changed, dict(self._tensor_changes))

    def _encode(self, changes: Iterable[TensorChange | PartChange], settings: CodecSettings) -> None:
        self._write(self._writer.header())
        for block in DeltaEncoder(settings).encode(changes):
            self._write(self._writer.block(block.data))
            for name, change in block.changes.items():
                self._tensor_changes[name] = self._tensor_changes.get(name, ZERO) + change
                n, made = self._covered.get(name, (0, ZERO))
                self._covered[name] = Covered(n + block.targets[name][0], made + block.targets[name][1])
        self._write(self._writer.trailer())

    def _store(self, folder: str) -> ShardPosition:
        name = f"v{self._version:08d}-shard{self._shard}-{self._digest.hexdigest()}.delta"
        self._spool.seek(0)
        stored = put_object(f"{folder.rstrip('/')}/{name}", iter(lambda: self._spool.read(PIECE_BYTES), b""))
        return ShardPosition(self._shard, Topic.DELTAS.value, 0, [], stored.n_bytes, stored.digest, stored.uri)

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
