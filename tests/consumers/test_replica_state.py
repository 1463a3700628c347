"""The replica's decisions: a manifest, in any order and with any damage, leads along an unbroken chain or nowhere."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.consumers.replica.state import Apply, Ignore, Plan, Refuse, ReplicaState, Resync
from tidemill.schemas.records import Anchor, Manifest


def manifest(version: int, parent: int | None = -1, anchor: bool = False, fingerprint: str = "") -> Manifest:
    return Manifest(
        run_id="r", branch="main", version=version, parent=version - 1 if parent == -1 else parent, step=version,
        learning_rate=0.0, n_elements=0, n_changed=0, delta_bytes=0, shards=[], tensors=[],
        fingerprint=fingerprint or f"f{version}", anchor=Anchor(f"v{version}", 0) if anchor else None,
        trained_at=0, published_at=0,
    )  # fmt: skip


def first() -> Manifest:
    return manifest(0, parent=None, anchor=True)


def serving(version: int) -> ReplicaState:
    """A replica at `version`, version 0 being the only anchor."""
    state = ReplicaState("r", "main")
    for number in range(version + 1):
        state.remember(first() if number == 0 else manifest(number))
    state.proved(version)
    return state


def test_a_child_of_the_served_version_is_applied():
    assert serving(3).observe(manifest(4)) == Apply(manifest(4))


@pytest.mark.parametrize("version", [1, 3])
def test_duplicates_and_older_versions_are_ignored(version):
    assert isinstance(serving(3).observe(manifest(version)), Ignore)


@pytest.mark.parametrize("changes", [{"run_id": "other"}, {"branch": "other"}])
def test_other_runs_and_branches_are_ignored_and_not_remembered(changes):
    state = serving(3)
    assert isinstance(state.observe(replace(manifest(9), **changes)), Ignore)
    assert state.head == 3


def test_a_gap_is_closed_from_an_anchor_or_refused_without_one():
    state = serving(3)
    assert isinstance(state.observe(manifest(5)), Refuse)
    plan = state.observe(manifest(6, anchor=True))
    assert isinstance(plan, Resync) and plan.anchor.version == 6 and plan.deltas == ()


def test_a_late_link_closes_the_chain_from_the_old_anchor():
    state = serving(1)
    assert isinstance(state.observe(manifest(3)), Refuse)
    assert state.observe(manifest(2)) == Apply(manifest(2))
    state.proved(2)
    plan = state.catch_up()
    assert plan is not None and plan.target.version == 3


@pytest.mark.parametrize("version", [2, 3])
def test_a_second_content_for_a_known_version_is_refused_and_the_first_one_stands(version):
    state = serving(3)
    plan = state.observe(manifest(version, fingerprint="other"))
    assert isinstance(plan, Refuse) and "fork" in plan.reason
    assert state.observe(manifest(4)) == Apply(manifest(4))


def test_a_branch_off_an_older_parent_is_reached_over_its_own_chain():
    plan = serving(5).observe(manifest(6, parent=2))
    assert isinstance(plan, Resync)
    assert [m.version for m in (plan.anchor, *plan.deltas)] == [0, 1, 2, 6]


def test_a_refused_delta_is_led_past_only_by_a_newer_anchor():
    state = serving(3)
    state.observe(manifest(4))
    state.delta_refused(4)
    assert state.catch_up() is None
    assert isinstance(state.observe(manifest(5)), Refuse)
    plan = state.observe(manifest(6, anchor=True))
    assert isinstance(plan, Resync) and plan.anchor.version == 6


def test_the_refused_delta_of_a_version_with_an_anchor_is_healed_by_it():
    state = serving(3)
    state.observe(manifest(4, anchor=True))
    state.delta_refused(4)
    plan = state.catch_up()
    assert plan is not None and plan.anchor.version == 4


def test_a_bad_anchor_is_replaced_by_an_older_one():
    state = ReplicaState("r", "main")
    for one in (first(), manifest(1), manifest(2, anchor=True), manifest(3)):
        state.remember(one)
    assert [m.version for m in _versions(state.catch_up())] == [2, 3]
    state.anchor_refused(2)
    assert [m.version for m in _versions(state.catch_up())] == [0, 1, 2, 3]
    state.delta_refused(2)
    assert [m.version for m in _versions(state.catch_up())] == [0, 1]


def _versions(plan: Resync | None) -> list[Manifest]:
    assert plan is not None
    return [plan.anchor, *plan.deltas]


@st.composite
def _logs(draw: st.DrawFn) -> list[tuple[Manifest, bool]]:
    """Manifests of a branch in any order, repeated, with gaps, forks and rollbacks; and whether their bytes fit."""
    log = []
    for _ in range(draw(st.integers(1, 25))):
        version = draw(st.integers(0, 8))
        parent = None if version == 0 else draw(st.integers(0, version - 1) | st.just(version - 1))
        anchor = version == 0 or draw(st.booleans())
        content = draw(st.sampled_from(["a", "a", "b"]))
        log.append((manifest(version, parent, anchor, f"{content}{version}"), draw(st.booleans())))
    return log


@given(_logs())
def test_whatever_the_log_holds_the_served_version_only_moves_along_chains(log):
    state, refused = ReplicaState("r", "main"), set()
    for record, fits in log:
        before = state.serving
        plan: Plan | None = state.observe(record)
        while isinstance(plan, Apply | Resync):
            chain = [plan.manifest] if isinstance(plan, Apply) else _versions(plan)
            _check_chain(plan, before, chain, refused)
            if fits:
                state.proved(chain[-1].version)
                break
            if isinstance(plan, Resync):
                state.anchor_refused(plan.anchor.version)
                refused.add(("anchor", plan.anchor.version))
            else:
                state.delta_refused(plan.manifest.version)
                refused.add(("delta", plan.manifest.version))
            plan = state.catch_up()
        assert before is None or (state.serving is not None and state.serving >= before)


def _check_chain(plan: Plan, before: int | None, chain: list[Manifest], refused: set[tuple[str, int]]) -> None:
    assert before is None or chain[-1].version > before
    for parent, child in pairwise(chain):
        assert child.parent == parent.version and ("delta", child.version) not in refused
    if isinstance(plan, Apply):
        assert chain[0].parent == before and ("delta", chain[0].version) not in refused
    else:
        assert chain[0].anchor is not None and ("anchor", chain[0].version) not in refused
