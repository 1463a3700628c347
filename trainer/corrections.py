"""Importance weights between the sampler and the trainer, and measures of the difference between two policies.

The sampler and the trainer differ by policy lag and by their kernels, so a token sampled with probability mu is trained
with weight rho = pi_trainer / mu, bounded by one of the methods below. Weights never have a gradient, which would bias
the policy gradient. Per-token weights have bias O(T^2) in the mismatch; per-sequence ones have none, but a variance
that grows with length, which the geometric mean avoids. Shapes: `log_ratio` f4[T] is log pi_trainer - log mu of each
sampled token, `sequence` i8[T] its rollout, in [0, n); `bounds` apply to the ratio, `low` is used by `mis` and
`geometric`, `high` by all. Each function returns f4[T]. Sources: TIS and its sequence form, MIS, geometric rejection as
in verl's "rollout correction" notes; IcePop for the two-sided mask.

Estimators of the Kullback-Leibler divergence from samples: for x drawn from q, with r = p(x) / q(x) (J. Schulman,
"Approximating KL divergence", 2020):

- k1 = -log r: unbiased, and its variance stays moderate as p and q diverge, which is why Composer 2 uses it;
- k2 = (log r)^2 / 2: biased, low variance;
- k3 = r - 1 - log r: unbiased and never negative, but its variance explodes as p and q diverge.

The place of an estimator matters as much as its kind: the gradient of k1 *as a loss* is zero on average when x is drawn
from the trained policy, so k1 belongs in the reward (detached), and only k3 belongs in a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.trainer.choices import CorrectionKind, Estimator
from tidemill.trainer.config import CorrectionSettings


def none(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """Return 1 for every token."""
    return torch.ones_like(log_ratio)


def tis(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """min(rho_t, high): truncated importance sampling, token by token."""
    return log_ratio.exp().clamp(max=bounds.high)


def mis(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """rho_t if low <= rho_t <= high, otherwise 0: masked importance sampling (IcePop)."""
    ratio = log_ratio.exp()
    return torch.where((ratio >= bounds.low) & (ratio <= bounds.high), ratio, 0.0)


def sequence_tis(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """min(prod_t rho_t, high), the same for every token of a rollout."""
    return sequence_sum(log_ratio, sequence, n).exp().clamp(max=bounds.high)[sequence]


def sequence_mis(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """prod_t rho_t if it is at most high, otherwise 0."""
    ratio = sequence_sum(log_ratio, sequence, n).exp()
    return torch.where(ratio <= bounds.high, ratio, 0.0)[sequence]


def geometric(log_ratio: Tensor, sequence: Tensor, n: int, bounds: CorrectionSettings) -> Tensor:
    """Return 1 for the rollouts whose geometric mean ratio is in [low, high], otherwise 0.

    The mean over tokens does not grow with length: a ratio of 1.1 a token is 2.6 after 10 tokens and 13,780 after 100.
    """
    mean = (sequence_sum(log_ratio, sequence, n) / sequence_lengths(sequence, n).clamp(min=1)).exp()
    return ((mean >= bounds.low) & (mean <= bounds.high)).to(log_ratio.dtype)[sequence]


Correction = Callable[[Tensor, Tensor, int, CorrectionSettings], Tensor]

CORRECTIONS: dict[CorrectionKind, Correction] = {
    CorrectionKind.NONE: none,
    CorrectionKind.TIS: tis,
    CorrectionKind.MIS: mis,
    CorrectionKind.SEQUENCE_TIS: sequence_tis,
    CorrectionKind.SEQUENCE_MIS: sequence_mis,
    CorrectionKind.GEOMETRIC: geometric,
}


def correction_weights(
    correction: CorrectionSettings, trainer: Tensor, sampler: Tensor, sequence: Tensor, n: int
) -> Tensor:
    """Return f4[T]: the weights of tokens with these logprobs (f4[T] each); without gradient."""
    return CORRECTIONS[correction.kind](trainer.detach() - sampler, sequence, n, correction)


def bounded(correction: CorrectionSettings, weights: Tensor) -> Tensor:
    """Return bool[T]: which of the `weights` (f4[T]) are at their bound, or 0 because a ratio is beyond a bound."""
    kind = correction.kind
    if kind is CorrectionKind.NONE:
        return torch.zeros_like(weights, dtype=torch.bool)
    truncates = kind in (CorrectionKind.TIS, CorrectionKind.SEQUENCE_TIS)
    return weights >= correction.high if truncates else weights == 0.0


def sequence_sum(values: Tensor, sequence: Tensor, n: int) -> Tensor:
    """Return f4[n]: the sum of `values` f4[T] over the tokens of each rollout, in token order."""
    return values.new_zeros(n).index_add(0, sequence, values)


def sequence_lengths(sequence: Tensor, n: int) -> Tensor:
    """Return f4[n]: the number of sampled tokens of each rollout."""
    return torch.bincount(sequence, minlength=n).to(torch.float32)


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
    """(sum w)^2 / (n * sum w^2) with w = exp(log_ratio), in (0, 1]: the effective share of the samples."""
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
