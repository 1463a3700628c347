"""The versions of a branch, and when anchors and skip-deltas are due. Both are functions of the manifests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import build
from tidemill.kernels.weights.commit import VersionLog, anchor_due, observe_published
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError, VersionGraph
from tidemill.kernels.weights.skips import bases_due, skips_due
from tidemill.schemas.config import RunSettings, StoreSettings
from tidemill.schemas.records import Anchor, Manifest, TensorInfo


def manifest(version: int, parent: int | None = None, anchor: int | None = None, **fields) -> Manifest:
    """Return the manifest of a version, with an anchor of `anchor` bytes if that is given."""
    made = build(Manifest, version=version, parent=parent, learning_rate=1e-6, n_elements=10, n_changed=1,
                 delta_bytes=100, tensors=[TensorInfo("w", "bfloat16", [10], f"{version:032x}")],
                 fingerprint=f"{version:032x}",
                 anchor=None if anchor is None else Anchor(f"a{version}", anchor))  # fmt: skip
    return replace(made, **fields)


def graph_of(manifests: list[Manifest]) -> VersionGraph:
    """Return a publisher's graph of a log with these manifests."""
    graph = VersionGraph("run", "main", keep_tensors=False)
    for made in manifests:
        observe_published(graph, made)
    return graph


def chain(versions: int, anchors: tuple[int, ...] = (0,)) -> VersionGraph:
    """Return versions 0, 10, 20… with anchors at the given positions."""
    numbers = range(0, 10 * versions, 10)
    return graph_of([manifest(v, v - 10 if v else None, 1000 if v // 10 in anchors else None) for v in numbers])


def version_log(graph: VersionGraph) -> VersionLog:
    """Return a log of versions without a broker, for queries only."""
    return VersionLog(None, RunSettings(run_id="run"), StoreSettings(), graph)


def test_other_runs_and_branches_are_ignored_and_only_the_newest_keeps_its_tensors():
    held = graph_of([manifest(0, anchor=1), manifest(1, 0), manifest(9, 8, run_id="other")])
    held.observe(manifest(7, 1, branch="candidate"))
    assert (sorted(held.manifests), held.newest) == ([0, 1], manifest(1, 0))
    assert held.manifests[0].tensors == [] and held.manifests[0].fingerprint == manifest(0).fingerprint
    held.observe(manifest(2, 1))
    assert held.manifests[1].tensors == [] and held.newest.tensors == manifest(2, 1).tensors


def test_a_replica_s_graph_keeps_the_tensors_that_it_may_need():
    held = VersionGraph("run", "main")
    for made in (manifest(0, anchor=1), manifest(1, 0), manifest(2, 1)):
        held.observe(made)
    assert all(made.tensors for made in held.manifests.values())
    held.forget_tensors(2)
    assert [bool(made.tensors) for _, made in sorted(held.manifests.items())] == [True, False, True]
    held.observe(manifest(1, 0, anchor=1))
    assert held.manifests[1].anchor and held.manifests[1].tensors, "an anchor that is added is checked against them"


def test_a_chain_has_one_incarnation():
    assert graph_of([]).incarnation == ""
    held = graph_of([manifest(0, anchor=1, incarnation="first"), manifest(1, 0, incarnation="first")])
    assert held.incarnation == "first"
    assert graph_of([manifest(0, anchor=1), manifest(1, 0)]).incarnation == ""


def test_the_same_record_again_changes_nothing_and_other_weights_are_refused():
    held = graph_of([manifest(0, anchor=1), manifest(1, 0), manifest(0, anchor=1)])
    assert held.newest.version == 1
    with pytest.raises(VersionError, match=r"fork_from=ForkPoint\('main', 0\)"):
        observe_published(held, manifest(1, 0, fingerprint="f" * 32))
    with pytest.raises(VersionError, match=r"The version in the log is not changed$"):
        observe_published(held, manifest(0, fingerprint="f" * 32))
    assert held.manifests[1].fingerprint == manifest(1).fingerprint, "the first contents are kept"


def test_a_second_record_adds_only_an_anchor():
    first, second = manifest(1, 0), replace(manifest(1, 0, anchor=1), step=7, incarnation="other")
    assert graph_of([manifest(0, anchor=1), first, second]).newest == replace(first, anchor=second.anchor)


def test_the_next_version_follows_the_newest():
    version_log(graph_of([])).require_next(5, None)
    held = version_log(chain(3))
    held.require_next(21, 20)
    for version, parent in ((21, 10), (21, None), (20, 20), (5, 20)):
        with pytest.raises(VersionError):
            held.require_next(version, parent)


def test_after_going_back_the_next_version_follows_the_older_one_once():
    graph = chain(4, anchors=(0, 3))
    log = version_log(graph)
    log.go_back(10)
    assert (log.head, graph.newest_version, graph.since_anchor(log.head)) == (10, 30, (1, 100, 1000))
    log.require_next(31, 10)
    for version, parent, message in ((31, 30, "gone back to"), (20, 10, "numbers only rise")):
        with pytest.raises(VersionError, match=message):
            log.require_next(version, parent)
    log.read_again(chain(4, anchors=(0, 3)))
    assert log.head == 10, "the log has nothing newer"
    graph.observe(manifest(31, 10))
    log.read_again(graph)
    assert log.head == 31
    assert [d.version for d in graph.path(31).deltas] == [10, 31]
    assert [m.version for m in (graph.ancestor(31, 1), graph.ancestor(31, 2))] == [10, 0]
    log.go_back(10)
    log.go_back(31)
    log.require_next(32, 31)
    with pytest.raises(VersionError, match="no version 99 to go back to"):
        log.go_back(99)


def test_the_path_to_a_version_begins_at_the_nearest_anchor():
    held = chain(7, anchors=(0, 3))
    assert [(held.path(v).anchor.version, [d.version for d in held.path(v).deltas]) for v in (0, 20, 30, 60)] == [
        (0, []), (0, [10, 20]), (30, []), (30, [40, 50, 60])
    ]  # fmt: skip
    assert held.path(5) is None
    assert graph_of([manifest(4, 3)]).path(4) is None
    assert graph_of([manifest(4, 4)]).path(4) is None, "no parent of its own"


def test_deltas_since_the_anchor_are_counted():
    assert chain(1).since_anchor(0) == (0, 0, 1000)
    assert chain(7, anchors=(0, 3)).since_anchor(60) == (3, 300, 1000)
    assert graph_of([]).since_anchor(None) == (0, 0, 0)


@given(
    sizes=st.lists(st.integers(0, 500), max_size=60),
    every=st.integers(1, 30),
    ratio=st.floats(0.05, 4.0),
)
def test_the_distance_of_anchors_obeys_both_rules(sizes: list[int], every: int, ratio: float):
    settings = PublishSettings(anchor_every=every, anchor_bytes_ratio=ratio)
    held = graph_of([manifest(0, anchor=1000)])
    between = read = 0
    for version, size in enumerate(sizes, 1):
        due = anchor_due(held.since_anchor(held.newest_version), size, settings)
        between, read = (0, 0) if due else (between + 1, read + size)
        assert between < every and read <= ratio * 1000
        held.observe(manifest(version, version - 1, 1000 if due else None, delta_bytes=size))


def test_an_anchor_that_is_not_due_is_not_written():
    settings = PublishSettings(anchor_every=10, anchor_bytes_ratio=1.0)
    assert not anchor_due((8, 900, 1000), 100, settings)
    assert anchor_due((9, 0, 1000), 0, settings)
    assert anchor_due((0, 900, 1000), 101, settings)


@pytest.mark.parametrize(
    ("versions", "due", "kept"),
    [
        (0, [], ()),
        (1, [], (2, 3)),
        (2, [], ()),
        (3, [(2, 0)], (2,)),
        (4, [(3, 0)], (3,)),
        (7, [(2, 40), (3, 30)], (2, 3)),
    ],
)
def test_skip_deltas_are_due_by_position_in_the_branch(versions, due, kept):
    held = chain(versions)
    assert [(skip.length, skip.base) for skip in skips_due(held, (2, 3))] == due
    assert bases_due(held, (2, 3)) == kept


def test_no_skip_delta_is_due_over_a_missing_version():
    held = graph_of([manifest(0, anchor=1), manifest(1, 0), manifest(3, 2)])
    assert held.ancestor(3, 2) is None and skips_due(held, (2,)) == []


def test_skips_in_the_settings_are_unique_and_sorted():
    assert PublishSettings(skips=(64, 8)).skips == (8, 64)
    with pytest.raises(ValueError, match="once"):
        PublishSettings(skips=(8, 8))
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        PublishSettings(skips=(1,))
