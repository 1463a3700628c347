"""One shard of a delta on its way to its readers: encoded once, kept aside, sent to the log or, where large, stored.

A chunk names how many there are, so the shard is encoded in full before the first chunk leaves. What is encoded waits
in memory, and above a limit in a temporary file. A version is committed from the reports of all of its shards alone:
changes are linear fingerprints, so those of the shards add up to the tensor's wherever the tensor was cut.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Self

import xxhash

from tidemill.kernels.block import CodecSettings
from tidemill.kernels.delta import StreamWriter
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.encoder import DeltaEncoder
from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.kernels.weights.tensor_parts import ShardReport
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import DeltaChunk, ShardPosition
from tidemill.schemas.stored_object import PIECE_BYTES, put_object

CHUNK_BYTES = (1 << 20) - 4096
"""Payload of a chunk: with its other fields it stays below Kafka's default limit of 1,048,588 bytes a batch."""

MEMORY_BYTES = 64 << 20
"""Encoded bytes kept in memory; what is above goes to a temporary file."""

CHUNKS_IN_FLIGHT = 32
"""Chunks handed to the producer before their acknowledgements are awaited."""


class DeltaShard:
    """The encoded step from `parent` to `version` of the tensors of one shard; a context manager.

    Raises DeltaError for a change that cannot be encoded, and what `changes` raises.
    """

    def __init__(
        self,
        version: int,
        parent: int,
        changes: Iterable[TensorChange],
        shard: int = 0,
        settings: CodecSettings | None = None,
    ) -> None:
        self._version = version
        self._shard = shard
        self._spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by __exit__
        self._digest = xxhash.xxh3_128()
        self.covered: dict[str, tuple[int, Fingerprint]] = {}
        """By tensor: how many of its elements lie in blocks (those without a change are left out), and their
        fingerprint after the change."""
        writer = StreamWriter(version, parent)
        try:
            self._write(writer.header())
            for block in DeltaEncoder(settings or CodecSettings()).encode(changes):
                self._write(writer.block(block.data))
                for name, (more, target) in block.targets.items():
                    n, made = self.covered.get(name, (0, ZERO))
                    self.covered[name] = n + more, made + target
            self._write(writer.trailer())
        except BaseException:
            self._spool.close()
            raise
        self.n_bytes = self._spool.tell()
        self.n_changed = writer.changed
        """Changed elements."""
        self.change = writer.change
        """The shard's summand in the fingerprint, added to that of the parent."""

    def send(
        self, producer: RecordProducer, run: RunSettings, folder: str = "", limit_bytes: int | None = None
    ) -> ShardReport:
        """Write the shard to the log and wait until it is there.

        A shard of more than `limit_bytes` encoded bytes becomes one object below `folder` (an fsspec URL or a
        directory) instead; without a limit none does.

        Raises DeliveryError when the log does not take it, StoreUnavailableError when the store fails.
        """
        digest, topic = self._digest.hexdigest(), Topic.DELTAS.value
        if limit_bytes is not None and self.n_bytes > limit_bytes:
            name = f"v{self._version:08d}-shard{self._shard}-{digest}.delta"
            self._spool.seek(0)
            pieces = iter(lambda: self._spool.read(PIECE_BYTES), b"")
            stored = put_object(f"{folder.rstrip('/')}/{name}", pieces)
            position = ShardPosition(self._shard, topic, 0, [], stored.n_bytes, stored.digest, stored.uri)
            return ShardReport(position, self.n_changed, self.change)
        offsets: list[int] = []
        partitions: set[int] = set()
        chunks = self._chunks(run)
        while batch := list(islice(chunks, CHUNKS_IN_FLIGHT)):
            for at in producer.send_acked(Topic.DELTAS, [(str(self._shard), chunk) for chunk in batch]):
                offsets.append(at.offset)
                partitions.add(at.partition)
        (partition,) = partitions
        position = ShardPosition(self._shard, topic, partition, offsets, self.n_bytes, digest)
        return ShardReport(position, self.n_changed, self.change)

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

    def __exit__(self, *exception: object) -> None:
        self._spool.close()
