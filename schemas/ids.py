"""Ids that follow from other ids."""

from __future__ import annotations


def rollout_id(group_id: str, index: int) -> str:
    """The id of the rollout at an index of a group: a repeated rollout has the id of the first one."""
    return f"{group_id}/{index}"


def rollout_index(rollout_id: str) -> int | None:
    """The index in its group that a rollout's id names; None for an id of another scheme."""
    number = rollout_id.rpartition("/")[2]
    return int(number) if number.isdecimal() else None
