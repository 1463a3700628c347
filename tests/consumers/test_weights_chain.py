"""The chain over records in memory: paths, retention, forks, decisions and the replicas that follow them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from tests.consumers.weight_log import acknowledgement, first_view, write_checkpoint
from tests.records import build, tensor_infos
from tidemill.consumers.weights.builder import Builder
from tidemill.consumers.weights.chain import Chain, DecisionFollowers, decision, default_start, rows
from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.graph import Unreachable, UpdatePath, VersionError
from tidemill.kernels.weights.mirror import Mirror
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import (
    AckStatus,
    Anchor,
    GateDecision,
    GateVerdict,
    Manifest,
    ShardPosition,
    SkipDelta,
)

RUN = RunSettings(run_id="test")


def shard(offset: int, n_bytes: int = 100, uri: str | None = None) -> ShardPosition:
    return build(ShardPosition, topic="weights.deltas", offsets=[] if uri else [offset], n_bytes=n_bytes, uri=uri)


def manifest(version: int, parent: int | None = -1, anchor: bool = False, **changes: object) -> Manifest:
    parent = (version - 1 if version else None) if parent == -1 else parent
    made = build(Manifest, run_id="test", version=version, parent=parent, learning_rate=1e-5, n_elements=1000,
                 n_changed=10 if parent is not None else 0, delta_bytes=100 if parent is not None else 0,
                 shards=[shard(version)] if parent is not None else [], fingerprint=f"{version:032x}",
                 anchor=Anchor(f"/anchors/v{version}", 50) if anchor else None)  # fmt: skip
    return replace(made, **changes)


def skip(base: int, version: int, n_bytes: int = 120) -> SkipDelta:
    return SkipDelta("test", "main", version, base, 20, n_bytes, [shard(100 + version, n_bytes)], 0)


def decided(verdict: GateVerdict, version: int | None, at: int = 0) -> GateDecision:
    return build(GateDecision, run_id="test", verdict=verdict, version=version, reason="because", at=at)


def chain_of(*records: object, kept_from: int = 0) -> Chain:
    chain = Chain("test", "main", {0: kept_from})
    for record in records:
        chain.observe(record)
    return chain


def long_chain(anchors: tuple[int, ...] = (0,), kept_from: int = 0, count: int = 10) -> Chain:
    return chain_of(*(manifest(v, anchor=v in anchors) for v in range(count)), kept_from=kept_from)


def path(chain: Chain, version: int) -> list[int]:
    found = chain.require_path(version)
    return [found.anchor.version, *(delta.version for delta in found.deltas)]


def test_an_expired_delta_is_on_no_path():
    chain = long_chain(anchors=(0, 4), kept_from=4)
    assert path(chain, 6) == [4, 5, 6]
    with pytest.raises(Unreachable, match=r"delta of version 3 is expired: its chunk at 0:3 .* begins at 4"):
        chain.require_path(3)


def test_a_delta_in_the_object_store_does_not_expire():
    chain = chain_of(manifest(0, anchor=True), manifest(1, shards=[shard(0, uri="/store/v1")]), kept_from=50)
    assert path(chain, 1) == [0, 1]


def test_a_missing_anchor_is_not_used():
    chain = long_chain(anchors=(0, 6))
    found = chain.require_path(8, lambda made: made.version != 6)
    assert found.anchor.version == 0
    with pytest.raises(Unreachable, match="needs the anchor of version 0, which is missing"):
        long_chain().require_path(3, lambda _: False)


def test_the_error_for_an_unknown_version_names_the_existing_ones():
    with pytest.raises(VersionError, match="version 40 is not on branch main of run test: it has 0 to 9"):
        long_chain().manifest(40)
    with pytest.raises(VersionError, match="no version on branch main"):
        _ = Chain("test", "main").head


def test_a_parent_that_is_not_in_the_log_is_named():
    chain = chain_of(manifest(5), manifest(6))
    with pytest.raises(Unreachable, match="its ancestor 4 is not in the log"):
        chain.require_path(6)


def test_the_first_content_of_a_version_stays():
    chain = long_chain()
    chain.observe(manifest(5, fingerprint="f" * 32))
    assert chain.manifests[5].fingerprint == f"{5:032x}"
    assert "the first one is used" in chain.forks[5]
    assert rows(chain)[5]["fork"] == chain.forks[5]


def test_records_of_other_runs_and_branches_are_ignored():
    chain, own = long_chain(count=2), (manifest(2), decided(GateVerdict.HOLD, 1), acknowledgement(RUN, "a", 1, at=1))
    for record in own:
        chain.observe(replace(record, run_id="other"))
        chain.observe(replace(record, branch="other"))
    chain.observe(None)
    assert (chain.head.version, chain.gate.limit) == (1, None)
    assert (chain.decisions, chain.replicas, chain.proofs) == ([], {}, {})
    for record in own:
        chain.observe(record)
    assert (chain.head.version, chain.gate.limit, chain.proofs) == (2, own[1], {1: {"a"}})


@pytest.mark.parametrize(
    ("anchors", "kept_from", "start"), [((0, 4, 8), 0, 0), ((0, 4, 8), 3, 4), ((0, 4, 8), 7, 8), ((0, 4), 7, 4)]
)
def test_verification_starts_at_the_oldest_anchor_that_leads_on(anchors, kept_from, start):
    assert default_start(long_chain(anchors, kept_from)) == start


def test_verification_without_an_anchor_is_an_error():
    with pytest.raises(Unreachable, match="no anchor to verify from"):
        default_start(long_chain(anchors=()))


def test_a_row_reports_the_records_of_its_version():
    chain = long_chain(anchors=(0, 4), kept_from=2)
    chain.observe(skip(0, 5))
    chain.observe(acknowledgement(RUN, "b", 5, at=1))
    chain.observe(acknowledgement(RUN, "a", 5, at=1, status=AckStatus.ANCHORED))
    chain.observe(acknowledgement(RUN, "c", 5, at=1, status=AckStatus.REFUSED))
    chain.observe(decided(GateVerdict.HOLD, 5))
    row = rows(chain)[5]
    assert (row["density"], row["bytes_per_changed"], row["skips"]) == (0.01, 10.0, [0])
    assert (row["proved_by"], row["refused_by"]) == (["a", "b"], {"c": "because"})
    assert row["decisions"] == ["hold 5 by ada: because"]
    assert [row["version"] for row in rows(chain, 3)] == [7, 8, 9]
    assert [row["expired"] for row in rows(chain)] == [False, True] + 8 * [False]
    assert rows(chain)[0]["bytes_per_changed"] is None and rows(chain)[4]["anchor"] == "/anchors/v4"


def propose(chain: Chain, verdict: GateVerdict, version: int | None) -> GateDecision:
    return decision(chain, verdict, version, "because", "ada", at=7)


def test_a_decision_contains_actor_reason_and_time():
    made = propose(long_chain(), GateVerdict.HOLD, 5)
    assert made == replace(decided(GateVerdict.HOLD, 5, at=7), numbers={"head": 9.0})
    assert propose(long_chain(), GateVerdict.RELEASE, None).version is None


def test_a_decision_can_only_name_a_version_that_can_be_served():
    chain = long_chain(anchors=(0, 6), kept_from=4)
    with pytest.raises(VersionError, match="version 40 is not on branch"):
        propose(chain, GateVerdict.HOLD, 40)
    with pytest.raises(Unreachable, match="expired"):
        propose(chain, GateVerdict.ROLL_BACK, 5)
    chain.observe(decided(GateVerdict.REJECT, 8))
    with pytest.raises(VersionError, match="rejected by ada: because"):
        propose(chain, GateVerdict.HOLD, 8)
    chain.observe(acknowledgement(RUN, "a", 7, at=1, status=AckStatus.REFUSED))
    with pytest.raises(VersionError, match="refused by a and proved by none; a says: because"):
        propose(chain, GateVerdict.HOLD, 7)
    chain.observe(acknowledgement(RUN, "b", 7, at=1))
    assert propose(chain, GateVerdict.HOLD, 7).version == 7


def test_the_limit_is_the_newest_decision_that_is_not_a_rejection():
    chain = long_chain()
    assert chain.gate.limit is None
    for made in (decided(GateVerdict.HOLD, 5), decided(GateVerdict.REJECT, 7)):
        chain.observe(made)
    assert chain.gate.limit.version == 5
    chain.observe(decided(GateVerdict.RELEASE, None))
    assert chain.gate.limit is None


def test_a_roll_back_is_followed_when_every_recently_active_replica_serves_it():
    following = DecisionFollowers(decided(GateVerdict.ROLL_BACK, 5, at=1000), head=9, recent_us=100)
    following.observe(acknowledgement(RUN, "old", 9, at=800))
    following.observe(acknowledgement(RUN, "a", 9, at=950))
    assert following.behind == {"a": 9}
    following.observe(acknowledgement(RUN, "a", 6, at=1001, status=AckStatus.REFUSED, serving=9))
    assert following.behind == {"a": 9}
    following.observe(acknowledgement(RUN, "a", 5, at=1002))
    assert not following.behind
    following.observe(acknowledgement(RUN, "old", 9, at=1003))
    assert following.behind == {"old": 9}


def test_a_pin_moves_no_replica_back_and_a_release_leads_to_the_head():
    held = DecisionFollowers(decided(GateVerdict.HOLD, 5, at=1000), head=9, recent_us=100)
    held.observe(acknowledgement(RUN, "a", 9, at=950))
    held.observe(acknowledgement(RUN, "b", 4, at=950))
    assert (held.behind, held.beyond) == ({"a": 9, "b": 4}, {"a": 9})
    released = DecisionFollowers(decided(GateVerdict.RELEASE, None, at=1000), head=9, recent_us=100)
    released.observe(acknowledgement(RUN, "a", 8, at=1001))
    assert released.behind == {"a": 8}
    released.observe(acknowledgement(RUN, "a", 10, at=1002))
    assert not released.behind


def test_a_checked_anchor_leaves_no_copy_of_its_files(tmp_path: Path):
    """A verification checks every anchor of a chain: together they may not fit on the disk."""
    view = first_view()
    fsspec.filesystem("memory").put(str(write_checkpoint(tmp_path / "v4", view)), "/checked/v4", recursive=True)
    copies = tmp_path / "copies"
    copies.mkdir()
    tensors, mirror = tensor_infos(view), Mirror()
    of_anchor = {"tensors": tensors, "fingerprint": total_fingerprint(tensors).hex()}
    with closing(Builder(lambda *_: iter(()), copies)) as builder:
        for _ in range(2):  # from an empty mirror, then as a check
            builder.change(
                mirror, UpdatePath(replace(manifest(4), anchor=Anchor("memory://checked/v4", 1), **of_anchor), ())
            )
    assert list(copies.iterdir()) == []
