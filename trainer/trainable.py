"""What one step can be trained on: a group with its rollouts, an online batch with the interactions that are left.

Each has its record and its place in the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.records import (
    Group,
    GroupMember,
    Interaction,
    OnlineBatch,
    OnlineMember,
    Rollout,
    RolloutStatus,
    StepExclusion,
    StepInput,
)


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """One group of a batch. `rollouts` are its completed members' rollouts, in member order."""

    place: StepInput
    group: Group
    rollouts: tuple[Rollout, ...]
    replays: frozenset[str] = frozenset()
    """Ids of the replays that wrote its record or one of its rollouts."""
    expert_ids: tuple[ExpertIds, ...] = field(default=(), compare=False)
    """Of each of the rollouts, where they are asked for."""

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


def other_sampling(sampled: Iterable[Rollout | Interaction]) -> str:
    """How any of these was sampled from another distribution than the model's own; empty where none was.

    A record from before this was recorded is taken to be of the model's own.
    """
    found = (record.sampling.changes() for record in sampled if record.sampling is not None)
    return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class TrainableBatch:
    """The online batch of one step, of n interactions."""

    place: StepInput
    batch: OnlineBatch
    members: tuple[OnlineMember, ...]
    """What is trained, in the order of the record."""
    interactions: tuple[Interaction, ...]
    """Theirs, with their segments."""
    excluded: tuple[StepExclusion, ...] = ()
    """What of the record is not trained; only these exclusions of a step are of interactions."""

    def rewards(self) -> npt.NDArray[np.float64]:
        """f8[n]: the members' rewards; of a correction, what the reward changed by."""
        return np.array([member.reward for member in self.members], np.float64)

    def corrections(self) -> npt.NDArray[np.bool_]:
        """bool[n]: which members are corrections of a reward trained before."""
        return np.array([member.correction for member in self.members], np.bool_)

    def arms(self) -> list[str]:
        """The experiment arm of each member."""
        return [member.arm for member in self.members]


def exclusion(member: OnlineMember, reason: str) -> StepExclusion:
    """The one ending of an interaction that its batch is trained without."""
    return StepExclusion(
        member.interaction_id, Topic.INTERACTIONS.value, member.partition, member.offset, reason, rollouts=1
    )
