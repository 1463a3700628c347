"""Versions published on a real Kafka: complete when they are visible, published once, each continues the chain."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.weights.conftest import read_anchor
from tidemill.kernels.encoder import DeltaEncoder
from tidemill.kernels.weights import tensor_parts
from tidemill.kernels.weights.bits import as_weight
from tidemill.kernels.weights.delta_shard import CHUNK_BYTES, DeltaShard
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.publish import ForkPoint, PublishSettings, Weight, WeightPublisher
from tidemill.kernels.weights.rebuild import rebuild
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.config import CLAIM_CHECK_BYTES
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.records import DeltaChunk, Manifest

EVERY_3 = PublishSettings(anchor_every=3, anchor_bytes_ratio=1e9)
TO_STORE = PublishSettings(log_limit_bytes=0, anchor_every=100)
ONE_ANCHOR = PublishSettings(anchor_every=100, anchor_bytes_ratio=1e9)


def publish_all(publisher, views, first=0):
    return [publisher.publish(v, view, learning_rate=1e-4) for v, view in enumerate(views, first)]


def assert_equal(held, view):
    assert held.keys() == view.keys()
    for name, weight in view.items():
        np.testing.assert_array_equal(held[name], weight.bits, err_msg=name)


def assert_followed(publication, views, branch="main"):
    """Check that a follower builds each of these versions bit for bit."""
    seen = 0
    for manifest, held in publication.follow(branch):
        assert_equal(held, views[manifest.version])
        seen += 1
    assert seen == len(views)


@pytest.mark.parametrize("settings", [EVERY_3, TO_STORE], ids=["log", "store"])
def test_a_follower_holds_every_version_bit_for_bit(publication, open_publisher, views, settings):
    """A restarted trainer makes the newest version again from the log: it need not have its weights."""
    sent = []
    for first, end in ((0, 6), (6, 8), (8, 10)):
        sent += publish_all(open_publisher(settings), views[first:end], first)
    assert publication.manifests() == sent
    assert_followed(publication, views)
    in_store = [shard.uri is not None for manifest in sent for shard in manifest.shards]
    assert set(in_store) == {settings is TO_STORE} and len(in_store) == len(views) - 1
    anchored = [manifest for manifest in sent if manifest.anchor]
    assert settings is not EVERY_3 or [manifest.version for manifest in anchored] == [0, 3, 6, 9]
    for manifest in anchored:
        assert_equal(read_anchor(manifest.anchor.uri), views[manifest.version])


def test_a_manifest_describes_its_version(publication, open_publisher, views):
    publisher = open_publisher()
    first = publisher.publish(0, views[0])
    mark = {"learning_rate": 1e-4, "step": 7, "parent": 0, "trained_at": 11}
    mark |= {"serving_format": "mxfp8", "serving_activations": "nvfp4"}
    second = publisher.publish(3, views[1], **mark)
    assert (first.parent, first.shards, first.n_changed, first.delta_bytes) == (None, [], 0, 0)
    assert (second.version, second.parent, second.step, second.learning_rate) == (3, 0, 7, 1e-4)
    assert second.n_elements == sum(weight.bits.size for weight in views[1].values())
    assert second.n_changed == sum(int((views[0][n].bits != views[1][n].bits).sum()) for n in views[0])
    assert second.delta_bytes == sum(map(len, publication.payloads(second.shards[0], 3)))
    assert [(t.name, t.dtype, tuple(t.shape)) for t in second.tensors] == [
        (name, weight.dtype, weight.bits.shape) for name, weight in views[1].items()
    ]
    assert (second.trained_at, publisher.versions.newest) == (11, second)
    assert (first.serving_format, second.serving_format) == ("", "mxfp8")
    assert (first.serving_activations, second.serving_activations) == ("", "nvfp4")
    assert first.published_at > 0 and first.trained_at > 0


def test_the_bytes_of_deltas_after_an_anchor_are_bounded(open_publisher, views):
    """The deltas after an anchor have at most this share of the anchor's bytes, for any density of changes."""
    ratio = 0.6
    manifests = publish_all(open_publisher(PublishSettings(anchor_every=100, anchor_bytes_ratio=ratio)), views)
    since, anchor = 0, None
    for manifest in manifests:
        since += manifest.delta_bytes
        if manifest.anchor:
            since, anchor = 0, manifest.anchor
        assert since <= ratio * anchor.n_bytes
    assert 2 < sum(manifest.anchor is not None for manifest in manifests) < len(manifests)


def test_a_restart_publishes_nothing_twice(publication, open_publisher, views):
    sent = publish_all(open_publisher(EVERY_3), views[:3])
    restarted = open_publisher(EVERY_3)
    assert restarted.versions.newest == sent[-1]
    before = publication.chunks()
    assert publish_all(restarted, views[:3]) == sent
    assert publication.chunks() == before
    assert restarted.publish(3, views[3]).anchor is not None
    assert_followed(publication, views[:4])


@pytest.mark.parametrize("on_device", [True, False])
def test_tensors_on_a_device_are_published_like_tensors_in_the_cpus_memory(
    publication, open_publisher, views, monkeypatch, on_device
):
    """A tensor in the CPU's memory stands for one on a device; after a restart the old version is read from the log."""
    monkeypatch.setattr(tensor_parts, "is_on_host", lambda array: isinstance(array, np.ndarray))
    compared = []

    def takes(encoder, name, dtype, old, new, *place, add=DeltaEncoder.add):
        compared.append((type(old), type(new)))
        return add(encoder, name, dtype, old, new, *place)

    monkeypatch.setattr(DeltaEncoder, "add", takes)
    settings = EVERY_3.model_copy(update={"on_device": on_device, "skips": (2,)})
    tensors = [
        {name: torch.from_numpy(weight.bits.copy()).view(getattr(torch, weight.dtype)) for name, weight in view.items()}
        for view in views
    ]
    publish_all(open_publisher(settings), tensors[:6])
    assert set(compared) >= {(torch.Tensor, torch.Tensor) if on_device else (np.ndarray, np.ndarray)}
    compared.clear()
    restarted = open_publisher(settings)
    publish_all(restarted, tensors[6:], first=6)
    restarted.skips.wait()
    assert restarted.skips.dropped == 0 and restarted.skips.published > 0
    for tensor in tensors[-1].values():
        tensor.zero_()
    assert_followed(publication, views)
    for manifest in publication.manifests():
        if manifest.anchor:
            assert_equal(read_anchor(manifest.anchor.uri), views[manifest.version])


def test_a_chain_with_a_lost_delta_is_not_continued(publication, open_publisher, views):
    manifests = publish_all(open_publisher(TO_STORE), views[:3])
    Path(manifests[2].shards[0].uri.removeprefix("file://")).unlink()
    restarted = open_publisher(TO_STORE)
    with pytest.raises(VersionError, match=r"version 2 .* cannot be rebuilt: .* does not exist"):
        restarted.publish(3, views[3])
    assert restarted.publish(2, views[2]).version == 2, "whoever has the weights can go on"
    assert restarted.publish(3, views[3]).parent == 2


def test_weights_may_change_as_soon_as_they_are_published(publication, open_publisher):
    """Covers torch tensors of several types, from an iterator, that are trained in place."""
    torch.manual_seed(0)
    types = {"w": torch.bfloat16, "h": torch.float16, "n": torch.float32, "q": torch.float8_e4m3fn, "i": torch.int8}
    tensors = {name: torch.randn(24, 8).mul(8).to(dtype) for name, dtype in types.items()}
    tensors["t"] = tensors["w"][:, :4].t()
    publisher, kept = open_publisher(), []
    for version in range(4):
        kept.append({name: Weight(*as_weight(name, tensor)) for name, tensor in tensors.items()})
        kept[-1] = {name: Weight(weight.dtype, weight.bits.copy()) for name, weight in kept[-1].items()}
        publisher.publish(version, iter(tensors.items()))
        for name in ("w", "h", "n", "i"):
            tensors[name].reshape(-1)[version : version + 9] += 1
    assert [t.dtype for t in publisher.versions.newest.tensors] == [
        *(str(dtype).removeprefix("torch.") for dtype in types.values()),
        "bfloat16",
    ]
    assert_followed(publication, kept)


def test_chunks_without_a_manifest_are_ignored(publication, open_publisher, views):
    """A trainer killed between chunks and manifest publishes the version again; the orphan chunks have no effect."""
    open_publisher().publish(0, views[0])
    changes = [(name, weight.dtype, weight.bits, views[1][name].bits) for name, weight in views[0].items()]
    with RecordProducer(publication.kafka, "killed") as producer, DeltaShard(1, 0, changes) as shard:
        orphan = shard.send(producer, publication.run).position
    published = open_publisher().publish(1, views[1])
    assert set(published.shards[0].offsets).isdisjoint(orphan.offsets)
    assert_followed(publication, views[:2])


def test_other_weights_for_a_published_version_are_refused_with_a_remedy(open_publisher, views):
    publish_all(open_publisher(), views[:3])
    with pytest.raises(VersionError, match=r"two trainers on one run.*fork_from=ForkPoint\('main', 1\)"):
        open_publisher().publish(2, views[5])
    with pytest.raises(VersionError, match=r"two trainers on one run"):
        open_publisher().publish(0, views[5])


def test_a_conflict_in_the_log_is_reported_on_start(open_publisher, views):
    first, second = open_publisher(), open_publisher()
    first.publish(0, views[0])
    second.publish(0, views[5])
    with pytest.raises(VersionError, match="two trainers on one run"):
        open_publisher()


def test_a_version_that_is_not_the_next_is_refused(publication, open_publisher, views):
    publisher = open_publisher()
    for number in (0, 2):
        publisher.publish(number, views[number])
    for version, parent, reason in ((5, 0, "newest"), (5, 4, "newest"), (1, None, "only rise")):
        with pytest.raises(VersionError, match=reason):
            publisher.publish(version, views[3], parent=parent)
    publisher.publish(3, views[3], parent=2)
    assert [m.version for m in publication.manifests()] == [0, 2, 3]


def test_the_first_version_of_a_branch_has_no_parent_and_branches_do_not_mix(open_publisher, views):
    with pytest.raises(VersionError, match=r"the newest version .* is None"):
        open_publisher().publish(1, views[1], parent=0)
    open_publisher().publish(0, views[0])
    assert open_publisher(branch="candidate").versions.newest is None
    assert open_publisher(branch="candidate").publish(0, views[5]).branch == "candidate"


def spoil(view, name, value):
    return {**view, name: value}


BAD = {
    "shape": (lambda view: spoil(view, "norm", Weight("float32", np.zeros(17, np.uint32))), r"norm is float32\[17\]"),
    "type": (lambda view: spoil(view, "norm", np.zeros(16, np.uint16)), r"norm is bfloat16\[16\].* float32\[16\]"),
    "missing": (lambda view: {name: view[name] for name in view if name != "norm"}, "in one of them only: norm"),
    "extra": (lambda view: spoil(view, "lm_head.weight", np.zeros(4, np.uint16)), r"lm_head\.weight"),
    "int64": (lambda view: spoil(view, "norm", torch.zeros(16, dtype=torch.int64)), "norm is .*int64"),
    "untyped": (lambda view: spoil(view, "gate", view["gate"].bits), "has no element type"),
    "width": (lambda view: spoil(view, "gate", Weight("int8", np.zeros(40, np.uint16))), "int8 has patterns of uint8"),
}


@pytest.mark.parametrize("given", [dict, lambda view: iter(view.items())], ids=["mapping", "iterator"])
def test_tensors_that_do_not_match_the_chain_are_refused_and_it_continues(publication, open_publisher, views, given):
    publisher = open_publisher()
    publisher.publish(0, views[0])
    for change, reason in BAD.values():
        with pytest.raises((VersionError, TypeError), match=reason):
            publisher.publish(1, given(change(views[1])))
    assert not publication.chunks()
    publisher.publish(1, views[1])
    assert_followed(publication, views[:2])


def test_repeated_tensors_and_empty_versions_are_refused(open_publisher, views):
    publisher = open_publisher()
    with pytest.raises(VersionError, match="no tensors"):
        publisher.publish(0, {})
    with pytest.raises(VersionError, match="twice"):
        publisher.publish(0, [*views[0].items(), ("norm", views[0]["norm"])])
    publisher.publish(0, views[0])
    with pytest.raises(VersionError, match="twice"):
        publisher.publish(1, [*views[1].items(), ("norm", views[1]["norm"])])


@pytest.mark.parametrize("kept", [True, False], ids=["the log kept it", "the log did not keep it"])
def test_a_manifest_whose_acknowledgement_is_lost_is_looked_up(publication, open_publisher, views, monkeypatch, kept):
    """A trainer may publish again after a failed delivery: in both cases the log contains the version once."""
    publisher = open_publisher()
    publish_all(publisher, views[:2])
    send = RecordProducer.send_acked

    def lost(self, topic, records):
        manifest = isinstance(records[0][1], Manifest)
        positions = send(self, topic, records) if kept or not manifest else []
        if manifest:
            raise DeliveryError("no acknowledgement came")
        return positions

    with monkeypatch.context() as patched:
        patched.setattr(RecordProducer, "send_acked", lost)
        with pytest.raises(DeliveryError):
            publisher.publish(2, views[2])
    assert publisher.publish(2, views[2]).parent == 1
    publisher.publish(3, views[3])
    assert [m.version for m in publication.manifests()] == [0, 1, 2, 3]
    assert_followed(publication, views[:4])


def test_a_branch_begins_with_a_version_of_another_one(publication, open_publisher, views):
    """A trainer that went back continues the same run on another branch, from a version on."""
    publish_all(open_publisher(ONE_ANCHOR), views[:5])
    point = ForkPoint("main", 3)
    forked = open_publisher(ONE_ANCHOR, "again", fork_from=point)
    newest = forked.versions.newest
    assert (newest.version, newest.parent, newest.branch) == (3, None, "again")
    forked.publish(4, views[5])
    restarted = open_publisher(ONE_ANCHOR, "again", fork_from=point)
    restarted.publish(5, views[6])
    assert_followed(publication, views[:5])
    other = {3: views[3], 4: views[5], 5: views[6]}
    assert_followed(publication, other, "again")
    assert publication.manifests("again")[0].fingerprint == publication.manifests()[3].fingerprint


def test_an_impossible_fork_is_refused(open_publisher, views):
    publish_all(open_publisher(), views[:3])
    with pytest.raises(VersionError, match="has no version 7"):
        open_publisher(branch="again", fork_from=ForkPoint("main", 7))
    with pytest.raises(VersionError, match="give the run another branch"):
        open_publisher(fork_from=ForkPoint("main", 1))
    open_publisher(branch="again", fork_from=ForkPoint("main", 1))
    with pytest.raises(VersionError, match="begins with version 1, not with version 2"):
        open_publisher(branch="again", fork_from=ForkPoint("main", 2))


def test_a_delta_of_noise_is_split_into_chunks_that_the_broker_accepts(publication, open_publisher):
    random = np.random.default_rng(0)
    old, new = ({"w": Weight("bfloat16", random.integers(0, 1 << 16, 1_500_000, dtype=np.uint16))} for _ in range(2))
    publisher = open_publisher()
    publisher.publish(0, old)
    manifest = publisher.publish(1, new)
    assert [len(payload) for payload in publication.payloads(manifest.shards[0], 1)[:-1]] == [CHUNK_BYTES] * 2
    assert_followed(publication, [old, new])
    assert all(isinstance(chunk, DeltaChunk) for chunk in publication.chunks().values())


def test_a_shard_up_to_the_limit_is_in_the_log_and_a_larger_one_is_not(publication, open_publisher, views):
    size = publish_all(open_publisher(), views[:2])[1].delta_bytes
    at, above = (
        publish_all(open_publisher(PublishSettings(log_limit_bytes=limit), branch), views[:2])[1]
        for limit, branch in ((size, "at"), (size - 1, "above"))
    )
    assert at.shards[0].uri is None and at.shards[0].offsets
    assert above.shards[0].uri is not None and above.shards[0].digest == at.shards[0].digest
    assert above.delta_bytes == at.delta_bytes == size


def test_tensors_that_do_not_fit_in_a_record_are_listed_in_the_store(publication, open_publisher):
    names = [f"{i:04d}.{'expert.' * 140}weight" for i in range(1000)]
    assert sum(map(len, names)) > CLAIM_CHECK_BYTES
    views = [
        {name: Weight("bfloat16", np.full(3, step + i, np.uint16)) for i, name in enumerate(names)} for step in (0, 1)
    ]
    for version, view in enumerate(views):
        manifest = open_publisher().publish(version, view)
        assert manifest.tensors == [] and manifest.tensor_table.n_tensors == len(names)
        assert [tensor.name for tensor in with_tensors(manifest).tensors] == names
    assert_followed(publication, views)


def test_the_codec_uses_the_configured_settings(publication, open_publisher, views):
    sizes = {}
    for coder in ("auto", "zstd"):
        settings = PublishSettings.model_validate({"codec": {"coder": coder, "digest": "blake3"}})
        sizes[coder] = publish_all(open_publisher(settings, coder), views[:2])[1].delta_bytes
        assert_followed(publication, views[:2], coder)
    assert sizes["auto"] <= sizes["zstd"]


def test_a_version_in_the_middle_can_be_rebuilt(publication, open_publisher, views):
    publisher = open_publisher(EVERY_3)
    publish_all(publisher, views[:6])
    graph = publisher._log.graph
    for version in range(6):
        path = graph.path(version)
        held = rebuild(publication.kafka, path, graph.newest.tensors)
        assert len(path.deltas) == version % 3 and held.version == version
        assert_equal({name: part.bits.reshape(part.shape) for name, part in held.parts.items()}, views[version])


def test_a_publisher_closed_by_an_error_leaves_no_thread(publication, views):
    before = threading.active_count()
    settings = PublishSettings(skips=(2,))
    arguments = (publication.kafka, publication.run, publication.store, settings)
    with pytest.raises(KeyboardInterrupt), WeightPublisher.open(*arguments, base_model=publication.base_model) as made:
        publish_all(made, views[:3])
        raise KeyboardInterrupt
    assert threading.active_count() <= before


def test_a_missing_base_model_is_reported(publication, tmp_path, views):
    arguments = (publication.kafka, publication.run, publication.store)
    with WeightPublisher.open(*arguments, base_model=tmp_path / "missing") as publisher:
        with pytest.raises(ValueError, match="not a Hugging Face model directory"):
            publisher.publish(0, views[0])
        (tmp_path / "missing").mkdir()
        (tmp_path / "missing" / "config.json").write_text(json.dumps({}))
        publisher.publish(0, views[0])
