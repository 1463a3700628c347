"""Settings of learning from users."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section
from tidemill.trainer.choices import BaselineKind


class OnlineSettings(Section):
    """Learning from users: one large step per online batch, by REINFORCE, with simulated groups mixed in.

    `enabled`, `baseline`, `simulated_weight` and `learning_rate_scale` shape the arithmetic of a step.
    """

    enabled: bool = False
    """Take a step when an online batch is there, and not whenever enough groups are; follow `gate.decisions`."""

    baseline: BaselineKind = BaselineKind.LEAVE_ONE_OUT
    """What is subtracted from an interaction's reward: `leave_one_out`, the mean of the others' rewards; `arm`, the
    same among the interactions of its experiment arm; `mean`, the mean of the batch; `none`, which is right where the
    rewards are already balanced around a target rate (accepted 1 - rate, rejected -rate)."""

    simulated_groups_per_batch: int = Field(default=0, ge=0)
    """Simulated groups that join each online batch, at most; 0: none. What the feeder issues beyond grows stale."""

    max_wait_seconds: float = Field(default=30.0, ge=0)
    """Longest that an online batch waits for its simulated groups; then it is trained with those that are there."""

    simulated_weight: float = Field(default=1.0, ge=0)
    """How much the loss of the simulated groups counts in a step; that of the online batch counts 1."""

    learning_rate_scale: float = Field(default=1.0, gt=0)
    """Learning rate of a step with an online batch, as a multiple of the optimizer's."""

    max_policy_lag: int = Field(default=0, ge=0)
    """Most versions that an online batch may lie behind the trainer, on its line. 0: strictly on-policy. Above 0 the
    batch is weighted by `correction`."""

    min_members: int = Field(default=2, ge=1)
    """A batch with fewer interactions left, corrections aside, is not trained."""

    require_admission: bool = True
    """Learn only from versions that descend from one that the gate admitted: those passed the floor."""

    @model_validator(mode="after")
    def _baseline_has_others(self) -> Self:
        if self.min_members < 2 and self.baseline is not BaselineKind.NONE:
            raise ValueError(
                f"online.baseline {self.baseline} compares an interaction with others: set online.min_members to 2 or "
                "more, or online.baseline to none"
            )
        return self


ONLINE_ARITHMETIC_FIELDS = ("baseline", "simulated_weight", "learning_rate_scale")
