"""Advantages of the rollouts of one group, from their rewards: pure functions, float64 in and out.

All take `rewards` f8[G], the total rewards of the completed members of one group, and return f8[G]. Members with equal
rewards get exactly zero from every function that has a baseline, for any rounding of their mean.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tidemill.trainer.choices import AdvantageKind

Rewards = npt.NDArray[np.float64]

STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, so that a group of nearly equal rewards does not divide by almost nothing."""


class GroupTooSmallError(ValueError):
    """A group-relative advantage was asked of a group with fewer than two completed members."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__(
            f"a {kind} advantage compares a rollout with the others of its group, and this group has {size} completed: "
            "use groups of two or more, or the objective `reinforce`, which has no baseline"
        )


def centred(rewards: Rewards) -> Rewards:
    """r_i - mean(r): Dr. GRPO (arXiv 2503.20783) and the Composer 2 report, section 4.1."""
    _require_pair("centred", rewards)
    return np.zeros_like(rewards) if _all_equal(rewards) else rewards - rewards.mean()


def standardised(rewards: Rewards) -> Rewards:
    """(r_i - mean(r)) / (std(r) + 1e-6), population standard deviation: GRPO (arXiv 2402.03300)."""
    return centred(rewards) / (float(rewards.std()) + STANDARD_DEVIATION_FLOOR)


def leave_one_out(rewards: Rewards) -> Rewards:
    """r_i - mean of the others' rewards = G / (G - 1) * (r_i - mean(r)): RLOO (arXiv 2402.14740)."""
    return centred(rewards) * (len(rewards) / (len(rewards) - 1))


def raw(rewards: Rewards) -> Rewards:
    """r_i itself: REINFORCE without a baseline."""
    return rewards.copy()


ADVANTAGES: dict[AdvantageKind, Callable[[Rewards], Rewards]] = {
    AdvantageKind.CENTRED: centred,
    AdvantageKind.STANDARDISED: standardised,
    AdvantageKind.LEAVE_ONE_OUT: leave_one_out,
    AdvantageKind.RAW: raw,
}


def penalise(rewards: Rewards, divergence: Rewards, coefficient: float) -> Rewards:
    """r_i - coefficient * KL_i: the divergence from a reference, put in the reward.

    `divergence` f8[G] is the sum over a rollout's sampled tokens of k1 = log pi - log pi_ref, without gradient. As a
    part of the reward it reaches the weights through the policy gradient, which is the gradient of the KL; as a part of
    the loss its expected gradient would be zero.
    """
    return rewards - coefficient * divergence


def _require_pair(kind: str, rewards: Rewards) -> None:
    if len(rewards) < 2:
        raise GroupTooSmallError(kind, len(rewards))


def _all_equal(rewards: Rewards) -> bool:
    return bool(rewards.max() == rewards.min())
