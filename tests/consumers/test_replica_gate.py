"""Pools: users get only promoted versions, the canary pool the version on trial; both go back without a restart."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.consumers import replica_driver as driver
from tests.consumers.replica_support import ArrayReplica, base_directory, small_view
from tests.consumers.test_replica_state import decision, first, manifest, refused, skip, way
from tidemill.consumers.replica.config import Pool
from tidemill.consumers.replica.state import ReplicaState
from tidemill.schemas.records import GateDecision, GateVerdict, Manifest

ANCHORS = (0, 4, 8)


def versions(count: int) -> list[Manifest]:
    """Return a chain with an anchor every fourth version."""
    return [first(), *(manifest(version, anchor=version in ANCHORS) for version in range(1, count))]


def settle(state: ReplicaState) -> list[int]:
    """Carry out every plan; return the versions that were served."""
    passed = []
    while (move := state.plan()) is not None:
        state.proved(move.target.version)
        passed.append(move.target.version)
        assert len(passed) < 30, f"it does not settle: {passed}"
    return passed


def in_pool(pool: Pool, *records) -> ReplicaState:
    """Return a replica that has read `records` and carried out its plans."""
    state = ReplicaState("r", "main", pool)
    for record in records:
        state.observe(record)
    settle(state)
    return state


def then(state: ReplicaState, *records) -> int | None:
    """Read more records and carry out the plans; return the served version."""
    for record in records:
        state.observe(record)
    settle(state)
    return state.serving


@pytest.mark.parametrize("pool", [Pool.STABLE, Pool.CANARY])
def test_before_a_decision_the_oldest_version_is_served_and_no_newer_one(pool):
    state = in_pool(pool, *versions(10))
    assert state.serving == 0 and refused(state) == []


ROLLED_BACK = [("promote", 3, 3), ("promote", 7, 7), ("roll_back", 3, 3)]
TRIED = [("promote", 3, 3), ("canary", 7, 7)]
STORIES = {
    "only promoted versions are stable": (
        Pool.STABLE, [("promote", 3, 3), ("canary", 7, 3), ("admit", 9, 3), ("promote", 7, 7)]),
    "an older version is promoted": (
        Pool.STABLE, [("promote", 7, 7), ("promote", 3, 3), ("promote", 7, 7), ("promote", 3, 3)]),
    "a hold brings no version to users": (
        Pool.STABLE, [("promote", 3, 3), ("hold", 5, 3), ("promote", 7, 7), ("hold", 5, 7)]),
    "a release does not undo a roll-back": (Pool.STABLE, [*ROLLED_BACK, ("release", None, 3), ("promote", 5, 5)]),
    "a rejection leads back": (Pool.STABLE, [*ROLLED_BACK, ("reject", 7, 3), ("release", None, 3), ("reject", 3, 0)]),
    "an older candidate is tried too": (Pool.CANARY, [*TRIED, ("promote", 7, 7), ("canary", 5, 5)]),
    "another version is rejected": (Pool.CANARY, [*TRIED, ("reject", 6, 7)]),
    **{f"a trial ends with {verdict}": (Pool.CANARY, [*TRIED, (verdict, version, 3)]) for verdict, version in
       (("reject", 7), ("roll_back", 3), ("hold", 3), ("promote", 3), ("release", None))},
}  # fmt: skip
"""Decisions of the gate, each with the version that a replica of the pool then serves."""


@pytest.mark.parametrize("story", STORIES)
def test_a_replica_serves_the_version_that_the_gate_decides(story):
    pool, decisions = STORIES[story]
    state = in_pool(pool, *versions(10))
    for verdict, version, served in decisions:
        assert then(state, decision(verdict, version)) == served, (verdict, version)


def test_a_late_joiner_of_the_stable_pool_builds_the_promoted_version_from_an_older_anchor():
    state = ReplicaState("r", "main", Pool.STABLE)
    for record in (*versions(10), decision("promote", 6)):
        state.observe(record)
    assert way(state) == (4, [(4, 5), (5, 6)])


def test_a_roll_back_is_a_path_from_an_anchor():
    state = in_pool(Pool.STABLE, *versions(10), decision("promote", 7))
    state.observe(decision("roll_back", 3))
    assert way(state) == (0, [(0, 1), (1, 2), (2, 3)])
    assert state.plan().reason == "rolled back to version 3 by ada: reward fell"


def test_the_reason_for_the_end_of_a_trial_is_reported():
    state = in_pool(Pool.CANARY, *versions(10), decision("promote", 3), decision("canary", 7))
    state.observe(decision("release"))
    assert state.plan().reason == "version 7 was not promoted"


def test_a_decision_before_its_version_has_no_effect_until_the_version_arrives():
    state = in_pool(Pool.CANARY, *versions(5), decision("canary", 3))
    assert then(state, decision("canary", 5)) == 3
    assert then(state, manifest(5)) == 5


def test_a_promoted_version_that_cannot_be_reached_is_refused_once():
    state = in_pool(Pool.STABLE, first(), manifest(3), decision("promote", 3))
    assert state.serving == 0
    assert refused(state) == [3] and refused(state) == []


def test_a_missing_path_back_is_reported_once():
    state = in_pool(Pool.STABLE, *versions(4), decision("promote", 3))
    state.refused(first())
    assert then(state, decision("promote", 2)) == 3
    (stuck, reason), (unreachable, _) = state.refusals()
    assert stuck.version == 3 and "promoted no further than version 2" in reason
    assert unreachable.version == 2 and state.refusals() == []


def test_a_rejected_first_version_is_not_replaced_by_an_unpromoted_one():
    state = in_pool(Pool.STABLE, *versions(10))
    assert then(state, decision("reject", 0)) == 0
    ((_, reason),) = state.refusals()
    assert "no usable anchor" in reason
    assert in_pool(Pool.STABLE, *versions(10), decision("reject", 0)).serving is None


@pytest.mark.parametrize("verdict", ["canary", "admit"])
def test_without_a_pool_a_trial_and_an_admission_change_nothing(verdict):
    state = in_pool(Pool.ALL, *versions(6), decision("hold", 6), decision(verdict, 2))
    assert state.serving == 5 and then(state, manifest(6), manifest(7)) == 6


def test_a_stable_replica_updates_its_weights_forwards_and_backwards_in_place(tmp_path):
    log, views, base = driver.MemoryLog(), [small_view()], base_directory(tmp_path / "base")
    anchor = driver.save_view(views[0], base, tmp_path / "v0")
    replica = ArrayReplica(driver.publish(log, 0, None, views[0], anchor), log, tmp_path / "staging", pool=Pool.STABLE)
    for version in range(1, 5):
        views.append(driver.nudged(views[-1], version))
        assert replica.observe(driver.publish(log, version, views[-2], views[-1])) == []
    for verdict, version, served in (("promote", 3, 3), ("canary", 4, 3), ("roll_back", 1, 1), ("reject", 1, 0)):
        replica.observe(replace(decision(verdict, version), run_id=driver.RUN.run_id))
        assert replica.state.serving == served and replica.engine.holds(views[served])
    assert replica.engine.loads == 0 and [ack.serving_version for ack in replica.acks] == [0, 3, 1, 0]
    replica.close()


def step(verdict: GateVerdict, version: int) -> GateDecision:
    return decision(verdict.value, None if verdict is GateVerdict.RELEASE else version)


DECISIONS = st.builds(step, st.sampled_from(list(GateVerdict)), st.integers(0, 9))
PUBLISHED = st.builds(
    lambda v, a: manifest(v, None if v == 0 else v - 1, a or v == 0), st.integers(0, 9), st.booleans()
)
SKIPS = st.builds(skip, st.integers(0, 9), st.integers(0, 9))
LOGS = st.lists(DECISIONS | PUBLISHED | SKIPS, max_size=30)


@given(LOGS, st.sampled_from([Pool.STABLE, Pool.CANARY]))
def test_a_replica_of_a_pool_serves_only_versions_that_the_gate_allows(log, pool):
    state, said = ReplicaState("r", "main", pool), []
    for record in log:
        state.observe(record)
        said += [record] if isinstance(record, GateDecision) else []
        for version in settle(state):
            _check(version, said, pool, state)
    while_it_stays = state.serving
    assert settle(state) == [] and state.serving == while_it_stays


def _check(version: int, said: list[GateDecision], pool: Pool, state: ReplicaState) -> None:
    assert version not in {one.version for one in said if one.verdict is GateVerdict.REJECT}
    served = {GateVerdict.PROMOTE, GateVerdict.ROLL_BACK} | ({GateVerdict.CANARY} if pool is Pool.CANARY else set())
    oldest = next(v for v in sorted(state._graph.manifests) if state._graph.path(v, None) is not None)
    assert version in {one.version for one in said if one.verdict in served} | {oldest}
    limits = [one for one in said if one.verdict not in (GateVerdict.REJECT, GateVerdict.ADMIT)]
    while limits and limits[-1].verdict is GateVerdict.CANARY:
        if pool is Pool.CANARY and limits[-1].version == version:
            return
        limits.pop()
    if limits and limits[-1].verdict is not GateVerdict.RELEASE:
        assert version <= limits[-1].version


@given(LOGS, st.integers(0, 9), st.sampled_from(["promote", "roll_back"]))
def test_the_stable_pool_serves_the_version_named_last_if_it_can_be_reached(log, version, verdict):
    state = in_pool(Pool.STABLE, *log)
    rejected = any(one.verdict is GateVerdict.REJECT and one.version == version for one in log if _decides(one))
    reachable = state._graph.path(version, state.serving) is not None
    served = then(state, decision(verdict, version))
    assert (served == version) or rejected or not reachable


def _decides(record: object) -> bool:
    return isinstance(record, GateDecision)
