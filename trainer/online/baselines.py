"""Advantages of the interactions of one online batch, from their rewards: pure functions, float64 in and out.

An interaction is one answer to one prompt, so there is no group to compare it with: this is REINFORCE, and a baseline
is taken from the other interactions of the batch to lower its variance. A baseline that does not depend on the
interaction's own reward leaves the expected gradient as it is; the mean of the whole batch does depend on it, and
shrinks the gradient by (n - 1) / n.

All take `rewards` f8[n] and `arms`, the experiment arm of each, and return f8[n]. Equal rewards get exactly zero from
every baseline, for any rounding of their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tidemill.trainer.advantages import Rewards, centred, leave_one_out, penalise
from tidemill.trainer.choices import BaselineKind
from tidemill.trainer.online.trainable import TrainableBatch


def no_baseline(rewards: Rewards, arms: Sequence[str]) -> Rewards:
    """r_i. Right for target-rate rewards: with 1 - rate for accepted and -rate for rejected, the expected advantage of
    an action is above zero if and only if it is accepted more often than `rate`."""
    return rewards.copy()


def batch_mean(rewards: Rewards, arms: Sequence[str]) -> Rewards:
    """r_i - mean(r)."""
    return centred(rewards)


def others_mean(rewards: Rewards, arms: Sequence[str]) -> Rewards:
    """r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(r)): unbiased."""
    return leave_one_out(rewards)


def arm_mean(rewards: Rewards, arms: Sequence[str]) -> Rewards:
    """r_i - mean of the others' rewards in the same arm; of all others for one that is alone in its arm. Unbiased.

    Takes out of the variance what differs between arms, which is not the answer's merit.
    """
    found = others_mean(rewards, arms)
    of_arm = np.array(arms)
    for arm in set(arms):
        places = of_arm == arm
        if places.sum() > 1:
            found[places] = leave_one_out(rewards[places])
    return found


Baseline = Callable[[Rewards, Sequence[str]], Rewards]

BASELINES: dict[BaselineKind, Baseline] = {
    BaselineKind.NONE: no_baseline,
    BaselineKind.MEAN: batch_mean,
    BaselineKind.LEAVE_ONE_OUT: others_mean,
    BaselineKind.ARM: arm_mean,
}


def advantages(
    kind: BaselineKind, rewards: Rewards, corrections: npt.NDArray[np.bool_], arms: Sequence[str]
) -> Rewards:
    """f8[n]: rewards less their baseline; of a correction what the reward changed by, which has no baseline: that was
    taken off when the reward was trained first.

    Raises GroupTooSmallError when a baseline has fewer than two rewards to be taken from.
    """
    found = rewards.copy()
    plain = ~corrections
    if plain.any():
        found[plain] = BASELINES[kind](rewards[plain], [a for a, kept in zip(arms, plain, strict=True) if kept])
    return found


def batch_advantages(kind: BaselineKind, batch: TrainableBatch, divergence: Rewards, coefficient: float) -> Rewards:
    """f8[n]: `advantages` of a batch whose rewards are first lowered by coefficient * `divergence` (f8[n], see
    `advantages.penalise`), corrections aside: theirs was lowered when it was trained first."""
    corrections = batch.corrections()
    penalty = np.where(corrections, 0.0, divergence)
    return advantages(kind, penalise(batch.rewards(), penalty, coefficient), corrections, batch.arms())


def has_signal(kind: BaselineKind, batch: TrainableBatch) -> bool:
    """Whether some advantage is not zero."""
    return bool(advantages(kind, batch.rewards(), batch.corrections(), batch.arms()).any())
