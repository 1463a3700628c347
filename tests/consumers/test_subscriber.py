"""The subscriber over an engine of plain arrays and a log in memory: damage is refused, served never, healed later."""

import asyncio
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tidemill.consumers.replica.fetch import ChunkFetcher, CorruptDeltaError, FetchTimeoutError
from tidemill.consumers.replica.ledger import Identity, Ledger
from tidemill.consumers.replica.mirror import Mirror
from tidemill.consumers.replica.proof import Applied, Proof
from tidemill.consumers.replica.staging import Staging
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import ReplicaFault, Subscriber
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.schemas.records import AckStatus

_PATH = Path(__file__).with_name("replica_driver.py")
_SPEC = importlib.util.spec_from_file_location("replica_driver", _PATH)
driver = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = driver
_SPEC.loader.exec_module(driver)


class ArrayEngine:
    """The subscriber's engine over arrays in checkpoint coordinates, whose memory can be made to fail."""

    def __init__(self, view):
        self.live = {name: bits.reshape(-1).copy() for name, bits in view.items()}
        self.undo_log = []
        self.version = 0
        self.lose_writes = False

    async def apply(self, changes, version):
        self.undo_log = [(c.name, c.indices, self.live[c.name][c.indices]) for c in changes]
        for change in changes[1 if self.lose_writes else 0 :]:
            self.live[change.name][change.indices] = change.bits
        self.undo_before, self.version = self.version, version
        return Applied(0.1, 0.2, 1.0, 3)

    async def undo(self):
        for name, indices, bits in self.undo_log:
            self.live[name][indices] = bits
        self.version = self.undo_before

    async def load(self, directory, version):
        if not self.lose_writes:
            reader = driver.AnchorReader(directory)
            self.live = {name: reader.bits(name) for name in reader.names}
        self.version = version
        return Applied(0.1, 0.2, 1.0, 3)

    async def prove(self):
        tensors = {name: fingerprint(bits, TensorKey.of(name)) for name, bits in self.live.items()}
        total = sum(tensors.values(), start=ZERO).hex()
        return Proof(total, {name: value.hex() for name, value in tensors.items()}, "", 0.1)


class Harness:
    """A subscriber that serves version 0 of a small set of tensors."""

    def __init__(self, directory):
        random = np.random.default_rng(0)
        shapes = {"a.weight": (40, 30), "b.weight": (500,)}
        self.view = {name: random.integers(0, 1 << 14, shape, dtype=np.uint16) for name, shape in shapes.items()}
        self.base = directory / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text("{}")
        self.directory, self.log, self.acks = directory, driver.MemoryLog(), []
        anchor = driver.save_view(self.view, self.base, directory / "v0")
        first = driver.publish(self.log, 0, None, self.view, anchor)
        self.engine, self.state = ArrayEngine(self.view), ReplicaState("test", "main")
        self.state.remember(first)
        identity = Identity("replica-t", "here", "test", "main", "i", 1)
        ledger = Ledger(identity, self.acks.append, lambda: 0)
        staging = Staging(ChunkFetcher(self.log, timeout_s=0.5), directory / "staging")
        mirror = Mirror.from_anchor(anchor, first)
        self.subscriber = Subscriber(self.engine, self.state, mirror, staging, ledger)
        asyncio.run(self.subscriber.begin(first))

    def next(self, anchor=False):
        """Publish the next version; returns its manifest."""
        old, version = self.view, getattr(self, "version", 0) + 1
        self.version, self.view = version, driver.nudged(self.view, version)
        where = driver.save_view(self.view, self.base, self.directory / f"v{version}") if anchor else None
        return driver.publish(self.log, version, old, self.view, where)

    def observe(self, manifest):
        """Hand a manifest over; returns the acknowledgements that it caused."""
        before = len(self.acks)
        asyncio.run(self.subscriber.observe(manifest))
        return [(ack.status, ack.version, ack.serving_version) for ack in self.acks[before:]]


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.subscriber.close()


def test_every_version_is_applied_proved_and_acknowledged(harness):
    for version in range(1, 6):
        manifest = harness.next()
        assert harness.observe(manifest) == [(AckStatus.PROVED, version, version)]
        assert harness.acks[-1].fingerprint == manifest.fingerprint
    assert all(np.array_equal(harness.engine.live[n], b.reshape(-1)) for n, b in harness.view.items())


def test_versions_replay_over_chunks_that_were_read_before(harness):
    manifests = [harness.next() for _ in range(3)]
    assert harness.observe(manifests[2])[-1] == (AckStatus.REFUSED, 3, 0)
    for manifest in manifests[:2]:
        assert harness.observe(manifest) == [(AckStatus.PROVED, manifest.version, manifest.version)]
    asyncio.run(harness.subscriber.retry())
    assert (harness.acks[-1].status, harness.acks[-1].serving_version) == (AckStatus.ANCHORED, 3)


def test_a_corrupt_chunk_is_refused_untouched_and_healed_by_the_next_anchor(harness):
    harness.observe(harness.next())
    held = {name: bits.copy() for name, bits in harness.engine.live.items()}
    broken = harness.next()
    driver.corrupt(harness.log, broken.shards[0].offsets[0])
    assert harness.observe(broken) == [(AckStatus.REFUSED, 2, 1)]
    assert harness.acks[-1].fingerprint == "" and "digest" in harness.acks[-1].reason
    assert all(np.array_equal(held[name], harness.engine.live[name]) for name in held)
    assert harness.observe(harness.next()) == [(AckStatus.REFUSED, 3, 1)]
    anchored = harness.next(anchor=True)
    assert harness.observe(anchored) == [(AckStatus.ANCHORED, 4, 4)]
    assert harness.observe(harness.next()) == [(AckStatus.PROVED, 5, 5)]


def test_a_corrupt_chunk_of_an_anchored_version_is_healed_at_once(harness):
    broken = harness.next(anchor=True)
    driver.corrupt(harness.log, broken.shards[0].offsets[0])
    assert harness.observe(broken) == [(AckStatus.REFUSED, 1, 0), (AckStatus.ANCHORED, 1, 1)]


def test_a_damaged_anchor_is_refused_and_the_last_version_stays(harness):
    harness.next()
    manifest = harness.next(anchor=True)
    weights = Path(manifest.anchor.uri) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    acks = harness.observe(manifest)
    assert acks[0] == (AckStatus.REFUSED, 2, 0) and acks[-1][2] == 0


def test_a_delta_of_other_weights_is_refused_before_the_engine_is_touched(harness):
    harness.view = driver.nudged(harness.view, 99)
    manifest = harness.next()
    assert harness.observe(manifest) == [(AckStatus.REFUSED, 1, 0)]
    assert harness.engine.version == 0


def test_a_manifest_that_names_other_fingerprints_is_refused(harness):
    manifest = harness.next()
    assert harness.observe(replace(manifest, fingerprint="0" * 32)) == [(AckStatus.REFUSED, 1, 0)]


def test_an_unproved_version_is_taken_back(harness):
    manifest = harness.next()
    harness.engine.lose_writes = True
    with pytest.raises(ReplicaFault):
        harness.observe(manifest)
    assert harness.acks[-1].status is AckStatus.REFUSED and harness.acks[-1].serving_version == 0


def test_damage_in_live_memory_is_found_and_healed_from_the_mirror(harness):
    harness.engine.live["b.weight"][7] ^= 1
    acks = harness.observe(harness.next())
    assert acks == [(AckStatus.REFUSED, 1, 0), (AckStatus.ANCHORED, 1, 1)]
    assert all(np.array_equal(harness.engine.live[n], b.reshape(-1)) for n, b in harness.view.items())


def test_chunks_that_never_come_time_out_and_are_fetched_later(harness):
    manifest = harness.next()
    (offset,) = manifest.shards[0].offsets
    late = harness.log.located.pop(offset)
    assert harness.observe(manifest) == [(AckStatus.REFUSED, 1, 0)]
    harness.log.located.append(late)
    asyncio.run(harness.subscriber.retry())
    assert harness.acks[-1].serving_version == 1


def test_the_fetcher_tells_a_lost_chunk_from_a_late_one(harness):
    manifest = harness.next()
    fetcher = ChunkFetcher(harness.log, timeout_s=0.2)
    shard = manifest.shards[0]
    moved = replace(manifest, shards=[replace(shard, offsets=[9])])
    with pytest.raises(FetchTimeoutError):
        fetcher.fetch(moved)
    harness.log.located[shard.offsets[0]] = replace(harness.log.located[shard.offsets[0]], offset=5)
    with pytest.raises(CorruptDeltaError, match="no longer keeps"):
        ChunkFetcher(harness.log, timeout_s=0.2).fetch(manifest)
