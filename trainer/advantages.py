"""Advantages from rewards: pure functions, float64 in and out.

For the rollouts of one group: functions of `rewards` f8[G], the total rewards of its completed members, to f8[G].

For the interactions of one online batch: functions of `rewards` f8[n] and `arms`, the experiment arm of each, to f8[n].
An interaction is one answer to one prompt, without a group to compare it with: this is REINFORCE, with a baseline from
the other interactions of the batch to lower its variance. A baseline that does not depend on the interaction's own
reward does not change the expected gradient; the mean of the whole batch depends on it, and scales the gradient by
(n - 1) / n.

Every function with a baseline gives exactly zero for equal rewards, for any rounding of their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tidemill.trainer.choices import BaselineKind
from tidemill.trainer.trainable import TrainableBatch

Rewards = npt.NDArray[np.float64]

STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, so that for nearly equal rewards the divisor is not almost zero."""


def require_two(kind: str, size: int) -> None:
    """Raise ValueError for a group-relative advantage of a group with fewer than two completed members."""
    if size < 2:
        raise ValueError(
            f"a {kind} advantage compares a rollout with the others of its group, and this group has {size} completed: "
            "use groups of two or more, or the objective `reinforce`, which has no baseline, with run.min_completed 1 "
            "and run.skip_no_signal false"
        )


def centred(rewards: Rewards) -> Rewards:
    """r_i - mean(r): Dr. GRPO (arXiv 2503.20783) and the Composer 2 report, section 4.1."""
    require_two("centred", len(rewards))
    return np.zeros_like(rewards) if rewards.max() == rewards.min() else rewards - rewards.mean()


def standardised(rewards: Rewards) -> Rewards:
    """(r_i - mean(r)) / (std(r) + 1e-6), population standard deviation: GRPO (arXiv 2402.03300)."""
    return centred(rewards) / (float(rewards.std()) + STANDARD_DEVIATION_FLOOR)


def leave_one_out(rewards: Rewards) -> Rewards:
    """r_i - mean of the others' rewards = G / (G - 1) * (r_i - mean(r)): RLOO (arXiv 2402.14740)."""
    return centred(rewards) * (len(rewards) / (len(rewards) - 1))


def raw(rewards: Rewards) -> Rewards:
    """r_i: REINFORCE without a baseline."""
    return rewards.copy()


def penalise(rewards: Rewards, divergence: Rewards, coefficient: float) -> Rewards:
    """r_i - coefficient * KL_i: subtract the divergence from a reference from the reward.

    `divergence` f8[G] is the sum over a rollout's sampled tokens of k1 = log pi - log pi_ref, without gradient. As a
    part of the reward it changes the weights through the policy gradient, which is the gradient of the KL; as a part of
    the loss its expected gradient would be zero.
    """
    return rewards - coefficient * divergence


def arm_mean(rewards: Rewards, arms: Sequence[str]) -> Rewards:
    """r_i - mean of the others' rewards in the same arm; of all others if it is alone in its arm. Unbiased.

    Removes the variance between arms, which the answer did not cause.
    """
    found = leave_one_out(rewards)
    of_arm = np.array(arms)
    for arm in set(arms):
        places = of_arm == arm
        if places.sum() > 1:
            found[places] = leave_one_out(rewards[places])
    return found


Baseline = Callable[[Rewards, Sequence[str]], Rewards]

BASELINES: dict[BaselineKind, Baseline] = {
    # Right for target-rate rewards: with 1 - rate for accepted and -rate for rejected, the expected advantage of an
    # action is above zero if and only if it is accepted more often than `rate`.
    BaselineKind.NONE: lambda rewards, _arms: raw(rewards),
    BaselineKind.MEAN: lambda rewards, _arms: centred(rewards),
    BaselineKind.LEAVE_ONE_OUT: lambda rewards, _arms: leave_one_out(rewards),
    BaselineKind.ARM: arm_mean,
}


def advantages(
    kind: BaselineKind, rewards: Rewards, corrections: npt.NDArray[np.bool_], arms: Sequence[str]
) -> Rewards:
    """Return f8[n]: rewards minus their baseline; for a correction, the change of the reward, without a baseline: it
    was subtracted when the reward was first trained.

    Raises ValueError if a baseline has fewer than two rewards to compare.
    """
    found = rewards.copy()
    plain = ~corrections
    if plain.any():
        found[plain] = BASELINES[kind](rewards[plain], [a for a, kept in zip(arms, plain, strict=True) if kept])
    return found


def batch_advantages(kind: BaselineKind, batch: TrainableBatch, divergence: Rewards, coefficient: float) -> Rewards:
    """Return f8[n]: `advantages` of a batch whose rewards are first lowered by coefficient * `divergence` (f8[n], see
    `advantages.penalise`), except for corrections: their reward was lowered when it was first trained."""
    corrections = batch.corrections()
    penalty = np.where(corrections, 0.0, divergence)
    return advantages(kind, penalise(batch.rewards(), penalty, coefficient), corrections, batch.arms())


def has_signal(kind: BaselineKind, batch: TrainableBatch) -> bool:
    """Return whether some advantage is not zero."""
    return bool(advantages(kind, batch.rewards(), batch.corrections(), batch.arms()).any())
