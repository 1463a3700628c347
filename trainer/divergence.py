"""Estimators of the Kullback-Leibler divergence and of the distance between two policies, from samples.

For x drawn from q, with r = p(x) / q(x) (J. Schulman, "Approximating KL divergence", 2020):

- k1 = -log r: unbiased, and its spread stays moderate as p and q part, which is why Composer 2 uses it;
- k2 = (log r)^2 / 2: biased, low variance;
- k3 = r - 1 - log r: unbiased and never negative, but its variance explodes as p and q part.

Where an estimator is used matters as much as which: the gradient of k1 *as a loss* is zero on average when x is drawn
from the policy under training, so k1 belongs in the reward (detached), and only k3 belongs in a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.trainer.choices import Estimator


def k1(log_ratio: Tensor) -> Tensor:
    """-log r, elementwise; `log_ratio` is log p - log q at samples of q."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2, elementwise."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, elementwise; never negative."""
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {Estimator.K1: k1, Estimator.K2: k2, Estimator.K3: k3}


def effective_sample_size(log_ratio: Tensor) -> float:
    """(sum w)^2 / (n * sum w^2) with w = exp(log_ratio), in (0, 1]: the share of samples that still count."""
    weights = (log_ratio - log_ratio.max()).double().exp()
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def share_beyond(log_ratio: Tensor, factor: float) -> float:
    """F(factor): share of samples whose ratio is above `factor` or below its inverse.

    F(2) above 0.1 precedes the collapse of mixture-of-experts training (arXiv 2510.11370).
    """
    bound = float(torch.tensor(factor).log())
    return float((log_ratio.abs() > bound).double().mean())


def chi_square(log_ratio: Tensor) -> float:
    """E_q[r^2] - 1, the second-order size of a mismatch."""
    return float((2.0 * log_ratio.double()).exp().mean() - 1.0)
