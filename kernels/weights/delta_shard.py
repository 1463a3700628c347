"""One shard of a delta: encoded once, buffered, and written to the log or, if it is large, to the object store.

Each chunk contains the total number of chunks, so the shard is encoded in full before the first chunk is sent. The
encoded bytes are buffered in memory, above a limit in a temporary file. A commit needs only the reports of all shards:
changes are linear fingerprints, so the sum over the shards is the tensor's change for any cuts of the tensor.
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
"""Payload of a chunk: with its other fields it stays below Kafka's default limit of 1,048,588 bytes per batch."""

MEMORY_BYTES = 64 << 20
"""Limit of encoded bytes in memory; above it they are in a temporary file."""

CHUNKS_IN_FLIGHT = 32
"""Chunks given to the producer before it waits for their acknowledgements."""


class DeltaShard:
    """The encoded change from `parent` to `version` of the tensors of one shard; a context manager.

    Raises DeltaError if a change cannot be encoded, and the errors of `changes`.
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
        """For each tensor: number of its elements in blocks (blocks without a change are left out), and the
        fingerprint of these elements after the change."""
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
        """Write the shard to the log and wait for the acknowledgements.

        A shard of more than `limit_bytes` encoded bytes is stored as one object below `folder` (an fsspec URL or a
        directory) instead; without a limit, no shard is.

        Raises DeliveryError if the log does not acknowledge it, StoreUnavailableError if the store fails.
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
