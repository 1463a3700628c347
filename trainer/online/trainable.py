"""An online batch that can be trained on: its record, its place in the log, and the interactions that are left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Interaction, OnlineBatch, OnlineMember, StepExclusion, StepInput


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
