"""A group that can be trained on: its record, its place in the log, and the rollouts that it refers to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.schemas.records import Group, GroupMember, Rollout, RolloutStatus, StepInput


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """One group of a batch. `rollouts` are its completed members' rollouts, in member order."""

    place: StepInput
    group: Group
    rollouts: tuple[Rollout, ...]
    replays: frozenset[str] = frozenset()
    """Ids of the replays that wrote its record or one of its rollouts."""

    def rewards(self) -> npt.NDArray[np.float64]:
        """f8[G]: rewards of the completed members as group assembly recorded them, permuted ones in a control run."""
        return rewards(self.group)


def completed(group: Group) -> list[GroupMember]:
    """Members that finished with a reward, in member order."""
    return [m for m in group.members if m.status is RolloutStatus.COMPLETED and m.reward is not None]


def rewards(group: Group) -> npt.NDArray[np.float64]:
    """f8[G]: rewards of the completed members, in member order."""
    return np.array([member.reward for member in completed(group)], np.float64)


def has_signal(group: Group) -> bool:
    """Whether the completed members' rewards differ, so that some advantage is not zero."""
    values = rewards(group)
    return len(values) > 0 and bool(values.max() > values.min())
