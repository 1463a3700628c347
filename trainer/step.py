"""One optimizer step: it takes groups and an online batch, changes the weights in place and returns metrics.

Deterministic given the weights, the inputs in order, the settings and the seed: the same call on the same machine type,
thread count and number of ranks gives the same weights, bit for bit.

Every rank packs the same rows and computes its share of them. All ranks must compute a row at the same time, so each
has equally many rows: a rank with fewer computes a row again, and the loss of that row does not count.

The interactions of an online batch and the simulated groups are two parts of one loss. Each part has its own
advantages, surrogate and average; a setting gives the weight of the simulated part relative to the online part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.kernels.quantise import ROW_FORMATS
from tidemill.kernels.weights.ranks import Ranks
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.records import LagCount
from tidemill.trainer import metrics
from tidemill.trainer.activations import quantise_activations
from tidemill.trainer.advantages import Rewards, batch_advantages, penalise, raw
from tidemill.trainer.batch import InvalidRoutingError, PackedRow, Trajectory, pack
from tidemill.trainer.choices import Forward, Routing, ServingActivations, ServingFormat
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.corrections import bounded, correction_weights, sequence_sum
from tidemill.trainer.job import (
    KEPT_BLOCK,
    KEPT_BLOCK_SHARDED,
    SINGLE,
    Job,
    compute_dtype,
    device_of,
    keep_freed_memory,
    machine_of,
    make_deterministic,
)
from tidemill.trainer.master import MasterWeights, OlderWeights, quantised_weights, round_as_policy
from tidemill.trainer.mismatch import TrainedTokens, farthest, trained_tokens
from tidemill.trainer.model import use_packed_attention
from tidemill.trainer.model_size import ModelSize, UnknownModelError, size_of
from tidemill.trainer.objectives import (
    OBJECTIVES,
    Options,
    Recipe,
    Tokens,
    clipped_tokens,
    constant_mean,
    decoupled,
    loss,
    options_of,
    policy_gradient,
)
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs
from tidemill.trainer.routing import RoutingReplay
from tidemill.trainer.sharding import expert_mesh, lay_over_ranks, recompute_activations, require_divisible
from tidemill.trainer.stored_model import StoredModel
from tidemill.trainer.trainable import TrainableBatch, TrainableGroup, rewards_of

_log = logging.getLogger(__name__)

ONLINE = Recipe(raw, policy_gradient, constant_mean)
"""REINFORCE with a correction weight; a token has the same weight in a short and in a long answer. The advantages are
computed by `advantages.batch_advantages`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The report of a step; the new weights are in the model."""

    metrics: dict[str, float]
    """Computed on the first rank only."""
    lag: list[LagCount]
    learning_rate: float
    rollouts: int
    """Rollouts and interactions trained on."""
    tokens: int
    """Sampled tokens trained on."""
    trained: TrainedTokens | None
    """These tokens; on the first rank only."""


@dataclass(frozen=True, slots=True)
class _AnchoredRow:
    """A row with the logprobs that do not change within the step; None if the settings do not need them."""

    row: PackedRow
    counts: bool
    """False for a copy of a row that another rank trains on."""
    old: Tensor | None
    reference: Tensor | None


@dataclass(slots=True)
class _UpdatePart:
    """The rows of one part of an optimizer update, with the advantage of each of its n rollouts (f4[n])."""

    packed: Sequence[PackedRow]
    """The rows of all ranks."""
    rows: list[_AnchoredRow]
    """The rows of this rank."""
    advantages: Tensor
    tokens: int
    """Sampled tokens of all rows."""
    recipe: Recipe
    options: Options
    weight: float
    """Weight of its loss."""
    traces: list[metrics.TokenTrace] = field(default_factory=list)
    """Of the rows of all ranks, after the update; on the first rank only."""

    @property
    def loss(self) -> float:
        return sum(trace.loss for trace in self.traces)


class Learner:
    """The trained model with its master weights and the reference. Every rank has one and makes the same calls.

    Args:
        model: the whole model, on a CPU, or an outline of `stored`; it is moved to the device or sharded over ranks.
        reference: like `model`.
        stored: each rank reads its own rows of the weights from it.

    Raises ValueError, UntrainableModelError for instance, if the model cannot be trained on this machine.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        reference: PreTrainedModel | None,
        job: Job = SINGLE,
        stored: StoredModel | None = None,
    ) -> None:
        self._device = device_of(settings, job)
        make_deterministic(settings.threads, self._device)
        if settings.kl.coefficient and reference is None:
            raise ValueError("kl.coefficient is above 0, so a reference model is needed")
        self._settings = settings
        try:
            self._size: ModelSize | None = size_of(model)
        except UnknownModelError as error:
            _log.warning("FLOPs are not counted: %s", error)
            self._size = None
        self._recipe = OBJECTIVES[settings.objective]
        self._ranks = job.ranks
        self.machine = machine_of(settings, job)
        require_divisible(model, settings.expert_parallel, self._ranks.size)
        keep_freed_memory(KEPT_BLOCK_SHARDED if self.machine.is_sharded else KEPT_BLOCK)
        routed = settings.routing is not Routing.OFF
        self.replay = RoutingReplay(model, settings.routing, settings.routing_plausible) if routed else None
        if settings.checkpoint_activations:
            recompute_activations(model)
        networks = [network.eval() for network in (model, reference) if network is not None]
        compute = compute_dtype(settings, self._device)
        if self.machine.is_sharded:
            # For a format with codes, the stored weights are rounded only once, so they are held in fp32 until then.
            held = compute if settings.serving_format is ServingFormat.BF16 else torch.float32
            divided = expert_mesh(self._device, settings.expert_parallel, settings.ranks_timeout_s)
            lay_over_ranks(networks, self._device, compute, stored, held, divided)
        else:
            for network in networks:
                use_packed_attention(network)
                network.to(self._device)
        if reference is not None:
            # Otherwise the rounding error would separate the policy from its reference before any step.
            round_as_policy(reference, settings.serving_format, settings.forward)
        if settings.serving_activations is not ServingActivations.NONE and settings.forward is Forward.MATCHED:
            for network in networks:
                form = ROW_FORMATS[settings.serving_activations.value]
                quantise_activations(network, quantised_weights(network), form)
        self.model = model
        self.masters = MasterWeights(
            model,
            settings.optimizer,
            settings.serving_format,
            settings.forward,
            gathered_in_bf16=self.machine.is_sharded and compute is torch.bfloat16,
        )
        self._reference = reference
        self._older = OlderWeights(model, self.masters, self._ranks, settings.score_older_every)

    def train(
        self, groups: Sequence[TrainableGroup], step: int, version: int, seed: int, online: TrainableBatch | None = None
    ) -> StepOutcome:
        """Train step `step` on `groups` and on `online`, if given. The weights before the step are version `version`.

        Raises InvalidRolloutError for malformed rollouts, and for groups without the expert ids that the routing
        needs, ValueError for a group of one if the objective compares rollouts, RuntimeError for a gradient that is
        not finite. After the first two errors the weights are unchanged.
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
        norms = [self._update(parts, learning_rate) for parts in updates]
        sampled: list[Trajectory] = [*(online.interactions if online else ()), *_rollouts(groups)]
        lag = metrics.lag_counts(sampled, version)
        parts = [part for of_update in updates for part in of_update]
        first, found, trained = parts[0], {}, None
        older = self._older.score(first.packed, first.rows[0].row, sampled)
        if self._ranks.is_first:
            found = self._metrics(groups, online, lag, updates, norms)
            # The tokens of all parts, in the order of `sampled`, which is the order of the parts.
            sequences, traces, start = [], [], 0
            for part in parts:
                sequences += [row.sequence + start for row in part.packed]
                traces += part.traces
                start += len(part.advantages)
            values = torch.cat([part.advantages for part in parts])
            trained = trained_tokens(sampled, sequences, traces, values, older)
        return StepOutcome(
            metrics=found,
            lag=lag,
            learning_rate=learning_rate,
            rollouts=len(sampled),
            tokens=sum(part.tokens for part in parts),
            trained=trained,
        )

    def _metrics(
        self,
        groups: Sequence[TrainableGroup],
        online: TrainableBatch | None,
        lag: list[LagCount],
        updates: Sequence[Sequence[_UpdatePart]],
        norms: Sequence[float],
    ) -> dict[str, float]:
        parts = [part for of_update in updates for part in of_update]
        traces = [trace for part in parts for trace in part.traces]
        found = {
            "loss": float(np.mean([sum(part.loss for part in of_update) for of_update in updates])),
            "grad_norm": float(np.mean(norms)),
            **metrics.trace_metrics(traces),
            **metrics.reward_metrics(groups),
            **metrics.lag_metrics(lag),
            **metrics.optional_metrics(traces),
            **metrics.packing_metrics([row for part in parts for row in part.packed]),
        }
        if self._size is not None:
            # Counts the rows of all ranks, each once.
            frozen = [(part.rows[0].old is not None) + (part.rows[0].reference is not None) for part in parts]
            rows = [(row, passes) for part, passes in zip(parts, frozen, strict=True) for row in part.packed]
            found |= metrics.flop_metrics(self._size, rows, layers_twice=self._settings.checkpoint_activations)
        if online is not None:
            users, *simulated = parts
            found |= metrics.online_metrics(online, users.advantages, users.traces)
            found |= {"online/loss": users.loss, "online/tokens": float(users.tokens)}
            for one in simulated:
                found |= metrics.simulated_metrics(groups, one.traces)
                found |= {"simulated/loss": one.loss, "simulated/tokens": float(one.tokens)}
        return found

    def _simulated(self, groups: Sequence[TrainableGroup], weight: float) -> _UpdatePart:
        kl, rollouts = self._settings.kl, _rollouts(groups)
        packed, rows = self._rows(rollouts, [ids for group in groups for ids in group.expert_ids])
        divergence = self._divergence(rows, len(rollouts))
        values, start = [], 0
        for group in groups:
            rewards = rewards_of(group.group)
            if kl.coefficient and not kl.in_loss:
                rewards = penalise(rewards, divergence[start : start + len(rewards)], kl.coefficient)
            values.append(self._recipe.advantage(rewards))
            start += len(rewards)
        return self._part(packed, rows, np.concatenate(values), self._recipe, weight)

    def _online(self, batch: TrainableBatch) -> _UpdatePart:
        kl = self._settings.kl
        packed, rows = self._rows(batch.interactions)
        coefficient = 0.0 if kl.in_loss else kl.coefficient
        divergence = self._divergence(rows, len(batch.interactions))
        values = batch_advantages(self._settings.online.baseline, batch, divergence, coefficient)
        return self._part(packed, rows, values, ONLINE, 1.0)

    def _rows(
        self, sampled: Sequence[Trajectory], expert_ids: Sequence[ExpertIds] = ()
    ) -> tuple[Sequence[PackedRow], list[_AnchoredRow]]:
        """Return the rows of all ranks, and the rows of this rank."""
        settings, kl, vocab_size = self._settings, self._settings.kl, self.model.config.vocab_size
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
        needs_old = settings.minibatches > 1 or (kl.coefficient > 0 and not kl.in_loss)
        rows = []
        for dealt, counts in deal_rows(packed, self._ranks):
            row = dealt.to(self._device)
            old = frozen_logprobs(self.model, row) if needs_old else None
            reference = frozen_logprobs(self._reference, row) if kl.coefficient and self._reference else None
            rows.append(_AnchoredRow(row, counts, old, reference))
        return packed, rows

    def _part(
        self, packed: Sequence[PackedRow], rows: list[_AnchoredRow], advantages: Rewards, recipe: Recipe, weight: float
    ) -> _UpdatePart:
        tokens, values = sum(len(row.targets) for row in packed), torch.from_numpy(advantages).float()
        return _UpdatePart(packed, rows, values, tokens, recipe, options_of(self._settings, recipe), weight)

    def _update(self, parts: Sequence[_UpdatePart], learning_rate: float) -> float:
        """Sum the gradients of all parts and apply them; return their norm."""
        for part in parts:
            seen = [(row.counts, self._accumulate(row, part)) for row in part.rows]
            own = [one for counts, one in seen if counts]
            hands = self._ranks.gather(lambda own=own: own)  # type: ignore[misc]
            part.traces = [one for dealt in zip_longest(*hands) for one in dealt if one is not None]
        return self.masters.update(learning_rate)

    def _accumulate(self, anchored: _AnchoredRow, part: _UpdatePart) -> metrics.TokenTrace:
        row, reference, correction = anchored.row, anchored.reference, self._settings.correction
        logprobs, entropy = sampled_logprobs(self.model, row)
        old, sampler = logprobs.detach() if anchored.old is None else anchored.old, row.sampler_logprobs
        advantages, n = part.advantages.to(self._device)[row.sequence], len(part.advantages)
        weights = correction_weights(correction, old, sampler, row.sequence, n)
        tokens = Tokens(logprobs, old, sampler, advantages, weights, row.sequence, n, part.tokens, reference)
        if part.recipe.surrogate is decoupled:
            cut = (old - sampler).exp() >= part.options.behaviour_cap
        else:
            cut = bounded(correction, weights)
        routed, experts = None, None
        if self.replay is not None:
            routed, looked = self.replay.seen(), farthest(old - sampler)
            chosen = self.replay.experts(row.predicting[row.predictors[looked]])
            experts = None if chosen is None else (looked.cpu(), chosen)
        value = part.weight * loss(part.recipe, tokens, part.options)
        (value if anchored.counts else 0.0 * value).backward()  # type: ignore[no-untyped-call]
        return metrics.TokenTrace(
            loss=float(value.detach()),
            logprobs=old.cpu(),
            sampler_logprobs=sampler.cpu(),
            weights=weights.cpu(),
            entropy=entropy.cpu(),
            clipped=clipped_tokens(part.recipe, tokens, part.options).cpu(),
            cut=cut.cpu(),
            reference_logprobs=None if anchored.old is None or reference is None else reference.cpu(),
            routed=routed,
            experts=experts,
        )

    def _divergence(self, rows: Sequence[_AnchoredRow], n: int) -> Rewards:
        """Return f8[n]: log pi_old - log pi_ref summed over each rollout's sampled tokens; 0 without a reference."""
        total = torch.zeros(n, dtype=torch.float64)
        for anchored in rows:
            if anchored.counts and anchored.old is not None and anchored.reference is not None:
                apart = (anchored.old - anchored.reference).double()
                total += sequence_sum(apart, anchored.row.sequence, n).cpu()
        # All tokens of a rollout are in one row, so on one rank: the other ranks add zeros.
        totals = self._ranks.gather(lambda: total.numpy())
        return self._ranks.from_first(lambda: np.sum(totals, axis=0))


def split(groups: Sequence[TrainableGroup], parts: int) -> list[Sequence[TrainableGroup]]:
    """Split groups into at most `parts` sequences of consecutive groups whose sizes differ by at most one."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [groups[a:b] for a, b in pairwise(bounds)]


def deal_rows(packed: Sequence[PackedRow], ranks: Ranks) -> list[tuple[PackedRow, bool]]:
    """Return the rows that a rank computes, and whether each row counts: equally many on every rank.

    Row i belongs to rank i modulo the number of ranks. A rank with fewer rows computes the shortest row again.
    """
    own = [(row, True) for row in packed[ranks.rank :: ranks.size]]
    missing = -(-len(packed) // ranks.size) - len(own)
    return own + [(min(packed, key=lambda row: row.tree.length), False)] * missing


def _rollouts(groups: Sequence[TrainableGroup]) -> list[Trajectory]:
    return [rollout for group in groups for rollout in group.rollouts]
