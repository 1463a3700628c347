"""Policy-gradient objectives, each a pure function over the sampled tokens of some rollouts.

An objective combines three published choices: how a group's rewards become advantages, the contribution of each token
(its surrogate, to be maximised), and how contributions are averaged. The loss is minus the average. Averages divide by
the totals of the batch and never by those of a row, so for any split of a batch into rows, the losses sum to the loss
of the batch.

Notation (tensors of the T sampled tokens of a row, in order): pi = trained policy, pi_old = policy at the start
of the step, mu = sampler, A = advantage, w = pi / pi_old, c = correction weight between sampler and trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.trainer.advantages import Rewards, centred, leave_one_out, raw, standardised
from tidemill.trainer.choices import Estimator, ObjectiveName
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.corrections import ESTIMATORS, sequence_lengths, sequence_sum


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sampled tokens of whole rollouts. A rollout is never split over two `Tokens`."""

    logprobs: Tensor
    """f4[T]: log pi, with gradient."""
    old_logprobs: Tensor
    """f4[T]: log pi_old, without gradient."""
    sampler_logprobs: Tensor
    """f4[T]: log mu, as recorded by the sampler."""
    advantages: Tensor
    """f4[T]: the advantage of the token's rollout."""
    weights: Tensor
    """f4[T]: c, without gradient."""
    sequence: Tensor
    """i8[T]: the rollout of each token, in [0, n_sequences)."""
    n_sequences: int
    """Rollouts of the whole batch, the divisor for every row."""
    n_tokens: int
    """Sampled tokens of the whole batch."""
    reference_logprobs: Tensor | None = None
    """f4[T]: log pi_ref; needed only if a KL is part of the loss."""


@dataclass(frozen=True, slots=True)
class Options:
    """Numbers that an objective may use."""

    clip_low: float
    """w is clipped below at 1 - clip_low."""
    clip_high: float
    """w is clipped above at 1 + clip_high."""
    length_divisor: float
    """Constant that replaces a rollout's length in the constant average."""
    behaviour_cap: float
    """Upper bound of pi_old / mu in decoupled PPO."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference in the loss."""
    kl_estimator: Estimator = Estimator.K3


Advantage = Callable[[Rewards], Rewards]
Ratio = Callable[[Tokens], Tensor]
Surrogate = Callable[[Tokens, Options], Tensor]
Average = Callable[[Tensor, Tokens, Options], Tensor]


def token_ratio(tokens: Tokens) -> Tensor:
    """w of each token, f4[T]."""
    return (tokens.logprobs - tokens.old_logprobs).exp()


def sequence_ratio(tokens: Tokens) -> Tensor:
    """(pi(o) / pi_old(o))^(1 / |o|) of the token's rollout, f4[T]."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    lengths = sequence_lengths(tokens.sequence, tokens.n_sequences).clamp(min=1)
    return (sequence_sum(log_ratio, tokens.sequence, tokens.n_sequences) / lengths).exp()[tokens.sequence]


def policy_gradient(tokens: Tokens, options: Options) -> Tensor:
    """c * A * log pi, f4[T]: REINFORCE with a correction weight."""
    return tokens.weights * tokens.advantages * tokens.logprobs


def clipped(tokens: Tokens, options: Options) -> Tensor:
    """c * min(w A, clip(w, 1 - low, 1 + high) A), f4[T]: PPO's surrogate (arXiv 1707.06347)."""
    return tokens.weights * _pessimistic(token_ratio(tokens), tokens.advantages, options)


def sequence_clipped(tokens: Tokens, options: Options) -> Tensor:
    """c * min(s A, clip(s) A) with s = (pi(o) / pi_old(o))^(1 / |o|) of the rollout, f4[T]: GSPO (arXiv 2507.18071)."""
    return tokens.weights * _pessimistic(sequence_ratio(tokens), tokens.advantages, options)


def truncated_policy_gradient(tokens: Tokens, options: Options) -> Tensor:
    """c * sg(clip(w, 1 - low, 1 + high)) * A * log pi, f4[T]: CISPO (arXiv 2506.13585); no token loses its gradient."""
    ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()
    bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return tokens.weights * bounded * tokens.advantages * tokens.logprobs


def decoupled(tokens: Tokens, options: Options) -> Tensor:
    """min(pi_old / mu, cap) * min(w A, clip(w) A), f4[T]: decoupled PPO (arXiv 2110.00641, AReaL 2505.24298).

    pi_old is the proximal policy, the centre of the clip range, and mu the behaviour policy; their ratio has no
    gradient. This surrogate contains its own correction, so `weights` must be one.
    """
    behaviour = (tokens.old_logprobs - tokens.sampler_logprobs).exp().clamp(max=options.behaviour_cap)
    return behaviour * clipped(tokens, options)


def constant_mean(values: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """Sum / (rollouts * length_divisor): a token has the same weight in a short and in a long rollout (Dr. GRPO)."""
    return values.sum() / (tokens.n_sequences * options.length_divisor)


def token_mean(values: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """Sum / sampled tokens of the batch (DAPO, arXiv 2503.14476)."""
    return values.sum() / max(tokens.n_tokens, 1)


def sequence_mean(values: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """Mean over rollouts of the mean over their tokens (GRPO)."""
    lengths = sequence_lengths(tokens.sequence, tokens.n_sequences)
    return (values / lengths[tokens.sequence]).sum() / tokens.n_sequences


def sequence_total(values: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """Mean over rollouts of the sum over their tokens, that is, of log pi of whole rollouts (REINFORCE, RLOO)."""
    return values.sum() / tokens.n_sequences


@dataclass(frozen=True, slots=True)
class Recipe:
    """One objective: advantages, surrogate, average, and the clip range from its paper."""

    advantage: Advantage
    surrogate: Surrogate
    average: Average
    clip_low: float = 0.2
    clip_high: float = 0.2
    clips: Ratio | None = None
    """The ratio beyond whose bound a token has no gradient; None if every token keeps its gradient."""


OBJECTIVES: dict[ObjectiveName, Recipe] = {
    ObjectiveName.COMPOSER2: Recipe(centred, policy_gradient, constant_mean),
    ObjectiveName.GRPO: Recipe(standardised, clipped, sequence_mean, clips=token_ratio),
    ObjectiveName.DR_GRPO: Recipe(centred, clipped, constant_mean, clips=token_ratio),
    ObjectiveName.DAPO: Recipe(standardised, clipped, token_mean, clip_high=0.28, clips=token_ratio),
    ObjectiveName.GSPO: Recipe(
        standardised,
        sequence_clipped,
        sequence_mean,
        clip_low=3e-4,
        clip_high=4e-4,
        clips=sequence_ratio,
    ),
    ObjectiveName.CISPO: Recipe(standardised, truncated_policy_gradient, token_mean, clip_low=1.0, clip_high=4.0),
    ObjectiveName.RLOO: Recipe(leave_one_out, policy_gradient, sequence_total),
    ObjectiveName.REINFORCE: Recipe(raw, policy_gradient, sequence_total),
    ObjectiveName.DECOUPLED_PPO: Recipe(standardised, decoupled, token_mean, clips=token_ratio),
}
"""CISPO's upper bound of 5 on the ratio is ScaleRL's (arXiv 2510.13786); it has no lower bound."""


def options_of(settings: TrainerSettings, recipe: Recipe) -> Options:
    """Return the numbers of the settings; for those that are not set, the recipe's published ones."""
    return Options(
        clip_low=recipe.clip_low if settings.clip_low is None else settings.clip_low,
        clip_high=recipe.clip_high if settings.clip_high is None else settings.clip_high,
        length_divisor=settings.length_divisor,
        behaviour_cap=settings.behaviour_cap,
        kl_coefficient=settings.kl.coefficient if settings.kl.in_loss else 0.0,
        kl_estimator=settings.kl.estimator,
    )


def loss(recipe: Recipe, tokens: Tokens, options: Options) -> Tensor:
    """Return f4[]: the share of `tokens` in the loss of the batch; the shares of a batch's rows sum to its loss."""
    values = recipe.surrogate(tokens, options)
    if options.kl_coefficient:
        values = values - options.kl_coefficient * reference_divergence(tokens, options.kl_estimator)
    return -recipe.average(values, tokens, options)


def reference_divergence(tokens: Tokens, estimator: Estimator) -> Tensor:
    """Return f4[T]: KL(pi || pi_ref) token by token, with gradient. Raises ValueError without reference logprobs."""
    if tokens.reference_logprobs is None:
        raise ValueError("a KL in the loss needs the reference's logprobs, and this batch was built without them")
    return ESTIMATORS[estimator](tokens.reference_logprobs - tokens.logprobs)


def clipped_tokens(recipe: Recipe, tokens: Tokens, options: Options) -> Tensor:
    """Return f4[]: number of tokens without a gradient, because the ratio that the surrogate clips is beyond the
    advantage's bound."""
    if recipe.clips is None:
        return torch.zeros(())
    ratio = recipe.clips(tokens)
    above = (ratio > 1.0 + options.clip_high) & (tokens.advantages > 0)
    below = (ratio < 1.0 - options.clip_low) & (tokens.advantages < 0)
    return (above | below).float().sum()


def _pessimistic(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    bounded = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return torch.minimum(ratio * advantages, bounded * advantages)
