"""Ids derived from other ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.schemas.records import rollout_id, rollout_index


@given(st.text(), st.integers(0, 10**6))
def test_a_rollouts_id_names_its_group_and_its_index(group: str, index: int):
    assert rollout_id(group, index).startswith(group)
    assert rollout_index(rollout_id(group, index)) == index


def test_groups_and_indexes_have_ids_of_their_own_and_other_ids_have_no_index():
    pairs = [("run/train/1", 2), ("run/train/12", 0), ("run/train", 12), ("run/train/1", 20)]
    assert len({rollout_id(*pair) for pair in pairs}) == len(pairs)
    assert [rollout_index(name) for name in ("run/train/x", "r²", "", "group/")] == [None] * 4
