"""Skip-deltas on a real Kafka: a second path to a version, created in parallel without delay for the trainer."""

import threading

import numpy as np
import pytest

from tests.kernels.weights.conftest import read_anchor
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.held import HeldVersion
from tidemill.kernels.weights.publish import PublishSettings
from tidemill.kernels.weights.ranks import Ranks, RanksLostError
from tidemill.kernels.weights.skips import Skip, SkipPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.records import Manifest, SkipDelta

EXPECTED = [(2, 0), (4, 0), (4, 2), (6, 4), (8, 4), (8, 6)]
"""Version and base of the skip-deltas of ten versions for lengths 2 and 4."""


def skipping(**fields):
    return PublishSettings(skips=(4, 2), anchor_every=100, anchor_bytes_ratio=1e9, **fields)


def publish_all(publisher, views, first=0):
    """Publish in order, and wait for each version's skip-deltas before the next version."""
    for version, view in enumerate(views, first):
        publisher.publish(version, view, learning_rate=1e-4)
        publisher.skips.wait()


def leads(skips):
    return sorted((skip.version, skip.base) for skip in skips)


def assert_exact(publication, views):
    """Check that every skip-delta leads from its base to its version bit for bit, and comes after its manifest."""
    seen = set()
    for record in publication.records():
        if isinstance(record, Manifest):
            seen.add(record.version)
            continue
        assert record.version in seen
        held = {name: weight.bits.copy() for name, weight in views[record.base].items()}
        publication.apply(record.shards, record.version, record.base, held)
        assert all((held[name] == weight.bits).all() for name, weight in views[record.version].items())
        assert record.n_bytes == sum(shard.n_bytes for shard in record.shards)
        changed = sum(int((views[record.base][n].bits != w.bits).sum()) for n, w in views[record.version].items())
        assert record.n_changed == changed > 0


@pytest.fixture
def held_back(monkeypatch):
    """Two events: the first skip-delta has begun; it and all others may continue."""
    make, begun, release = SkipPublisher._publish, threading.Event(), threading.Event()

    def waiting(self, *arguments):
        begun.set()
        assert release.wait(180)
        make(self, *arguments)

    monkeypatch.setattr(SkipPublisher, "_publish", waiting)
    return begun, release


@pytest.mark.parametrize("bases", ["memory", "log"])
def test_every_kth_version_has_a_delta_over_k_versions(publication, open_publisher, views, bases):
    publisher = open_publisher(skipping(skip_bases=bases))
    publish_all(publisher, views)
    assert leads(publication.skips()) == EXPECTED
    assert (publisher.skips.published, publisher.skips.dropped) == (len(EXPECTED), 0)
    assert {chunk.version for chunk in publication.chunks().values()} == set(range(1, len(views)))
    assert all(shard.uri for skip in publication.skips() for shard in skip.shards), "beside the log"
    assert_exact(publication, views)


def test_a_restarted_trainer_continues_with_skip_deltas(publication, open_publisher, views):
    """The base weights of the next skip-delta are read again from the log."""
    publish_all(open_publisher(skipping()), views[:6])
    publish_all(open_publisher(skipping()), views[6:], first=6)
    assert leads(publication.skips()) == EXPECTED
    assert_exact(publication, views)


def test_no_skip_delta_is_made_if_none_is_configured(publication, open_publisher, views):
    publisher = open_publisher(PublishSettings(skips=()))
    publish_all(publisher, views[:3])
    assert publication.skips() == [] and publisher.skips._jobs == []


def test_skip_deltas_beyond_a_full_backlog_are_dropped_and_counted(publication, open_publisher, views, held_back):
    """A publication never waits for a skip-delta: all versions are in the log while the first skip-delta hangs."""
    _, release = held_back
    publisher = open_publisher(skipping(skip_backlog=1))
    for version, view in enumerate(views):
        publisher.publish(version, view)
    assert len(publication.manifests()) == len(views) and publication.skips() == []
    release.set()
    publisher.skips.wait()
    made, dropped = len(publication.skips()), publisher.skips.dropped
    assert made + dropped == len(EXPECTED) and made >= 1 and dropped >= 2
    assert set(leads(publication.skips())) < set(EXPECTED)
    assert_exact(publication, views)


def test_a_failed_skip_delta_is_counted_and_the_next_is_made(publication, open_publisher, views, monkeypatch):
    make = SkipPublisher._base

    def failing(self, skip, tensors):
        if skip.base == 2:
            raise OSError("no space left on device")
        return make(self, skip, tensors)

    monkeypatch.setattr(SkipPublisher, "_base", failing)
    publisher = open_publisher(skipping())
    publish_all(publisher, views)
    assert leads(publication.skips()) == [lead for lead in EXPECTED if lead != (4, 2)]
    assert publisher.skips.dropped == 1


def test_a_version_s_weights_are_copied_before_the_trainer_continues(publication, open_publisher, views, held_back):
    """The next version is published, and the publisher's copy updated, while the skip-delta is still in progress."""
    _, release = held_back
    publisher = open_publisher(skipping(skip_backlog=2))
    for version, view in enumerate(views[:4]):
        publisher.publish(version, view)
    release.set()
    publisher.skips.wait()
    assert leads(publication.skips()) == [(2, 0)]
    assert_exact(publication, views)


def test_close_finishes_the_skip_delta_in_progress_and_counts_the_others(publication, open_publisher, views, held_back):
    begun, release = held_back
    publisher = open_publisher(skipping(skip_backlog=4))
    for version, view in enumerate(views[:5]):
        publisher.publish(version, view)
    assert begun.wait(180)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    release.set()
    closing.join(180)
    publisher.skips.wait()
    assert leads(publication.skips())[0] == (2, 0)
    assert publisher.skips.published + publisher.skips.dropped == 3
    assert all(job.done() for job in publisher.skips._jobs)


def test_a_record_contains_its_run_and_branch(publication, open_publisher, views):
    publish_all(open_publisher(skipping(), branch="candidate"), views[:3])
    (skip,) = publication.skips()
    assert isinstance(skip, SkipDelta)
    assert (skip.run_id, skip.branch) == (publication.run.run_id, "candidate")
    assert skip.published_at >= publication.manifests("candidate")[-1].published_at
    assert read_anchor(publication.manifests("candidate")[0].anchor.uri).keys() == views[0].keys()


class LosingRanks(Ranks):
    """A job that loses a rank during the first skip-delta."""

    def __init__(self):
        self.waits = 0

    def gather(self, make):
        self.waits += 1
        raise RanksLostError("a rank ended or did not answer in time")


def test_a_lost_rank_is_waited_for_once(tmp_path):
    ranks, weights = LosingRanks(), {"w": Weight("bfloat16", np.arange(8, dtype=np.uint16))}
    publisher = SkipPublisher(KafkaSettings(), RunSettings(), skipping(), CodecSettings(), str(tmp_path), ranks)
    base, new = (HeldVersion.copy_of(version, weights) for version in (4, 8))
    publisher._bases = {4: base, 2: base}
    for _ in range(2):
        publisher._make(new, [Skip(4, 4, None), Skip(2, 4, None)], ())
    publisher.close()
    assert (ranks.waits, publisher.published, publisher.dropped) == (1, 0, 4)
