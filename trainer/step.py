"""One optimizer step: groups in, weights changed in place, metrics out.

Deterministic given the weights, the groups in order, the settings and the seed: the same call on the same machine type
and thread count gives the same weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.schemas.records import LagCount, Rollout
from tidemill.trainer import metrics
from tidemill.trainer.advantages import ADVANTAGES, penalise
from tidemill.trainer.attention import use_packed_attention
from tidemill.trainer.batch import Row, pack
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.corrections import Bounds, correction_weights, sequence_sum
from tidemill.trainer.groups import TrainableGroup
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.objectives import OBJECTIVES, Options, Recipe, Tokens, Totals, clip_fraction, loss
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step reports of itself; the new weights are in the model."""

    metrics: dict[str, float]
    lag: list[LagCount]
    learning_rate: float
    rollouts: int
    tokens: int
    """Sampled tokens trained on."""


@dataclass(frozen=True, slots=True)
class _Anchored:
    """A row with the logprobs that do not change within the step; None where the settings need none."""

    row: Row
    old: Tensor | None
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """The rows of one optimizer update, with the advantage of each of its n rollouts (f4[n])."""

    rows: list[_Anchored]
    advantages: Tensor
    totals: Totals


class Learner:
    """Holds the model, its master weights and the reference, and trains steps."""

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, reference: PreTrainedModel | None) -> None:
        make_deterministic(settings.threads)
        if settings.kl.coefficient and reference is None:
            raise ValueError("kl.coefficient is above 0, so a reference model is needed")
        self.model = model
        self.masters = MasterWeights(model, settings.optimizer)
        self._settings = settings
        self._reference = reference
        self._recipe = OBJECTIVES[settings.objective]
        self._options = objective_options(settings, self._recipe)
        for network in (model, reference):
            if network is not None:
                use_packed_attention(network)
                network.eval()

    def train(self, groups: Sequence[TrainableGroup], step: int, version: int, seed: int) -> StepOutcome:
        """Train step `step` on `groups`, holding weight version `version` before it.

        Raises InvalidRolloutError for malformed rollouts, GroupTooSmallError for a group of one where the objective
        compares rollouts, RuntimeError for a gradient that is not finite; the weights are unchanged by the first two.
        """
        torch.manual_seed(seed)
        learning_rate = self.masters.learning_rate(step)
        minibatches = [self._prepare(part) for part in split(groups, self._settings.minibatches)]
        updates = [self._update(minibatch, learning_rate) for minibatch in minibatches]
        traces = [trace for _, _, found in updates for trace in found]
        lag = metrics.lag_counts(_rollouts(groups), version)
        return StepOutcome(
            metrics={
                "loss": float(np.mean([value for value, _, _ in updates])),
                "grad_norm": float(np.mean([norm for _, norm, _ in updates])),
                **metrics.token_metrics(traces),
                **metrics.mismatch_metrics(traces),
                **metrics.reward_metrics(groups),
                **metrics.lag_metrics(lag),
                **self._reference_metrics(minibatches),
            },
            lag=lag,
            learning_rate=learning_rate,
            rollouts=len(_rollouts(groups)),
            tokens=sum(minibatch.totals.tokens for minibatch in minibatches),
        )

    def _prepare(self, groups: Sequence[TrainableGroup]) -> _Minibatch:
        rollouts = _rollouts(groups)
        rows = [self._anchor(row) for row in pack(rollouts, self._settings.row_tokens, self.model.config.vocab_size)]
        tokens = sum(len(anchored.row.targets) for anchored in rows)
        return _Minibatch(rows, self._advantages(groups, rows), Totals(len(rollouts), tokens))

    def _anchor(self, row: Row) -> _Anchored:
        settings = self._settings
        in_reward = settings.kl.coefficient > 0 and not settings.kl.in_loss
        needs_old = settings.minibatches > 1 or in_reward
        old = frozen_logprobs(self.model, row) if needs_old else None
        reference = frozen_logprobs(self._reference, row) if settings.kl.coefficient and self._reference else None
        return _Anchored(row, old, reference)

    def _advantages(self, groups: Sequence[TrainableGroup], rows: Sequence[_Anchored]) -> Tensor:
        kl = self._settings.kl
        divergence = _rollout_divergence(rows, len(_rollouts(groups)))
        advantage, parts, start = ADVANTAGES[self._recipe.advantage], [], 0
        for group in groups:
            rewards = group.rewards()
            if kl.coefficient and not kl.in_loss:
                rewards = penalise(rewards, divergence[start : start + len(rewards)], kl.coefficient)
            parts.append(advantage(rewards))
            start += len(rewards)
        return torch.from_numpy(np.concatenate(parts)).float()

    def _update(self, minibatch: _Minibatch, learning_rate: float) -> tuple[float, float, list[metrics.Trace]]:
        total, traces = 0.0, []
        for anchored in minibatch.rows:
            value, trace = self._accumulate(anchored, minibatch)
            total += value
            traces.append(trace)
        return total, self.masters.update(learning_rate), traces

    def _accumulate(self, anchored: _Anchored, minibatch: _Minibatch) -> tuple[float, metrics.Trace]:
        row = anchored.row
        logprobs, entropy = sampled_logprobs(self.model, row)
        tokens = self._tokens(anchored, logprobs, minibatch)
        value = loss(self._recipe, tokens, minibatch.totals, self._options)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach()), metrics.Trace(
            logprobs=tokens.old_logprobs,
            sampler_logprobs=row.sampler_logprobs,
            weights=tokens.weights,
            entropy=entropy,
            clipped=clip_fraction(tokens, self._options),
        )

    def _tokens(self, anchored: _Anchored, logprobs: Tensor, minibatch: _Minibatch) -> Tokens:
        row, correction = anchored.row, self._settings.correction
        old = anchored.old if anchored.old is not None else logprobs.detach()
        bounds = Bounds(correction.low, correction.high)
        n = minibatch.totals.sequences
        return Tokens(
            logprobs=logprobs,
            old_logprobs=old,
            sampler_logprobs=row.sampler_logprobs,
            advantages=minibatch.advantages[row.sequence],
            weights=correction_weights(correction.kind, old, row.sampler_logprobs, row.sequence, n, bounds),
            sequence=row.sequence,
            reference_logprobs=anchored.reference,
        )

    def _reference_metrics(self, minibatches: Sequence[_Minibatch]) -> dict[str, float]:
        rows = [anchored for minibatch in minibatches for anchored in minibatch.rows]
        pairs = [(a.old, a.reference) for a in rows if a.old is not None and a.reference is not None]
        if not pairs:
            return {}
        return {"reference/k1": float(torch.cat([old - reference for old, reference in pairs]).double().mean())}


def objective_options(settings: TrainerSettings, recipe: Recipe) -> Options:
    """The objective's numbers: the recipe's published ones where the settings leave them open."""
    options = Options(
        clip_low=recipe.clip_low if settings.clip_low is None else settings.clip_low,
        clip_high=recipe.clip_high if settings.clip_high is None else settings.clip_high,
        length_divisor=settings.length_divisor,
        behaviour_cap=settings.behaviour_cap,
    )
    if not settings.kl.in_loss:
        return options
    return replace(options, kl_coefficient=settings.kl.coefficient, kl_estimator=settings.kl.estimator)


def split(groups: Sequence[TrainableGroup], parts: int) -> list[Sequence[TrainableGroup]]:
    """At most `parts` runs of consecutive groups whose sizes differ by at most one."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [groups[a:b] for a, b in pairwise(bounds)]


def make_deterministic(threads: int) -> None:
    """Fix the thread count and refuse nondeterministic operations, for the whole process."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def _rollouts(groups: Sequence[TrainableGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _rollout_divergence(rows: Sequence[_Anchored], n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """f8[n]: log pi_old - log pi_ref summed over each rollout's sampled tokens; 0 without a reference."""
    total = torch.zeros(n, dtype=torch.float64)
    for anchored in rows:
        if anchored.old is not None and anchored.reference is not None:
            total += sequence_sum((anchored.old - anchored.reference).double(), anchored.row.sequence, n)
    return total.numpy()
