"""Versions published on a real Kafka: readable in full once seen, published once, always continuing the chain."""

import json
import uuid
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from tidemill.kernels.delta import apply_change, decode_delta, resolve
from tidemill.schemas.admin import create_topics
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import DeltaChunk
from tidemill.trainer.anchor import read_anchor
from tidemill.trainer.delta_shard import CHUNK_BYTES, DeltaShard
from tidemill.trainer.publish import ChainError, VersionMark, WeightPublisher, read_manifests
from tidemill.trainer.serving_view import tensor_infos, total_fingerprint

ANCHOR_EVERY = 3
SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.mlp.up_proj.weight": (32, 16),
    "model.norm.weight": (16,),
}


@pytest.fixture(scope="module")
def log(kafka):
    """Topics that the tests of this module share; each test has a run of its own in them."""
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=f"t{uuid.uuid4().hex[:12]}.", partitions=2)
    create_topics(settings)
    return settings


@pytest.fixture
def run():
    return RunSettings(run_id=uuid.uuid4().hex)


@pytest.fixture
def open_publisher(log, run, tmp_path):
    """A function that starts a publisher on what the log holds, as a trainer that starts or restarts does."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with RecordProducer(log, "test-publisher") as producer:

        def start(run=run):
            return WeightPublisher(
                producer,
                run,
                StoreSettings(root=str(tmp_path / "store")),
                base_model=base,
                anchor_every=ANCHOR_EVERY,
                published=read_manifests(log, run),
            )

        yield start


def first_view(seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def next_view(view, seed, density=0.05):
    generator = np.random.default_rng(seed)
    return {n: np.where(generator.random(b.shape) < density, b ^ np.uint16(1), b) for n, b in view.items()}


def mark(version):
    return VersionMark(version, version - 1 if version else None, step=version, learning_rate=1e-4, trained_at=version)


def publish_chain(publisher, views):
    return [publisher.publish(mark(v), views[v - 1] if v else None, view) for v, view in enumerate(views)]


def chunks_in_log(log, run):
    with LogReader(log, [Topic.DELTAS]) as reader:
        found = {(at.partition, at.offset): at.record for at in reader.read_to_end()}
    return {place: chunk for place, chunk in found.items() if chunk.run_id == run.run_id}


def payloads(log, run, manifest):
    """The chunk payloads that a manifest names, in order, checked against it."""
    (shard,) = manifest.shards
    chunks = chunks_in_log(log, run)
    named = [chunks[shard.partition, offset] for offset in shard.offsets]
    assert [(chunk.sequence, chunk.total) for chunk in named] == [(i, len(named)) for i in range(len(named))]
    assert all(chunk.digest == xxhash.xxh3_128_hexdigest(chunk.payload) for chunk in named)
    stream = b"".join(chunk.payload for chunk in named)
    assert (len(stream), xxhash.xxh3_128_hexdigest(stream)) == (shard.n_bytes, shard.digest)
    return [chunk.payload for chunk in named]


def follow(log, run, view):
    """Replay every delta in the log onto a copy of version 0; yields (manifest, weights) after each."""
    held = {name: bits.copy() for name, bits in view.items()}
    for version, manifest in sorted(read_manifests(log, run).items()):
        if manifest.parent is not None:
            for block in decode_delta(payloads(log, run, manifest), version, manifest.parent):
                change = resolve(block, held[block.name])
                assert change is not None
                apply_change(change, held[block.name])
        yield manifest, held


def test_a_follower_holds_every_version_bit_for_bit(log, run, open_publisher):
    views = [first_view()]
    for version in range(1, 8):
        views.append(next_view(views[-1], seed=version))
    sent = publish_chain(open_publisher(), views)
    seen = 0
    for manifest, held in follow(log, run, views[0]):
        assert manifest == sent[manifest.version]
        for name, bits in views[manifest.version].items():
            np.testing.assert_array_equal(held[name], bits)
        assert total_fingerprint(tensor_infos(held)).hex() == manifest.fingerprint
        seen += 1
    assert seen == len(views)


def test_a_manifest_describes_its_version(log, run, open_publisher):
    views = [first_view(), next_view(first_view(), seed=1)]
    first, second = publish_chain(open_publisher(), views)
    assert (first.parent, first.shards, first.n_changed, first.delta_bytes) == (None, [], 0, 0)
    assert second.n_elements == sum(bits.size for bits in views[1].values())
    assert second.n_changed == sum(int((views[0][n] != views[1][n]).sum()) for n in SHAPES)
    assert second.delta_bytes == sum(map(len, payloads(log, run, second)))
    assert [(t.name, t.dtype, tuple(t.shape)) for t in second.tensors] == [
        (n, "bfloat16", s) for n, s in SHAPES.items()
    ]
    assert (second.step, second.learning_rate, second.trained_at) == (1, 1e-4, 1)
    assert second.published_at > 0


def test_anchors_come_every_few_versions_and_hold_their_version(open_publisher):
    views = [first_view()]
    for version in range(1, 5):
        views.append(next_view(views[-1], seed=version))
    manifests = publish_chain(open_publisher(), views)
    assert [m.version for m in manifests if m.anchor] == [0, 3]
    for manifest in (manifests[0], manifests[3]):
        loaded = read_anchor(manifest.anchor.uri)
        for name, bits in views[manifest.version].items():
            np.testing.assert_array_equal(loaded[name], bits)


def test_a_restart_publishes_nothing_twice(log, run, open_publisher):
    views = [first_view(), next_view(first_view(), seed=1)]
    sent = publish_chain(open_publisher(), views)
    restarted = open_publisher()
    assert restarted.newest == sent[-1]
    before = chunks_in_log(log, run)
    assert publish_chain(restarted, views) == sent
    assert chunks_in_log(log, run) == before
    views.append(next_view(views[-1], seed=2))
    assert restarted.publish(mark(2), views[1], views[2]).version == 2


def test_chunks_without_a_manifest_are_left_behind(log, run, open_publisher):
    """A trainer killed between chunks and manifest publishes the version again; the orphans harm nobody."""
    views = [first_view(), next_view(first_view(), seed=1)]
    publisher = open_publisher()
    publisher.publish(mark(0), None, views[0])
    with RecordProducer(log, "killed") as producer, DeltaShard(1, 0, iter(changes(*views))) as shard:
        orphan = shard.send(producer, run)
    published = open_publisher().publish(mark(1), views[0], views[1])
    assert set(published.shards[0].offsets).isdisjoint(orphan.offsets)
    *_, (_, held) = follow(log, run, views[0])
    for name, bits in views[1].items():
        np.testing.assert_array_equal(held[name], bits)


def changes(old, new):
    return [(name, "bfloat16", old[name], new[name]) for name in old]


def test_other_weights_under_a_published_version_are_refused(open_publisher):
    open_publisher().publish(mark(0), None, first_view())
    with pytest.raises(ChainError, match="two trainers on one run"):
        open_publisher().publish(mark(0), None, first_view(seed=9))


def test_a_delta_from_other_weights_than_the_parent_is_refused(log, run, open_publisher):
    publisher = open_publisher()
    publisher.publish(mark(0), None, first_view())
    drifted = next_view(first_view(), seed=5, density=0.001)
    drifted["model.norm.weight"][0] ^= 1
    with pytest.raises(ChainError, match="not the ones it published"):
        publisher.publish(mark(1), drifted, next_view(drifted, seed=1))
    assert not chunks_in_log(log, run)
    assert sorted(read_manifests(log, run)) == [0]


@pytest.mark.parametrize("parent", [0, 5, 6])
def test_a_parent_that_is_not_in_the_log_is_refused(open_publisher, parent):
    with pytest.raises(ChainError, match=f"names parent {parent}"):
        open_publisher().publish(replace(mark(5), parent=parent), first_view(), first_view())


def test_parent_and_its_weights_go_together(open_publisher):
    with pytest.raises(ChainError, match="exactly where it has a parent"):
        open_publisher().publish(mark(0), first_view(), first_view())
    with pytest.raises(ChainError, match="exactly where it has a parent"):
        open_publisher().publish(mark(1), None, first_view())


def test_another_set_of_tensors_is_refused(open_publisher):
    publisher = open_publisher()
    publisher.publish(mark(0), None, first_view())
    grown = {**first_view(), "lm_head.weight": np.zeros(4, np.uint16)}
    with pytest.raises(ChainError, match=r"lm_head\.weight"):
        publisher.publish(mark(1), first_view(), grown)


def test_a_conflict_in_the_log_is_reported_on_start(log, run, open_publisher):
    first, second = open_publisher(), open_publisher()
    first.publish(mark(0), None, first_view())
    second.publish(mark(0), None, first_view(seed=9))
    with pytest.raises(ChainError, match="two trainers on one run"):
        read_manifests(log, run)


def test_runs_and_branches_do_not_mix(open_publisher, run):
    open_publisher().publish(mark(0), None, first_view())
    other = run.model_copy(update={"branch": "candidate"})
    assert open_publisher(other).newest is None
    assert open_publisher(other).publish(mark(0), None, first_view(seed=9)).branch == "candidate"


def test_a_delta_of_noise_is_cut_into_chunks_that_the_broker_takes(log, run, open_publisher):
    generator = np.random.default_rng(0)
    old = {"w": generator.integers(0, 1 << 16, 1_500_000, dtype=np.uint16)}
    new = {"w": generator.integers(0, 1 << 16, 1_500_000, dtype=np.uint16)}
    publisher = open_publisher()
    publisher.publish(mark(0), None, old)
    manifest = publisher.publish(mark(1), old, new)
    assert [len(payload) for payload in payloads(log, run, manifest)[:-1]] == [CHUNK_BYTES, CHUNK_BYTES]
    *_, (_, held) = follow(log, run, old)
    np.testing.assert_array_equal(held["w"], new["w"])
    assert all(isinstance(chunk, DeltaChunk) for chunk in chunks_in_log(log, run).values())
