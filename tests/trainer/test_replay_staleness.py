"""Recorded steps judged by another bound on policy lag."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.records import build, member_of
from tests.trainer.conftest import builder_of, make_group, make_rollout
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import Exclusion, Group, RolloutStatus, StepExclusion, StepInput, TrainStep
from tidemill.trainer.replay.staleness import judge, places_of
from tidemill.trainer.trainable import Reference, TrainableGroup, lag_of


def at(offset: int) -> Position:
    return Position(Topic.GROUPS.value, 0, offset)


def step(number: int, version: int, trained: list[int], excluded: dict[int, str], bound: int = 2) -> TrainStep:
    """Make the record of a step from `version`, with the trained offsets and the excluded ones with their reasons."""
    return build(TrainStep, step=number, parent_version=version,
                 inputs=[StepInput(f"g{o}", Topic.GROUPS.value, 0, o) for o in trained],
                 exclusions=[StepExclusion(f"g{o}", Topic.GROUPS.value, 0, o, why, 1) for o, why in excluded.items()],
                 metrics={"policy_lag_bound": float(bound)})  # fmt: skip


def made(name: str, versions: list[int]) -> Group:
    """Make a group with one rollout of each given version."""
    rollouts = [make_rollout(name, i, float(i % 2), len(versions), v) for i, v in enumerate(versions)]
    return make_group(name, [member_of(r, 0, i) for i, r in enumerate(rollouts)])


def test_groups_leave_and_join_steps_and_the_first_changed_step_is_reported():
    groups = {at(0): made("g0", [0, 1]), at(1): made("g1", [4, 5]), at(2): made("g2", [3, 5])}
    steps = [step(1, 0, [0], {}), step(6, 5, [1], {2: Exclusion.STALE.value})]
    assert places_of(steps) == set(groups)
    same = judge(steps, groups, 1)
    assert [(s.trained, s.stale, s.max_lag, s.moved) for s in same] == [(1, 0, 0, []), (1, 1, 1, [])]
    (moved,) = judge(steps, groups, 0)[1].moved
    assert (moved.group_id, moved.lag, moved.moved) == ("g1", 1, "excluded")
    (moved,) = judge(steps, groups, 2)[1].moved
    assert (moved.group_id, moved.lag, moved.moved) == ("g2", 2, "included")


def test_other_reasons_stay_and_lost_groups_are_counted():
    steps = [step(3, 2, [0], {1: Exclusion.LATE.value, 2: Exclusion.STALE.value})]
    (judged,) = judge(steps, {at(0): made("g0", [2])}, 9)
    assert (judged.moved, judged.unknown, judged.stale, judged.bound) == ([], 1, 1, 2)


def test_a_failed_member_does_not_count():
    group = made("g", [0, 4])
    failed = replace(group.members[0], status=RolloutStatus.FAILED, reward=None)
    assert lag_of(replace(group, members=[failed, group.members[1]]), 5) == 1
    assert lag_of(replace(group, members=[failed]), 5) == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8), st.integers(0, 4))
def test_the_recorded_bound_moves_nothing(versions, bound):
    """At the recorded bound, the replay decides the same as the trainer's own builder."""
    found: dict[Position, Group] = {}
    builder = builder_of(groups_per_step=1, max_policy_lag=bound, skip_no_signal=False)
    for offset, pair in enumerate(versions):
        rollouts = tuple(make_rollout(f"g{offset}", i, float(i), 2, v) for i, v in enumerate(pair))
        members = [member_of(r, 0, i) for i, r in enumerate(rollouts)]
        found[at(offset)] = group = make_group(f"g{offset}", members)
        place = StepInput(f"g{offset}", Topic.GROUPS.value, 0, offset)
        if builder.wants(Reference(place, group), 6):
            builder.accept(TrainableGroup(place, group, rollouts))
    batch = builder.take(100)
    taken = replace(
        step(7, 6, [], {}, bound), inputs=[group.place for group in batch.groups], exclusions=batch.exclusions
    )
    (judged,) = judge([taken], found, bound)
    assert judged.moved == [] and judged.trained + judged.stale == len(versions)
    (open_bound,) = judge([taken], found, 6)
    assert len(open_bound.moved) == judged.stale
