"""Replicas in three regions behind separate links (near, far with loss, and thin) share only the broker. The links
themselves are tested too: packets leave in order, with the configured delay, loss and rate.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network.regions import Region, Regions, why_not
from network.shape import Direction, LinkShape

from tests.records import build
from tests.waiting import until
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, DeltaChunk, Manifest, Staleness, WeightAck

HERE = Path(__file__).resolve().parent
DEADLINE_S = 240.0
"""Also of a fetch by a replica, which a slow machine may delay as much as the thin link."""
THIN_BITS_PER_SECOND = 1e6
SHAPES = {
    "near": LinkShape(delay_ms=0.5),
    "far": LinkShape(delay_ms=40.0, loss=0.01, seed=1),
    "thin": LinkShape(delay_ms=5.0, bits_per_second=THIN_BITS_PER_SECOND),
}
VERSIONS = 5
MOST_VERSIONS = 20
"""The greatest number of versions, if a slow machine delays the near region as much as the thin link delays its own."""
SIZE = (512, 1024)
DENSITY = 0.16


@dataclass
class Followed:
    """The records of the replicas so far, by region."""

    acks: dict[str, list[WeightAck]] = field(default_factory=dict)
    lags: dict[str, list[int]] = field(default_factory=dict)

    def observe(self, record: object) -> None:
        """Add a record of `weights.acks` or `staleness`."""
        if isinstance(record, WeightAck):
            self.acks.setdefault(record.region, []).append(record)
        elif isinstance(record, Staleness) and record.stage == "serve":
            self.lags.setdefault(record.region, []).append(record.lag[0].lag)

    def serving(self, region: str) -> int:
        """Return the version that a region serves; -1 before the first."""
        return self.acks[region][-1].serving_version if region in self.acks else -1


@dataclass(frozen=True)
class Hub:
    """The hub of the regions, and a broker that they can reach."""

    regions: Regions
    bootstrap: str
    """The broker's address on this host."""
    outside: tuple[str, int]
    """The broker's address in the regions."""

    def topics(self, **settings: float) -> KafkaSettings:
        """Create topics for one test."""
        prefix = f"t{uuid.uuid4().hex[:12]}."
        made = KafkaSettings(bootstrap=self.bootstrap, topic_prefix=prefix, partitions=2, **settings)
        create_topics(made)
        return made


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, broker: None) -> Iterator[Hub]:
    """A hub without regions. The test is skipped if this machine cannot make namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    with Regions() as regions:
        with socket.socket() as free:
            free.bind((regions.hub, 0))
            host, port = free.getsockname()
        directory = tmp_path_factory.mktemp("stack")
        stack = LocalStack(StackSettings(data_dir=directory, heap_mb=256, network_listeners=(f"{host}:{port}",)))
        try:
            yield Hub(regions, stack.up().bootstrap, (host, port))
        finally:
            stack.down()


@contextmanager
def followers(config: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    """Run the replicas of all regions; they must end with status 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.region_followers", json.dumps(config)], cwd=HERE.parents[1],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.communicate()


def follow(condition: Callable[[], bool], log: LogReader, followed: Followed, process: subprocess.Popen[str]) -> None:
    """Read the replicas' records until a condition holds."""

    def holds() -> bool:
        assert process.poll() is None, "the replicas ended"
        for located in log.poll(0.05):
            followed.observe(located.record)
        return condition()

    until(holds, lambda: followed, DEADLINE_S)


def weights(previous: np.ndarray | None, seed: int) -> np.ndarray:
    """Return bf16 patterns, some of them replaced by random ones that no codec can predict."""
    random = np.random.default_rng(seed)
    if previous is None:
        return random.integers(0, 1 << 14, SIZE, dtype=np.uint16)
    return np.where(random.random(SIZE) < DENSITY, random.integers(0, 1 << 14, SIZE, dtype=np.uint16), previous)


def test_regions_follow_only_through_the_broker(hub: Hub, tmp_path: Path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    print(f"links are shaped by {hub.regions.backend}")
    named = {name: hub.regions.add(name, shape) for name, shape in SHAPES.items()}
    manifests, followed, elapsed, remotes = publish_and_follow(hub.topics(), hub.outside, named, tmp_path)
    carried = {name: region.close() for name, region in named.items()}
    head = manifests[-1]
    for name in SHAPES:
        last = followed.acks[name][-1]
        assert (last.serving_version, last.fingerprint) == (head.version, head.fingerprint), name
        assert all(ack.status is not AckStatus.REFUSED for ack in followed.acks[name]), name
        assert followed.lags[name][-1] == 0, name
        assert remotes[name] == {hub.outside}, name
    # Each version was published as soon as the near region served the previous one: it is never behind.
    assert max(followed.lags["near"]) == 0
    assert max(followed.lags["thin"]) > 0
    sent = sum(manifest.delta_bytes for manifest in manifests)
    assert elapsed > 8 * sent / THIN_BITS_PER_SECOND, "the thin link let more through than it has room for"
    if hub.regions.backend == "userspace":
        assert all(counts["down"]["n_bytes"] > sent for counts in carried.values())
        assert carried["far"]["down"]["lost"] + carried["far"]["up"]["lost"] > 0


def test_a_chunk_arrives_over_a_link_slower_than_the_stall_checks(hub: Hub):
    """A stall check is due every 3 s and waits 2 s for its answer; the chunk takes more than 5 s."""
    rate = 1.5e6
    payload = bytes(np.random.default_rng(0).integers(0, 256, (1 << 20) - 4096, np.uint8))
    region = hub.regions.add("slow", LinkShape(delay_ms=5.0, bits_per_second=rate))
    kafka = hub.topics(stall_timeout_s=12.0)
    with RecordProducer(kafka, "test") as producer:
        producer.send_acked(Topic.DELTAS, [("0", build(DeltaChunk, run_id="r", version=1, total=1, payload=payload))])
    inside = kafka.model_copy(update={"bootstrap": f"{hub.outside[0]}:{hub.outside[1]}"})
    config = {"kafka": inside.model_dump(), "deadline_s": DEADLINE_S / 2}
    reader = region.start([str(HERE / "region_reader.py"), json.dumps(config)], stdout=subprocess.PIPE, text=True)
    output, _ = reader.communicate(timeout=DEADLINE_S)
    assert reader.returncode == 0
    assert float(output) > 8 * len(payload) / rate > 5


def publish_and_follow(
    kafka: KafkaSettings, outside: tuple[str, int], regions: dict[str, Region], directory: Path
) -> tuple[list[Manifest], Followed, float, dict[str, set[tuple[str, int]]]]:
    """Publish at the pace of the near region until every region serves the head.

    Returns the manifests, the replicas' records, the seconds since the first delta, and the peers of each region.
    """
    run = RunSettings(run_id="regions")
    settings = PublishSettings(anchor_every=1000, anchor_bytes_ratio=1000.0)
    store = StoreSettings(root=str(directory / "store"))
    followed = Followed()
    remotes: dict[str, set[tuple[str, int]]] = {name: set() for name in regions}
    config = {
        "bootstrap": f"{outside[0]}:{outside[1]}", "topic_prefix": kafka.topic_prefix, "run_id": run.run_id,
        "directory": str(directory / "staging"), "regions": {n: region.holder.pid for n, region in regions.items()},
        "fetch_timeout_s": DEADLINE_S,
    }  # fmt: skip

    def all_serve(version: int, names: set[str]) -> bool:
        for name, region in regions.items():
            remotes[name] |= region.remote_addresses()
        return all(followed.serving(name) == version for name in names)

    with (
        WeightPublisher.open(kafka, run, store, settings, base_model=directory / "base") as publisher,
        LogReader(kafka, [Topic.ACKS, Topic.STALENESS]) as log,
    ):
        bits = weights(None, 0)
        manifests = [publisher.publish(0, {"w": bits})]
        with followers(config) as process:
            follow(lambda: all_serve(0, set(regions)), log, followed, process)
            begun = time.monotonic()
            version = 0
            while version < VERSIONS or (version < MOST_VERSIONS and not max(followed.lags["thin"])):
                version += 1
                bits = weights(bits, version)
                manifests.append(publisher.publish(version, {"w": bits}, learning_rate=1e-6))
                follow(partial(all_serve, version, {"near"}), log, followed, process)
            follow(partial(all_serve, version, set(regions)), log, followed, process)
            elapsed = time.monotonic() - begun
            for located in log.read_to_end():
                followed.observe(located.record)
    return manifests, followed, elapsed, remotes


PACKETS = st.lists(st.tuples(st.integers(1, 1500), st.floats(0, 0.1)), max_size=60)


@given(
    packets=PACKETS, delay_ms=st.floats(0, 50), rate=st.sampled_from([0.0, 1e5, 1e7]), loss=st.sampled_from([0, 0.3])
)
def test_a_link_keeps_order_delay_and_rate(packets, delay_ms, rate, loss):
    shape = LinkShape(delay_ms=delay_ms, loss=loss, bits_per_second=rate)
    direction, again = Direction(shape, seed=3), Direction(shape, seed=3)
    now, offered, left = 0.0, {}, []
    for number, (size, gap) in enumerate(packets):
        now += gap
        packet = number.to_bytes(4, "little") + bytes(size)
        offered[packet] = now
        left += [(sent, now) for sent in direction.due(now)]
        direction.offer(packet, now)
        again.offer(packet, now)
    end = now + 1e6
    left += [(sent, end) for sent in direction.due(end)]
    assert [sent for sent, _ in left] == again.due(end)
    assert [sent for sent, _ in left] == sorted(dict(left), key=lambda packet: packet[:4][::-1])
    assert all(at >= offered[sent] + delay_ms / 1e3 for sent, at in left)
    counts = direction.counts
    assert counts.packets + counts.lost + counts.overflowed == len(packets)
    assert loss or not counts.lost


def test_a_full_queue_drops_further_packets():
    direction = Direction(LinkShape(bits_per_second=8e3, queue_ms=100), seed=0)
    for _ in range(10):
        direction.offer(bytes(50), 0.0)
    assert (direction.counts.overflowed, len(direction.due(10.0))) == (7, 3)
    assert direction.next_at() is None


def test_a_thousand_packets_take_the_time_of_the_rate():
    direction = Direction(LinkShape(bits_per_second=1e6, queue_ms=1e6, delay_ms=30), seed=0)
    for _ in range(1000):
        direction.offer(bytes(1250), 0.0)
    seconds = []
    while (at := direction.next_at()) is not None:
        seconds.append(at)
        direction.due(at)
    assert seconds[0] == pytest.approx(0.04) and seconds[-1] == pytest.approx(10.03)
