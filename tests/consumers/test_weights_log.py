"""Chains on a real Kafka, verified and checked out; and the finding for each kind of damage."""

from __future__ import annotations

import re
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition
from safetensors import safe_open

from tests.consumers.weight_log import TOPICS, WeightLog, nudged, write_checkpoint
from tidemill.consumers.weights.builder import UnusableWeights, checkout, open_builder, verify_chain
from tidemill.consumers.weights.chain import default_start, read_chain
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint
from tidemill.kernels.weights.graph import Unreachable, UpdatePath, VersionError
from tidemill.kernels.weights.mirror import Mirror
from tidemill.kernels.weights.tensor_table import store_tensor_table
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.reader import LogReader

TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def topics(kafka):
    """Topics that the tests of this module share; each test has its own run in them."""
    return kafka.fresh(topics=TOPICS)


@pytest.fixture
def log(topics, tmp_path):
    return WeightLog(topics, RunSettings(run_id=uuid.uuid4().hex), tmp_path / "store")


def verified(log, start=None, timeout_s=TIMEOUT_S):
    chain = read_chain(log.kafka, log.run)
    with open_builder(log.kafka, timeout_s) as builder:
        return verify_chain(chain, builder, default_start(chain) if start is None else start)


def assert_fault(log, version, part, reason, start=None, timeout_s=TIMEOUT_S):
    """The verification names this as the first fault."""
    offender = verified(log, start, timeout_s).offender
    assert (offender.version, offender.part) == (version, part)
    assert re.search(reason, offender.reason), offender.reason


def check_out(log, version, directory):
    chain = read_chain(log.kafka, log.run)
    with open_builder(log.kafka, TIMEOUT_S) as builder:
        return checkout(chain, builder, version, directory)


def expire(kafka, log, below):
    """Remove the chunks below each version's offsets, as retention does."""
    names, admin = Names(kafka.topic_prefix), admin_client(kafka)
    shards = log.manifests[below].shards
    wanted = [TopicPartition(names.of(Topic.DELTAS), shard.partition, min(shard.offsets)) for shard in shards]
    for future in admin.delete_records(wanted).values():
        future.result()


def flipped(stream):
    """Flip one bit of the last payload, so that all digests computed later match the damage."""
    damaged = bytearray(stream)
    damaged[-60] ^= 1
    return bytes(damaged)


def test_an_undamaged_chain_is_verified_completely(log):
    log.grow(7, anchors=(0, 4), shards=2)
    log.skip(1, 5)
    log.skip(0, 6)
    report = verified(log)
    assert report.offender is None
    assert (report.start, report.end, report.versions, report.anchors, report.skip_deltas) == (0, 6, 7, 2, 2)
    assert report.n_bytes > sum(manifest.delta_bytes for manifest in log.manifests.values())
    assert verified(log, 4).versions == 3


def test_readers_that_share_the_partitions_read_every_chunk_once(log):
    log.grow(3, shards=2)

    def read(share):
        with LogReader(log.kafka, [Topic.DELTAS], share=share) as reader:
            return [(found.partition, found.offset) for found in reader.read_to_end()]

    parts = [read((n, 3)) for n in range(3)]
    assert sorted(parts[0] + parts[1]) == sorted(read((0, 1)))
    assert {partition for partition, _ in parts[0]} <= {0} and {partition for partition, _ in parts[1]} <= {1}
    assert parts[2] == []


def test_a_branch_that_was_rolled_back_is_verified_on_both_paths(log):
    log.grow(5)
    log.publish(5, nudged(log.views[2], 50), parent=2)
    log.publish(6, nudged(log.views[5], 51), parent=5)
    report = verified(log)
    assert (report.offender, report.versions) == (None, 7)


@pytest.mark.parametrize("start", [1, 3])
def test_verification_begins_at_an_anchor(log, start):
    log.grow(5, anchors=(0, 2))
    with pytest.raises(VersionError, match="has no anchor to verify from; these have one: 0, 2"):
        verified(log, start)


def test_a_corrupt_chunk_is_named(log):
    log.grow(3)
    log.publish(3, nudged(log.views[2], 3), parent=2, damage=flipped)
    log.grow(5)
    report = verified(log)
    assert (report.offender.version, report.offender.part, report.end) == (3, "delta", 2)
    assert "digest" in report.offender.reason


def test_a_corrupt_skip_delta_is_named(log):
    log.grow(4)
    log.skip(1, 3, damage=flipped)
    assert_fault(log, 3, "skip-delta from 1", "digest")


def test_a_delta_of_other_weights_is_named(log):
    log.grow(3)
    log.views[2] = nudged(log.views[2], 99)
    log.grow(4)
    assert_fault(log, 3, "delta", "")


def test_a_manifest_with_a_wrong_tensor_fingerprint_is_named(log):
    log.grow(2)
    view = nudged(log.views[1], 2)
    made = log.publish(2, view, parent=1)
    wrong = [replace(tensor, fingerprint="0" * 32) for tensor in made.tensors[:1]]
    log.grow(3)
    lying = nudged(log.views[2], 3)
    log.publish(3, lying, parent=2, lies={"tensors": [*wrong, *made.tensors[1:]]})
    assert_fault(log, 3, "delta", "embed_tokens")


def test_a_version_published_twice_is_named(log):
    log.grow(3)
    log.publish(2, nudged(log.views[1], 77), parent=1)
    log.grow(4)
    assert_fault(log, 2, "manifest", "^fork: version 2 was published with parent 1")


def test_a_damaged_anchor_is_named(log):
    log.grow(4, anchors=(0, 2))
    file = Path(log.manifests[2].anchor.uri) / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert_fault(log, 2, "anchor", "tokenizer.json of anchor .* was changed after it was written")


def test_an_anchor_of_another_version_is_named(log):
    log.grow(4, anchors=(0, 2))
    where = Path(log.manifests[2].anchor.uri)
    shutil.rmtree(where)
    write_checkpoint(where, log.views[1])
    assert_fault(log, 2, "anchor", "of the anchor has fingerprint .*, not ")


def test_a_missing_anchor_is_named(log):
    log.grow(4, anchors=(0, 2))
    shutil.rmtree(log.manifests[2].anchor.uri)
    for start in (0, 2):
        assert_fault(log, 2, "anchor", "does not exist", start)


def test_missing_chunks_are_named(log):
    """The verification starts from the version before, so that it waits for no other chunk."""
    log.grow(2, anchors=(0, 1))
    shard = log.manifests[1].shards[0]
    beyond = replace(shard, offsets=[10_000_000 + offset for offset in shard.offsets])
    log.publish(2, nudged(log.views[1], 2), parent=1, lies={"shards": [beyond]})
    assert_fault(log, 2, "delta", "did not arrive", start=1, timeout_s=1.0)


def test_a_chunk_past_retention_is_reported_as_expired(topics, log, tmp_path):
    log.grow(7, anchors=(0, 4), shards=1)
    expire(topics, log, below=4)
    report = verified(log)
    assert (report.offender, report.start, report.versions) == (None, 4, 3)
    assert report.expired_before == [1, 2, 3]
    assert_fault(log, 1, "delta", "^expired: its chunk at .*verify from 4 instead$", start=0)
    with pytest.raises(Unreachable, match=r"version 3 cannot be built: the delta of version 3 is expired"):
        check_out(log, 3, tmp_path / "v3")
    assert check_out(log, 6, tmp_path / "v6")["version"] == 6


def test_tensors_listed_in_a_table_are_found(log, tmp_path):
    log.grow(2)
    view = nudged(log.views[1], 2)
    made = log.publish(2, view, parent=1)
    table = store_tensor_table(str(tmp_path / "tables"), made.tensors)
    log.publish(3, view, parent=2, lies={"tensors": [], "tensor_table": table})
    assert verified(log).offender is None
    Path(table.uri.removeprefix("file://")).unlink()
    assert_fault(log, 3, "delta", "does not exist")


def test_a_version_is_checked_out_as_a_checkpoint(log, tmp_path):
    log.grow(6, anchors=(0, 3))
    made = check_out(log, 5, tmp_path / "v5")
    assert (made["version"], made["fingerprint"]) == (5, log.manifests[5].fingerprint)
    assert made["way"].startswith("the anchor of version 3 and 2 deltas")
    tensors = map_checkpoint(tmp_path / "v5")
    for name, bits in log.views[5].items():
        np.testing.assert_array_equal(bits_in_memory(tensors, name), bits.reshape(-1))
    with safe_open(tmp_path / "v5" / "model.safetensors", framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(file.name for file in (tmp_path / "v5").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkout_avoids_a_damaged_anchor(log, tmp_path):
    log.grow(5, anchors=(0, 3))
    weights = Path(log.manifests[3].anchor.uri) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert check_out(log, 4, tmp_path / "v4")["way"].startswith("the anchor of version 0 and 4 deltas")


def test_a_checkout_with_a_corrupt_chunk_uses_the_skip_delta_or_fails(log, tmp_path):
    log.grow(2)
    log.publish(2, nudged(log.views[1], 2), parent=1, damage=flipped)
    log.grow(4)
    with pytest.raises(Unreachable, match=r"the delta from 1 to 2: .*digest"):
        check_out(log, 3, tmp_path / "v3")
    assert not (tmp_path / "v3").exists()
    log.skip(0, 3)
    assert "1 of them skip-deltas" in check_out(log, 3, tmp_path / "v3")["way"]


def test_a_checkout_never_overwrites_files(log, tmp_path):
    log.grow(1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for taken in ("full", "file"):
        with pytest.raises(ValueError, match="not an empty directory"):
            check_out(log, 0, tmp_path / taken)
    (tmp_path / "empty").mkdir()
    assert check_out(log, 0, tmp_path / "empty")["version"] == 0


def test_a_mirror_at_another_version_is_refused(log):
    log.grow(4)
    chain = read_chain(log.kafka, log.run)
    with open_builder(log.kafka, TIMEOUT_S) as builder:
        mirror = Mirror()
        builder.change(mirror, UpdatePath(chain.manifests[0], ()))
        with pytest.raises(UnusableWeights, match="starts from version 2, version 0 is held"):
            builder.change(mirror, UpdatePath(None, (chain.delta(3),)))
        builder.change(mirror, UpdatePath(None, (chain.delta(1),)), keep=False)
        assert mirror.version == 0 and mirror.fingerprint.hex() == log.manifests[0].fingerprint
