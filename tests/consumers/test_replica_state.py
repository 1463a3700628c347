"""The replica's decisions: for records in any order and with any damage, the cheapest undamaged path or none."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import build
from tidemill.consumers.replica.config import Pool
from tidemill.consumers.replica.state import ReplicaState, UpdateAction
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionGraph
from tidemill.schemas.records import Anchor, GateDecision, GateVerdict, Manifest, SkipDelta

ANCHOR_BYTES, DELTA_BYTES = 1000, 10


def manifest(version: int, parent: int | None = -1, anchor: bool = False, fingerprint: str = "", n_bytes=DELTA_BYTES):
    return build(Manifest, run_id="r", version=version, parent=version - 1 if parent == -1 else parent,
                 delta_bytes=n_bytes, fingerprint=fingerprint or f"f{version}",
                 anchor=Anchor(f"v{version}", ANCHOR_BYTES) if anchor else None)  # fmt: skip


def skip(base: int, version: int, n_bytes: int = 15) -> SkipDelta:
    return build(SkipDelta, run_id="r", version=version, base=base, n_bytes=n_bytes)


def decision(verdict: str, version: int | None = None) -> GateDecision:
    return build(GateDecision, run_id="r", verdict=GateVerdict(verdict), version=version, reason="reward fell")


def first() -> Manifest:
    return manifest(0, parent=None, anchor=True)


def serving(version: int, *more) -> ReplicaState:
    """Return the state of a replica at `version` that has read `more`; version 0 is the only anchor."""
    state = ReplicaState("r", "main")
    for number in range(version + 1):
        state.observe(first() if number == 0 else manifest(number))
    state.proved(version)
    for record in more:
        state.observe(record)
    return state


def way(state: ReplicaState) -> tuple[int | None, list[tuple[int, int]]]:
    """Return the anchor's version, and base and version of each delta, of the replica's next update."""
    move = state.plan()
    assert move is not None
    return _ends(move.path)


def _ends(found: UpdatePath) -> tuple[int | None, list[tuple[int, int]]]:
    return found.anchor and found.anchor.version, [(delta.base, delta.version) for delta in found.deltas]


def refused(state: ReplicaState) -> list[int]:
    return [manifest.version for manifest, _ in state.refusals()]


def test_a_child_of_the_served_version_is_applied():
    state = serving(3, manifest(4))
    assert way(state) == (None, [(3, 4)])
    assert state.plan().reason == ""


def rounded(version: int, **changes) -> Manifest:
    return replace(manifest(version, **changes), serving_activations="mxfp8")


def test_a_version_with_other_activations_is_no_target_and_the_ones_after_it_are():
    state = serving(3, rounded(4), manifest(5))
    assert way(state) == (None, [(3, 4), (4, 5)]), "weights may be made over it"
    state.proved(5)
    assert refused(state) == []
    (told,) = serving(3, rounded(4, anchor=True)).refusals()
    assert told[1].startswith("version 4 has serving_activations mxfp8, and this engine computes version 3 with none")


@pytest.mark.parametrize("pool", ["stable", "canary"])
def test_a_pool_keeps_its_version_if_the_promoted_one_has_other_activations(pool):
    state = ReplicaState("r", "main", Pool(pool))
    for record in (first(), decision("promote", 0), rounded(1)):
        state.observe(record)
    state.proved(0)
    state.observe(decision("promote", 1))
    assert state.plan() is None
    assert [reason.partition(",")[0] for _, reason in state.refusals()] == ["version 1 has serving_activations mxfp8"]


@pytest.mark.parametrize("version", [1, 3])
def test_duplicates_and_older_versions_change_nothing(version):
    state = serving(3)
    assert state.observe(manifest(version)) == "" and state.plan() is None and refused(state) == []


@pytest.mark.parametrize("changes", [{"run_id": "other"}, {"branch": "other"}])
@pytest.mark.parametrize("record", [manifest(9, anchor=True), skip(3, 9), decision("hold", 1)])
def test_other_runs_and_branches_are_ignored(changes, record):
    state = serving(3, replace(record, **changes))
    assert state.head == 3 and state.plan() is None
    assert way(serving(3, replace(record, **changes), manifest(4))) == (None, [(3, 4)])


def test_a_gap_is_refused_once_and_closed_from_an_anchor():
    state = serving(3, manifest(5))
    assert state.plan() is None
    assert refused(state) == [5] and refused(state) == []
    state.observe(manifest(6, anchor=True))
    assert way(state) == (6, [])


def test_a_late_link_closes_the_gap():
    state = serving(1, manifest(3))
    assert refused(state) == [3]
    state.observe(manifest(2))
    assert way(state) == (None, [(1, 2), (2, 3)])


@pytest.mark.parametrize("version", [2, 3])
def test_a_second_content_for_a_known_version_is_refused_and_the_first_one_stays(version):
    state = serving(3)
    assert "fork" in state.observe(manifest(version, fingerprint="other"))
    state.observe(manifest(4))
    assert way(state) == (None, [(3, 4)])


def test_a_version_with_an_older_parent_is_reached_over_its_own_chain():
    assert way(serving(5, manifest(6, parent=2))) == (0, [(0, 1), (1, 2), (2, 6)])


def test_only_a_newer_anchor_leads_past_a_refused_delta():
    state = serving(3, manifest(4))
    state.refused(state.plan().path.deltas[0])
    assert state.plan() is None
    state.observe(manifest(5))
    assert state.plan() is None and refused(state) == [5]
    state.observe(manifest(6, anchor=True))
    assert way(state) == (6, [])


def test_the_refused_delta_of_a_version_with_an_anchor_is_healed_by_it():
    state = serving(3, manifest(4, anchor=True))
    state.refused(state.plan().path.deltas[0])
    assert way(state) == (4, [])


def test_a_bad_anchor_is_replaced_by_an_older_one():
    state = ReplicaState("r", "main")
    for one in (first(), manifest(1, n_bytes=2000), manifest(2, anchor=True), manifest(3)):
        state.observe(one)
    assert way(state) == (2, [(2, 3)])
    state.refused(manifest(2))
    assert way(state) == (0, [(0, 1), (1, 2), (2, 3)])
    state.refused(state.plan().path.deltas[1])
    assert way(state) == (0, [(0, 1)])


def test_a_delta_that_was_refused_while_the_replica_joined_is_acknowledged_when_it_serves():
    state = ReplicaState("r", "main")
    for one in (first(), manifest(1), manifest(2)):
        state.observe(one)
    state.refused(state.plan().path.deltas[1])
    state.refused(state.plan().path.deltas[0])
    assert way(state) == (0, [])
    state.proved(0)
    assert state.plan() is None and refused(state) == [1, 2] and refused(state) == []


def test_a_replica_that_is_behind_takes_the_path_with_the_fewest_bytes():
    behind = [manifest(version) for version in range(1, 9)]
    assert way(serving(0, *behind)) == (None, [(v - 1, v) for v in range(1, 9)])
    assert way(serving(0, *behind, skip(0, 8, 15))) == (None, [(0, 8)])
    assert way(serving(0, *behind, skip(0, 7, 15))) == (None, [(0, 7), (7, 8)])
    assert way(serving(0, *behind, skip(0, 8, 90))) == (None, [(v - 1, v) for v in range(1, 9)])
    dear = [manifest(version, n_bytes=900) for version in range(1, 8)]
    assert way(serving(0, *dear, manifest(8, anchor=True, n_bytes=900), skip(0, 8, 1001))) == (8, [])


def test_a_bad_skip_delta_is_avoided():
    state = serving(0, *[manifest(version) for version in range(1, 5)], skip(0, 4))
    state.refused(state.plan().path.deltas[0])
    assert way(state) == (None, [(0, 1), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(("base", "version"), [(4, 4), (5, 4), (-1, 4)])
def test_a_skip_delta_leads_forwards_from_a_version_that_exists(base, version):
    state = serving(3)
    assert "forwards" in state.observe(skip(base, version))


def test_a_skip_delta_closes_a_gap():
    state = serving(3, manifest(7), skip(3, 7))
    assert way(state) == (None, [(3, 7)])
    assert "1 of them skip-deltas" in state.plan().reason


def test_a_late_joiner_reports_how_many_deltas_it_replays():
    state = ReplicaState("r", "main")
    for one in (first(), manifest(1), manifest(2)):
        state.observe(one)
    assert state.plan().reason == "started from the anchor of version 0 and 2 deltas, 1020 bytes"


def test_a_hold_limits_updates_and_does_not_change_the_served_version():
    state = serving(3, decision("hold", 4), manifest(4), manifest(5))
    assert way(state) == (None, [(3, 4)])
    state.proved(4)
    assert state.plan() is None
    assert state.refusals()[0][1] == "held at version 4 by ada: reward fell"
    ahead = serving(3, decision("hold", 2))
    assert ahead.plan() is None and refused(ahead) == []


def test_a_roll_back_leads_to_an_older_version_and_no_further():
    state = serving(5, decision("roll_back", 2), manifest(6))
    assert way(state) == (0, [(0, 1), (1, 2)])
    assert state.plan().reason == "rolled back to version 2 by ada: reward fell"
    state.proved(2)
    assert state.plan() is None and refused(state) == [3, 4, 6]
    state.observe(decision("release"))
    assert way(state) == (None, [(v - 1, v) for v in range(3, 7)])


def test_a_roll_back_that_cannot_be_carried_out_is_reported_once_and_the_version_stays():
    state = serving(5, decision("roll_back", 2))
    state.refused(first())
    assert state.plan() is None
    ((manifest, reason),) = state.refusals()
    assert manifest.version == 5 and "rolled back" in reason and state.refusals() == []


def test_a_rejected_version_is_passed_and_never_served():
    state = serving(3, decision("reject", 4), manifest(4))
    assert state.plan() is None and "rejected" in state.refusals()[0][1]
    state.observe(manifest(5))
    assert way(state) == (None, [(3, 4), (4, 5)])


def test_a_replica_at_a_rejected_version_changes_to_the_newest_other_version():
    assert way(serving(5, decision("reject", 5))) == (0, [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert way(serving(5, decision("reject", 5), manifest(6))) == (None, [(5, 6)])


def test_a_rejection_does_not_end_a_hold():
    assert serving(3, decision("hold", 3), decision("reject", 2), manifest(4)).plan() is None


def test_a_promotion_is_a_limit_that_moves():
    state = serving(3, decision("promote", 4), manifest(4), manifest(5))
    assert way(state) == (None, [(3, 4)])
    state.observe(decision("promote", 5))
    assert way(state) == (None, [(3, 4), (4, 5)])


def test_a_decision_without_a_version_is_ignored():
    state = serving(3)
    assert "names no version" in state.observe(decision("hold"))
    state.observe(manifest(4))
    assert way(state) == (None, [(3, 4)])


@st.composite
def _logs(draw: st.DrawFn) -> list[tuple[Manifest | SkipDelta | GateDecision, bool]]:
    """Draw records of a branch in any order, repeated, with gaps, forks and rollbacks; and whether their bytes fit."""
    log = []
    for _ in range(draw(st.integers(1, 25))):
        version = draw(st.integers(0, 8))
        kind = draw(st.sampled_from(["manifest"] * 5 + ["skip", "gate"]))
        if kind == "skip":
            record = skip(draw(st.integers(-1, 8)), version, draw(st.integers(0, 50)))
        elif kind == "gate":
            record = decision(draw(st.sampled_from(list(GateVerdict))), draw(st.none() | st.just(version)))
        else:
            parent = None if version == 0 else draw(st.integers(0, version - 1) | st.just(version - 1))
            anchor = version == 0 or draw(st.booleans())
            content = draw(st.sampled_from(["a", "a", "b"]))
            record = manifest(version, parent, anchor, f"{content}{version}", draw(st.integers(0, 2000)))
        log.append((record, draw(st.booleans())))
    return log


@given(_logs())
def test_for_any_log_the_served_version_only_follows_paths_and_the_gate(log):
    state, refusals = ReplicaState("r", "main"), set()
    decisions: list[GateDecision] = []
    for record, fits in log:
        if isinstance(record, GateDecision) and not state.observe(record):
            decisions.append(record)
        elif not isinstance(record, GateDecision):
            state.observe(record)
        while (move := state.plan()) is not None:
            _check(move, state.serving, refusals, decisions)
            if fits:
                state.proved(move.target.version)
            elif move.path.anchor is not None:
                state.refused(move.path.anchor)
                refusals.add(("anchor", move.path.anchor.version))
            else:
                state.refused(move.path.deltas[0])
                refusals.add(("delta", move.path.deltas[0].base, move.path.deltas[0].version))
        said = state.refusals()
        assert state.refusals() == [] and len({manifest.version for manifest, _ in said}) == len(said)


def _check(move: UpdateAction, before: int | None, refusals: set, decisions: list[GateDecision]) -> None:
    at = before if move.path.anchor is None else move.path.anchor.version
    assert ("anchor", at) not in refusals or move.path.anchor is None
    for delta in move.path.deltas:
        assert delta.base == at and ("delta", delta.base, delta.version) not in refusals
        at = delta.version
    assert at == move.target.version != before
    rejected = {one.version for one in decisions if one.verdict is GateVerdict.REJECT}
    without_limit = (GateVerdict.REJECT, GateVerdict.CANARY, GateVerdict.ADMIT)
    limits = [one for one in decisions if one.verdict not in without_limit]
    limit = limits[-1].version if limits and limits[-1].verdict is not GateVerdict.RELEASE else None
    assert at not in rejected and (limit is None or at <= limit)
    if before is not None and at < before:
        assert before in rejected or (limits[-1].verdict is GateVerdict.ROLL_BACK and before > limit)


EDGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 40)), max_size=12)


@given(EDGES, st.lists(st.integers(0, 60), min_size=6, max_size=6), st.integers(0, 5), st.none() | st.integers(0, 5))
def test_no_path_is_cheaper_than_the_one_that_is_found(edges, anchors, target, held):
    """Compare with every possible path: six versions, edges between any two, an anchor if the anchor's size is even."""
    graph = VersionGraph(manifest(0).run_id, "main")
    for version in range(6):
        anchor = Anchor("", anchors[version]) if anchors[version] % 2 == 0 else None
        graph.observe(replace(manifest(version, parent=None), anchor=anchor))
    for base, version, n_bytes in edges:
        graph.observe(skip(base, version, n_bytes))
    found = graph.path(target, held)
    costs = _costs_of_all_paths(graph, target, held)
    assert (found.n_bytes if found else None) == min(costs, default=None)


def _costs_of_all_paths(graph: VersionGraph, target: int, held: int | None) -> list[int]:
    costs = []
    edges = {(delta.base, delta.version): delta for delta in graph.skip_deltas()}
    for length in range(6):
        for between in combinations(range(target), length):
            path = [*between, target]
            if all(pair in edges for pair in pairwise(path)):
                deltas: tuple[Delta, ...] = tuple(edges[pair] for pair in pairwise(path))
                start = graph.manifests[path[0]]
                costs += [UpdatePath(None, deltas).n_bytes] if path[0] == held else []
                costs += [UpdatePath(start, deltas).n_bytes] if start.anchor else []
    return costs
