"""Skip-deltas on a real Kafka: a second way to a version, made beside the trainer and never in its way."""

import threading

import pytest

from tests.kernels.weights.conftest import read_anchor
from tidemill.kernels.weights.publish import PublishSettings
from tidemill.kernels.weights.skips import SkipPublisher
from tidemill.schemas.records import Manifest, SkipDelta

EXPECTED = [(2, 0), (4, 0), (4, 2), (6, 4), (8, 4), (8, 6)]
"""Version and base of the skip-deltas of ten versions for lengths 2 and 4."""


def skipping(**fields):
    return PublishSettings(skips=(4, 2), anchor_every=100, anchor_bytes_ratio=1e9, **fields)


def publish_all(publisher, views, first=0):
    """Publish in order, and let each version's skip-deltas be made before the next."""
    for version, view in enumerate(views, first):
        publisher.publish(version, view, learning_rate=1e-4)
        publisher.skips.wait()


def leads(skips):
    return sorted((skip.version, skip.base) for skip in skips)


def assert_exact(publication, views):
    """Every skip-delta makes its version of its base, bit for bit, and comes after its version's manifest."""
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
    """Events: the first skip-delta has begun; it and all others may go on."""
    make, begun, release = SkipPublisher._publish, threading.Event(), threading.Event()

    def waiting(self, *arguments):
        begun.set()
        assert release.wait(60)
        make(self, *arguments)

    monkeypatch.setattr(SkipPublisher, "_publish", waiting)
    return begun, release


@pytest.mark.parametrize("bases", ["memory", "log"])
def test_every_kth_version_has_a_delta_from_the_kth_before_it(publication, open_publisher, views, bases):
    publisher = open_publisher(skipping(skip_bases=bases))
    publish_all(publisher, views)
    assert leads(publication.skips()) == EXPECTED
    assert (publisher.skips.published, publisher.skips.dropped) == (len(EXPECTED), 0)
    assert {chunk.version for chunk in publication.chunks().values()} == set(range(1, len(views)))
    assert all(shard.uri for skip in publication.skips() for shard in skip.shards), "beside the log"
    assert_exact(publication, views)


def test_a_restarted_trainer_goes_on_with_them(publication, open_publisher, views):
    """The weights that the next skip-delta starts from are read again from the log."""
    publish_all(open_publisher(skipping()), views[:6])
    publish_all(open_publisher(skipping()), views[6:], first=6)
    assert leads(publication.skips()) == EXPECTED
    assert_exact(publication, views)


def test_none_are_made_unless_they_are_asked_for(publication, open_publisher, views):
    publisher = open_publisher(PublishSettings(skips=()))
    publish_all(publisher, views[:3])
    assert publication.skips() == [] and publisher.skips._thread is None


def test_what_comes_while_the_backlog_is_full_is_dropped_and_counted(publication, open_publisher, views, held_back):
    """A publication never waits for a skip-delta: all versions are in the log while the first one hangs."""
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


def test_one_that_fails_is_counted_and_the_next_is_made(publication, open_publisher, views, monkeypatch):
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


def test_a_version_s_weights_are_copied_before_the_trainer_goes_on(publication, open_publisher, views, held_back):
    """The next version is published, and the publisher's copy advanced, while the skip-delta is still being made."""
    _, release = held_back
    publisher = open_publisher(skipping(skip_backlog=2))
    for version, view in enumerate(views[:4]):
        publisher.publish(version, view)
    release.set()
    publisher.skips.wait()
    assert leads(publication.skips()) == [(2, 0)]
    assert_exact(publication, views)


def test_on_closing_what_is_under_way_is_finished_and_the_rest_counted(publication, open_publisher, views, held_back):
    begun, release = held_back
    publisher = open_publisher(skipping(skip_backlog=4))
    for version, view in enumerate(views[:5]):
        publisher.publish(version, view)
    assert begun.wait(60)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    release.set()
    closing.join(60)
    publisher.skips.wait()
    assert leads(publication.skips())[0] == (2, 0)
    assert publisher.skips.published + publisher.skips.dropped == 3
    assert not publisher.skips._thread.is_alive()


def test_a_record_says_where_it_belongs(publication, open_publisher, views):
    publish_all(open_publisher(skipping(), branch="candidate"), views[:3])
    (skip,) = publication.skips()
    assert isinstance(skip, SkipDelta)
    assert (skip.run_id, skip.branch) == (publication.run.run_id, "candidate")
    assert skip.published_at >= publication.manifests("candidate")[-1].published_at
    assert read_anchor(publication.manifests("candidate")[0].anchor.uri).keys() == views[0].keys()
