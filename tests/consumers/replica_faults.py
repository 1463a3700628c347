"""The faults of a weight log and a late joiner, each as a story on a real Kafka with the replica's reactions.

    STORIES["gap"](Site(kafka_settings, directory))

The replica is real (join, fetch, decode, mirror, plans and ledger) except for its engine, which is made of arrays.
Every story begins with a replica at version 0, the only anchor, and ends healed: the engine then holds the newest
version's weights, bit for bit. `Site.acks` contains the acknowledgements on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from tests.consumers import replica_driver as driver
from tests.consumers.replica_support import ArrayReplica, base_directory, small_view
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.staging import FOLLOWED, join
from tidemill.consumers.replica.state import ReplicaState
from tidemill.kernels.weights import delta_shard
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import DeltaChunk, Manifest, WeightAck

CHUNK_BYTES = 256
"""Small, so that a delta has several chunks."""

Tamper = Callable[[DeltaChunk], list[DeltaChunk]]
"""Returns the chunks that are written to the log in place of a chunk."""


class Tampering:
    """A producer that changes chunks before it writes them; a position is that of the first chunk written for each."""

    def __init__(self, producer: RecordProducer, tamper: Tamper) -> None:
        self._producer, self._tamper = producer, tamper

    def send_acked(self, topic: Topic, records: list[tuple[str, DeltaChunk]]) -> list[Any]:
        return [
            self._producer.send_acked(topic, [(key, chunk) for chunk in self._tamper(record)])[0]
            for key, record in records
        ]


class Site:
    """One branch on a real Kafka: its trainer, and a replica that reads what the trainer wrote."""

    def __init__(self, kafka: KafkaSettings, directory: Path) -> None:
        create_topics(kafka)
        self._kafka, self.directory = kafka, directory
        self.base = base_directory(directory / "base")
        self.producer = RecordProducer(kafka, "trainer")
        self.views = {0: small_view()}
        self.view = self.views[0]
        anchor = driver.save_view(self.view, self.base, directory / "v0")
        self.first = driver.publish(None, 0, None, self.view, anchor)
        self.commit(self.first)
        self.chunks = LogReader(kafka, [Topic.DELTAS], start="end")
        self.records = LogReader(kafka, FOLLOWED)
        self.replica = ArrayReplica(self.first, self.chunks, directory / "staging", timeout_s=10.0)

    @property
    def acks(self) -> list[WeightAck]:
        """All acknowledgements of the replica."""
        return self.replica.acks

    def make(
        self, version: int, parent: int, *, anchor: bool = False, seed: int = 0, tamper: Tamper | None = None
    ) -> Manifest:
        """Make a version from its parent and write its chunks, without its manifest."""
        new = driver.nudged(self.views[parent], seed or version, fraction=0.2)
        self.view = self.views[version] = new
        where = self.directory / f"v{version}"
        saved = driver.save_view(new, self.base, where) if anchor else None
        log = self.producer if tamper is None else Tampering(self.producer, tamper)
        held, delta_shard.CHUNK_BYTES = delta_shard.CHUNK_BYTES, CHUNK_BYTES
        try:
            return driver.publish(log, version, self.views[parent], new, saved, parent=parent)
        finally:
            delta_shard.CHUNK_BYTES = held

    def commit(self, manifest: Manifest) -> Manifest:
        """Write a manifest."""
        self.producer.send_acked(Topic.MANIFESTS, [(manifest.branch, manifest)])
        return manifest

    def train(self, version: int, parent: int | None = None, **how: Any) -> Manifest:
        """`make`, then `commit`."""
        return self.commit(self.make(version, version - 1 if parent is None else parent, **how))

    def follow(self) -> None:
        """Let the replica process all records in the log."""
        self.replica.observe(*(located.record for located in self.records.read_to_end()))

    def healed(self) -> bool:
        """Whether the replica serves the newest version's weights."""
        newest = max(self.views)
        return self.replica.engine.version == newest and self.replica.engine.holds(self.views[newest])

    def close(self) -> None:
        """Close the replica, its readers and the producer."""
        self.replica.close()
        for reader in (self.chunks, self.records):
            reader.close()
        self.producer.flush()


def late_joiner(site: Site) -> None:
    """A replica starts after six versions: it replays their deltas on the anchor, then follows."""
    for version in range(1, 7):
        site.train(version)
    state = ReplicaState(driver.RUN.run_id, driver.RUN.branch)
    settings = ReplicaSettings(replica_id="replica-late")
    joined = join(site._kafka, settings, state, site.directory / "late", lambda: False)
    assert joined is not None and joined.manifest.version == 6
    site.replica.close()
    anchored = replace(joined.manifest, anchor=driver.anchor_of(joined.directory))
    site.replica = ArrayReplica(anchored, site.chunks, site.directory / "staging", 10.0, reason=joined.reason)
    site.train(7)
    site.follow()


def gap(site: Site) -> None:
    """A manifest is missing: its child is refused, and the next anchor leads past both."""
    site.make(1, 0)
    site.train(2)
    site.follow()
    site.train(3, anchor=True)
    site.follow()


def fork(site: Site) -> None:
    """Two trainers write a version: the first one stays, the second is refused, and the chain continues."""
    site.train(1)
    site.follow()
    first = site.views[1]
    site.train(1, seed=99)
    site.views[1] = first
    site.follow()
    site.train(2)
    site.follow()


def duplicated_chunks(site: Site) -> None:
    """Chunks are in the log twice, which changes nothing; then a manifest names one of them twice and is refused."""
    site.train(1, tamper=lambda chunk: [chunk, chunk])
    site.follow()
    _misplaced(site, lambda offsets: [offsets[0], *offsets[:-1]])


def reordered_chunks(site: Site) -> None:
    """A manifest names a delta's chunks in another order."""
    site.train(1)
    site.follow()
    _misplaced(site, lambda offsets: [offsets[1], offsets[0], *offsets[2:]])


def _misplaced(site: Site, move: Callable[[list[int]], list[int]]) -> None:
    manifest = site.make(2, 1)
    shard = manifest.shards[0]
    assert len(shard.offsets) > 2
    site.commit(replace(manifest, shards=[replace(shard, offsets=move(shard.offsets))]))
    site.follow()
    site.train(3, anchor=True)
    site.follow()


def corrupt_chunk(site: Site) -> None:
    """A bit of a chunk flips, then a bit and the chunk's digest change together; the next anchor leads past both."""
    site.train(1, tamper=lambda chunk: [_flipped(chunk)])
    site.follow()
    site.train(2, anchor=True)
    site.follow()
    site.train(3, tamper=lambda chunk: [_sealed(_flipped(chunk))])
    site.follow()
    site.train(4, anchor=True)
    site.follow()


def _flipped(chunk: DeltaChunk) -> DeltaChunk:
    payload = bytearray(chunk.payload)
    payload[len(payload) // 2] ^= 1
    return replace(chunk, payload=bytes(payload))


def _sealed(chunk: DeltaChunk) -> DeltaChunk:
    return replace(chunk, digest=xxhash.xxh3_128_hexdigest(chunk.payload))


def trainer_rollback(site: Site) -> None:
    """The trainer goes back to version 1: its second version 2 is refused, its version 4 is served."""
    for version in range(1, 4):
        site.train(version)
        site.follow()
    second = site.views[2]
    site.train(2, parent=1, seed=77)
    site.views[2] = second
    site.follow()
    site.train(4, parent=1)
    site.follow()


STORIES: dict[str, Callable[[Site], None]] = {
    "late joiner": late_joiner,
    "gap": gap,
    "fork": fork,
    "duplicated chunks": duplicated_chunks,
    "reordered chunks": reordered_chunks,
    "corrupt chunk": corrupt_chunk,
    "trainer rollback": trainer_rollback,
}
