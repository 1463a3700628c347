"""One optimizer step: groups and an online batch in, weights changed in place, metrics out.

Deterministic given the weights, the inputs in order, the settings and the seed: the same call on the same machine type,
thread count and number of ranks gives the same weights, bit for bit.

Every rank packs the same rows and takes its share of them. As a row is computed by all ranks together, each takes
equally many: a rank with too few computes a row again, whose loss counts nothing.

What users made of single answers and what simulated groups earned are two parts of one loss. Each has its own
advantages, surrogate and average; the weights of the second against the first are a setting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.kernels.weights.ranks import Ranks, SingleRank
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.records import LagCount
from tidemill.trainer import metrics
from tidemill.trainer.advantages import ADVANTAGES, batch_advantages, penalise
from tidemill.trainer.batch import PackedRow, Trajectory, pack
from tidemill.trainer.choices import AdvantageKind, Forward, Routing
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.corrections import RatioBounds, bounded, correction_weights, sequence_sum
from tidemill.trainer.device import (
    ALONE,
    KEPT_BLOCK,
    KEPT_BLOCK_SHARDED,
    RankPlace,
    compute_dtype,
    device_of,
    keep_freed_memory,
    make_deterministic,
)
from tidemill.trainer.expert_ids import InvalidRoutingError
from tidemill.trainer.machine import StepMachine
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.mismatch import TrainedTokens, farthest, trained_tokens
from tidemill.trainer.model_size import ModelSize, UnknownModelError, size_of
from tidemill.trainer.objectives import (
    OBJECTIVES,
    Options,
    Recipe,
    Tokens,
    Totals,
    clip_fraction,
    constant_mean,
    decoupled,
    loss,
    policy_gradient,
)
from tidemill.trainer.older_weights import OlderScores, OlderWeights
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs
from tidemill.trainer.probe import use_packed_attention
from tidemill.trainer.routing import RoutingReplay
from tidemill.trainer.serving_view import hold_in_format
from tidemill.trainer.sharding import recompute_activations, shard
from tidemill.trainer.trainable import TrainableBatch, TrainableGroup

_log = logging.getLogger(__name__)

ONLINE = Recipe(AdvantageKind.RAW, policy_gradient, constant_mean)
"""REINFORCE with a correction weight, a token weighing the same in a short and in a long answer; its advantages come
from `online.baselines`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step reports of itself; the new weights are in the model."""

    metrics: dict[str, float]
    """Known to the first rank."""
    lag: list[LagCount]
    learning_rate: float
    rollouts: int
    """Rollouts and interactions trained on."""
    tokens: int
    """Sampled tokens trained on."""
    trained: TrainedTokens | None
    """These tokens; known to the first rank."""


@dataclass(frozen=True, slots=True)
class _Anchored:
    """A row with the logprobs that do not change within the step; None where the settings need none."""

    row: PackedRow
    counts: bool
    """False for a row that another rank trains on."""
    old: Tensor | None
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one part of an optimizer update, with the advantage of each of its n rollouts (f4[n])."""

    packed: Sequence[PackedRow]
    """Of all ranks."""
    rows: list[_Anchored]
    """Of this rank."""
    advantages: Tensor
    totals: Totals
    recipe: Recipe
    options: Options
    weight: float
    """How much its loss counts."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """What an update saw of one part, on all ranks; nothing but on the first one."""

    loss: float
    traces: list[metrics.TokenTrace]


class Learner:
    """Holds the model, its master weights and the reference, and trains steps: on every rank, by the same calls.

    Args:
        model: the whole model, on a CPU; it is moved, and laid over the ranks.

    Raises DeviceError, ShardingError or UntrainableModelError for what cannot be trained here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        reference: PreTrainedModel | None,
        ranks: Ranks | None = None,
        place: RankPlace = ALONE,
    ) -> None:
        self._device = device_of(settings, place)
        make_deterministic(settings.threads, self._device)
        if settings.kl.coefficient and reference is None:
            raise ValueError("kl.coefficient is above 0, so a reference model is needed")
        self._settings = settings
        self._size = _size(model)
        self._recipe = OBJECTIVES[settings.objective]
        self._ranks = ranks or SingleRank()
        compute = compute_dtype(settings, self._device)
        self.machine = StepMachine(self._device.type, str(compute).removeprefix("torch."), self._ranks.size)
        keep_freed_memory(KEPT_BLOCK_SHARDED if self.machine.is_sharded else KEPT_BLOCK)
        routed = settings.routing is not Routing.OFF
        self.replay = RoutingReplay(model, settings.routing, settings.routing_plausible) if routed else None
        if settings.checkpoint_activations:
            recompute_activations(model)
        if reference is not None and settings.forward is Forward.MATCHED:
            # Else the policy would be far from its reference by what the format loses, before any step.
            hold_in_format(reference, settings.serving_format)
        for network in (model, reference):
            if network is not None:
                use_packed_attention(network)
                network.eval()
                if self.machine.is_sharded:
                    shard(network, self._device, compute)
                else:
                    network.to(self._device)
        self.model = model
        self.masters = MasterWeights(model, settings.optimizer, settings.serving_format, settings.forward)
        self._reference = reference
        self._older = OlderWeights(model, self.masters, self._ranks, settings.score_older_every)

    def train(
        self,
        groups: Sequence[TrainableGroup],
        step: int,
        version: int,
        seed: int,
        online: TrainableBatch | None = None,
    ) -> StepOutcome:
        """Train step `step` on `groups` and, where there is one, on `online`, holding weight version `version` before.

        Raises InvalidRolloutError for malformed rollouts, and for groups without the expert ids that the routing asks
        for, GroupTooSmallError for a group of one where the objective compares rollouts, RuntimeError for a gradient
        that is not finite; the weights are unchanged by the first two.
        """
        torch.manual_seed(seed)
        self._older.begin(step, version)
        learning_rate = self.masters.learning_rate(step)
        if online is None:
            updates = [[self._simulated(part, 1.0)] for part in split(groups, self._settings.minibatches)]
        else:
            learning_rate *= self._settings.online.learning_rate_scale
            simulated = [self._simulated(groups, self._settings.online.simulated_weight)] if groups else []
            updates = [[self._online(online), *simulated]]
        seen = [self._update(parts, learning_rate) for parts in updates]
        sampled: list[Trajectory] = [*(online.interactions if online else ()), *_rollouts(groups)]
        lag = metrics.lag_counts(sampled, version)
        first = updates[0][0]
        older = self._older.score(first.packed, first.rows[0].row, sampled)
        return StepOutcome(
            metrics=self._metrics(groups, online, lag, updates, seen) if self._ranks.is_first else {},
            lag=lag,
            learning_rate=learning_rate,
            rollouts=len(sampled),
            tokens=sum(part.totals.tokens for parts in updates for part in parts),
            trained=self._trained(sampled, updates, seen, older) if self._ranks.is_first else None,
        )

    @staticmethod
    def _trained(
        sampled: Sequence[Trajectory],
        updates: Sequence[Sequence[_Part]],
        seen: Sequence[tuple[list[_Trained], float]],
        older: OlderScores | None,
    ) -> TrainedTokens:
        """The tokens of all parts, in the order of `sampled`, which is that of the parts."""
        parts, sequences, start = [part for parts in updates for part in parts], [], 0
        for part in parts:
            sequences += [row.sequence + start for row in part.packed]
            start += part.totals.sequences
        return trained_tokens(sampled, sequences, _traces(seen), torch.cat([part.advantages for part in parts]), older)

    def _metrics(
        self,
        groups: Sequence[TrainableGroup],
        online: TrainableBatch | None,
        lag: list[LagCount],
        updates: Sequence[Sequence[_Part]],
        seen: Sequence[tuple[list[_Trained], float]],
    ) -> dict[str, float]:
        traces = _traces(seen)
        return {
            "loss": float(np.mean([sum(part.loss for part in trained) for trained, _ in seen])),
            "grad_norm": float(np.mean([norm for _, norm in seen])),
            **metrics.token_metrics(traces),
            **metrics.mismatch_metrics(traces),
            **metrics.reward_metrics(groups),
            **metrics.lag_metrics(lag),
            **metrics.routing_metrics(traces),
            **metrics.reference_metrics(traces),
            **metrics.packing_metrics([row for parts in updates for part in parts for row in part.packed]),
            **self._flops([part for parts in updates for part in parts]),
            **_part_metrics(online, groups, updates[0], seen[0][0]),
        }

    def _simulated(self, groups: Sequence[TrainableGroup], weight: float) -> _Part:
        rollouts = _rollouts(groups)
        packed, rows = self._rows(rollouts, [ids for group in groups for ids in group.expert_ids])
        return self._part(packed, rows, self._advantages(groups, rows), len(rollouts), self._recipe, weight)

    def _online(self, batch: TrainableBatch) -> _Part:
        kl = self._settings.kl
        packed, rows = self._rows(batch.interactions)
        coefficient = 0.0 if kl.in_loss else kl.coefficient
        divergence = self._divergence(rows, len(batch.interactions))
        values = batch_advantages(self._settings.online.baseline, batch, divergence, coefficient)
        return self._part(packed, rows, torch.from_numpy(values).float(), len(batch.interactions), ONLINE, 1.0)

    def _rows(
        self, sampled: Sequence[Trajectory], expert_ids: Sequence[ExpertIds] = ()
    ) -> tuple[Sequence[PackedRow], list[_Anchored]]:
        """The rows of all ranks, and this rank's."""
        settings, vocab_size = self._settings, self.model.config.vocab_size
        if self.replay is not None and len(expert_ids) != len(sampled):
            raise InvalidRoutingError(f"{len(sampled)} rollouts have the expert ids of {len(expert_ids)}")
        packed = pack(
            sampled,
            0 if settings.batch_invariant else settings.row_tokens,
            vocab_size,
            share_prefixes=settings.share_prefixes,
            routing=settings.routing,
            expert_ids=expert_ids,
        )
        return packed, [self._anchor(row, counts) for row, counts in deal_rows(packed, self._ranks)]

    def _part(
        self,
        packed: Sequence[PackedRow],
        rows: list[_Anchored],
        advantages: Tensor,
        n: int,
        recipe: Recipe,
        weight: float,
    ) -> _Part:
        totals = Totals(n, sum(len(row.targets) for row in packed))
        return _Part(packed, rows, advantages, totals, recipe, objective_options(self._settings, recipe), weight)

    def _anchor(self, packed: PackedRow, counts: bool) -> _Anchored:
        settings, row = self._settings, packed.to(self._device)
        in_reward = settings.kl.coefficient > 0 and not settings.kl.in_loss
        needs_old = settings.minibatches > 1 or in_reward
        old = frozen_logprobs(self.model, row) if needs_old else None
        reference = frozen_logprobs(self._reference, row) if settings.kl.coefficient and self._reference else None
        return _Anchored(row, counts, old, reference)

    def _advantages(self, groups: Sequence[TrainableGroup], rows: Sequence[_Anchored]) -> Tensor:
        kl = self._settings.kl
        divergence = self._divergence(rows, len(_rollouts(groups)))
        advantage, parts, start = ADVANTAGES[self._recipe.advantage], [], 0
        for group in groups:
            rewards = group.rewards()
            if kl.coefficient and not kl.in_loss:
                rewards = penalise(rewards, divergence[start : start + len(rewards)], kl.coefficient)
            parts.append(advantage(rewards))
            start += len(rewards)
        return torch.from_numpy(np.concatenate(parts)).float()

    def _update(self, parts: Sequence[_Part], learning_rate: float) -> tuple[list[_Trained], float]:
        trained = []
        for part in parts:
            rows = self._train_rows(part)
            trained.append(_Trained(sum(value for value, _ in rows), [trace for _, trace in rows]))
        return trained, self.masters.update(learning_rate)

    def _train_rows(self, part: _Part) -> list[tuple[float, metrics.TokenTrace]]:
        """Add up the gradients of a part; what was seen of its rows, in their order: of all ranks, on the first one."""
        seen = [(row.counts, self._accumulate(row, part)) for row in part.rows]
        hands = self._ranks.gather(lambda: [one for counts, one in seen if counts])
        return [one for dealt in zip_longest(*hands) for one in dealt if one is not None]

    def _accumulate(self, anchored: _Anchored, part: _Part) -> tuple[float, metrics.TokenTrace]:
        row, reference = anchored.row, anchored.reference
        logprobs, entropy = sampled_logprobs(self.model, row)
        tokens = self._tokens(anchored, logprobs, part)
        routed, experts = None, None
        if self.replay is not None:
            routed, looked = self.replay.seen(), farthest(tokens.old_logprobs - tokens.sampler_logprobs)
            chosen = self.replay.experts(row.predicting[row.predictors[looked]])
            experts = None if chosen is None else (looked.cpu(), chosen)
        value = part.weight * loss(part.recipe, tokens, part.totals, part.options)
        (value if anchored.counts else 0.0 * value).backward()  # type: ignore[no-untyped-call]
        return float(value.detach()), metrics.TokenTrace(
            logprobs=tokens.old_logprobs.cpu(),
            sampler_logprobs=row.sampler_logprobs.cpu(),
            weights=tokens.weights.cpu(),
            entropy=entropy.cpu(),
            clipped=clip_fraction(tokens, part.options).cpu(),
            cut=self._cut(tokens, part).cpu(),
            reference_logprobs=None if anchored.old is None or reference is None else reference.cpu(),
            routed=routed,
            experts=experts,
        )

    def _tokens(self, anchored: _Anchored, logprobs: Tensor, part: _Part) -> Tokens:
        row, correction = anchored.row, self._settings.correction
        old = anchored.old if anchored.old is not None else logprobs.detach()
        bounds = RatioBounds(correction.low, correction.high)
        n = part.totals.sequences
        return Tokens(
            logprobs=logprobs,
            old_logprobs=old,
            sampler_logprobs=row.sampler_logprobs,
            advantages=part.advantages.to(self._device)[row.sequence],
            weights=correction_weights(correction.kind, old, row.sampler_logprobs, row.sequence, n, bounds),
            sequence=row.sequence,
            reference_logprobs=anchored.reference,
        )

    def _cut(self, tokens: Tokens, part: _Part) -> Tensor:
        if part.recipe.surrogate is decoupled:
            return (tokens.old_logprobs - tokens.sampler_logprobs).exp() >= part.options.behaviour_cap
        correction = self._settings.correction
        return bounded(correction.kind, tokens.weights, RatioBounds(correction.low, correction.high))

    def _flops(self, parts: Sequence[_Part]) -> dict[str, float]:
        """Of the rows of all ranks, each counted once."""
        if self._size is None:
            return {}
        frozen = [(part.rows[0].old is not None) + (part.rows[0].reference is not None) for part in parts]
        rows = [(row, passes) for part, passes in zip(parts, frozen, strict=True) for row in part.packed]
        return metrics.flop_metrics(self._size, rows, layers_twice=self._settings.checkpoint_activations)

    def _divergence(self, rows: Sequence[_Anchored], n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """f8[n]: log pi_old - log pi_ref summed over each rollout's sampled tokens; 0 without a reference."""
        total = torch.zeros(n, dtype=torch.float64)
        for anchored in rows:
            if anchored.counts and anchored.old is not None and anchored.reference is not None:
                apart = (anchored.old - anchored.reference).double()
                total += sequence_sum(apart, anchored.row.sequence, n).cpu()
        # The tokens of a rollout are in one row, so on one rank: the others add zeros.
        totals = self._ranks.gather(lambda: total.numpy())
        return self._ranks.from_first(lambda: np.sum(totals, axis=0))


def _size(model: PreTrainedModel) -> ModelSize | None:
    try:
        return size_of(model)
    except UnknownModelError as error:
        _log.warning("FLOPs are not counted: %s", error)
        return None


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


def deal_rows(packed: Sequence[PackedRow], ranks: Ranks) -> list[tuple[PackedRow, bool]]:
    """The rows that a rank computes, and whether each counts: equally many on every rank.

    Row i is the rank's with the number i modulo their number. Who has too few takes the shortest row once more.
    """
    own = [(row, True) for row in packed[ranks.rank :: ranks.size]]
    missing = -(-len(packed) // ranks.size) - len(own)
    return own + [(min(packed, key=lambda row: row.tree.length), False)] * missing


def _rollouts(groups: Sequence[TrainableGroup]) -> list[Trajectory]:
    return [rollout for group in groups for rollout in group.rollouts]


def _traces(seen: Sequence[tuple[list[_Trained], float]]) -> list[metrics.TokenTrace]:
    """Of the rows of all parts of a step, in order."""
    return [trace for trained, _ in seen for part in trained for trace in part.traces]


def _part_metrics(
    online: TrainableBatch | None, groups: Sequence[TrainableGroup], parts: Sequence[_Part], seen: Sequence[_Trained]
) -> dict[str, float]:
    """What each part of a mixed step was; nothing for a step without an online batch."""
    if online is None:
        return {}
    tokens = [part.totals.tokens for part in parts]
    found = metrics.online_metrics(online, parts[0].advantages, seen[0].traces)
    found |= {"online/loss": seen[0].loss, "online/tokens": float(tokens[0])}
    if groups:
        found |= metrics.simulated_metrics(groups, seen[1].traces)
        found |= {"simulated/loss": seen[1].loss, "simulated/tokens": float(tokens[1])}
    return found
