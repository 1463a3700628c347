"""The metrics of one optimizer step, computed from the tensors that it trained on: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tidemill.schemas.records import LagCount, Staleness, TrainStep
from tidemill.trainer.batch import PackedRow, Trajectory, sampled_versions
from tidemill.trainer.corrections import chi_square, effective_sample_size, k1, k3, share_beyond
from tidemill.trainer.model_size import ModelSize
from tidemill.trainer.policy import keeps_scores
from tidemill.trainer.trainable import TrainableBatch, TrainableGroup, rewards_of

STAGE = "train"
"""The stage in the staleness records of steps."""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Values of the T sampled tokens of one row, f4[T] if not stated otherwise; without gradient."""

    loss: float
    """The row's share of the loss."""
    logprobs: Tensor
    sampler_logprobs: Tensor
    weights: Tensor
    entropy: Tensor
    clipped: Tensor
    """f4[]: number of tokens whose surrogate had no gradient, because the policy ratio was beyond its clip range."""
    cut: Tensor
    """bool[T]: tokens whose weight between sampler and trainer is bounded, or set to 0."""
    reference_logprobs: Tensor | None = None
    """Logprobs of the reference, if `logprobs` are from before the step."""
    routed: Tensor | None = None
    """i8[5], as `RoutingReplay.seen`; None if the routing is not compared."""
    experts: tuple[Tensor, Tensor] | None = None
    """i8[n], indices of the tokens on which sampler and trainer differ most, and i4[n, 2, layers, top_k], as
    `RoutingReplay.experts`, for the tokens that predicted them. None without expert ids."""


def trace_metrics(traces: Sequence[TokenTrace]) -> dict[str, float]:
    """Return the entropy in nats, the share of clipped tokens, and the difference between trainer and sampler on the
    trained tokens, from policy lag and arithmetic together."""
    log_ratio, entropy = _log_ratio(traces), torch.cat([t.entropy for t in traces])
    weights = torch.cat([t.weights for t in traces])
    return {
        "entropy": float(entropy.double().mean()),
        "clip_fraction": sum(float(t.clipped) for t in traces) / entropy.numel(),
        "mismatch/k1": float(k1(log_ratio).double().mean()),
        "mismatch/k3": float(k3(log_ratio).double().mean()),
        "mismatch/mean_abs_dlogp": float(log_ratio.abs().double().mean()),
        "mismatch/max_abs_dlogp": float(log_ratio.abs().max()),
        "mismatch/chi_square": chi_square(log_ratio),
        "mismatch/ess": effective_sample_size(log_ratio),
        "mismatch/beyond_2": share_beyond(log_ratio, 2.0),
        "correction/bounded": float(torch.cat([t.cut for t in traces]).double().mean()),
        "correction/mean": float(weights.double().mean()),
    }


def reward_metrics(groups: Sequence[TrainableGroup]) -> dict[str, float]:
    """Return means over the trained rollouts: reward, its components, turns, length, and success, if it was judged of
    some; empty without any."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    rewards = [float(reward) for group in groups for reward in rewards_of(group.group)]
    judged = [float(r.success) for r in rollouts if r.success is not None]
    components: dict[str, list[float]] = {}
    for component in (component for rollout in rollouts for component in rollout.rewards):
        components.setdefault(f"reward/{component.name}", []).append(component.value)
    return {
        "reward": _mean(rewards),
        **({"success": _mean(judged)} if judged else {}),
        "turns": _mean([float(r.turns) for r in rollouts]),
        "sampled_tokens": _mean([float(r.sampled_tokens) for r in rollouts]),
        **{name: _mean(found) for name, found in sorted(components.items())},
    }


def online_metrics(batch: TrainableBatch, advantages: Tensor, traces: Sequence[TokenTrace]) -> dict[str, float]:
    """Return users' rewards for the answers of an online batch, and its effective sizes.

    `ess` is the effective share of the tokens, given their weights between sampler and trainer; `effective_members` is
    the equivalent number of interactions with equal advantages: (sum |A|)^2 / sum A^2 over `advantages` f4[n].
    """
    log_ratio = _log_ratio(traces)
    sizes = advantages.double().abs()
    corrections = batch.corrections()
    return {
        "online/reward": _mean(batch.rewards()[~corrections].tolist()),
        "online/members": float(len(batch.members)),
        "online/corrections": float(corrections.sum()),
        "online/excluded": float(len(batch.excluded)),
        "online/entropy": float(torch.cat([t.entropy for t in traces]).double().mean()),
        "online/ess": effective_sample_size(log_ratio),
        "online/mismatch": float(k3(log_ratio).double().mean()),
        "online/effective_members": float(sizes.sum().square() / sizes.square().sum().clamp(min=1e-300)),
    }


def simulated_metrics(groups: Sequence[TrainableGroup], traces: Sequence[TokenTrace]) -> dict[str, float]:
    """Return metrics of the simulated groups that joined an online batch."""
    return {
        "simulated/reward": _mean([float(reward) for group in groups for reward in rewards_of(group.group)]),
        "simulated/groups": float(len(groups)),
        "simulated/entropy": float(torch.cat([t.entropy for t in traces]).double().mean()),
        "simulated/mismatch": float(k3(_log_ratio(traces)).double().mean()),
    }


def optional_metrics(traces: Sequence[TokenTrace]) -> dict[str, float]:
    """Return the shares of (token, layer) pairs that the trainer's own routers route differently from the sampler, and
    that were replaced as implausible, if the routing is compared; and the mean of log pi_old - log pi_ref over the
    trained tokens, if the settings need both."""
    found, seen = {}, [trace.routed for trace in traces if trace.routed is not None]
    if seen:
        otherwise, replaced, pairs, *_ = torch.stack(seen).sum(0).tolist()
        found = {"routing/otherwise": otherwise / max(pairs, 1), "routing/replaced": replaced / max(pairs, 1)}
    apart = [t.logprobs - t.reference_logprobs for t in traces if t.reference_logprobs is not None]
    return {**found, "reference/k1": float(torch.cat(apart).double().mean())} if apart else found


def packing_metrics(rows: Sequence[PackedRow]) -> dict[str, float]:
    """Return the number of tokens of the trained segments, and of the tokens that the model computes in a pass."""
    return {
        "packing/tokens": float(sum(row.tokens for row in rows)),
        "packing/computed": float(sum(row.tree.length for row in rows)),
    }


def flop_metrics(
    size: ModelSize, rows: Iterable[tuple[PackedRow, int]], *, layers_twice: bool = False
) -> dict[str, float]:
    """Return the FLOPs of a step by `ModelSize.forward`, and the numbers to compute those of other tokens.

    `flops/forward` and `flops/backward` are those of the tokens that the model computes, `flops/frozen` those of the
    passes without a gradient, except scores at older weights (`trainer.score_older_every`). `flops/recomputed` are
    those computed a second time to save memory: scores of the head, and the layers with checkpointed activations.
    `flops/saved` would be added, without attention, if the rows contained every token of every segment.

    Args:
        rows: each row with its number of passes without a gradient.
    """
    forward, frozen, recomputed, saved = 0.0, 0.0, 0.0, 0.0
    for row, passes in rows:
        scored = len(row.predicting)
        pairs = float((row.position_ids + 1).sum())
        computed = size.forward(row.tree.length, pairs, scored)
        forward += computed
        frozen += passes * computed
        recomputed += 0.0 if keeps_scores(scored, size.vocabulary) else size.forward(0, 0, scored)
        recomputed += size.forward(row.tree.length, pairs, 0) if layers_twice else 0.0
        saved += (3 + passes) * size.forward(max(row.tokens - row.tree.length, 0), 0, 0)
    return {
        "flops/parameters": float(size.parameters),
        "flops/body": float(size.body),
        "flops/head": float(size.head),
        "flops/pair": float(size.pair),
        "flops/forward": forward,
        "flops/backward": 2 * forward,
        "flops/frozen": frozen,
        "flops/recomputed": recomputed,
        "flops/saved": saved,
    }


def lag_counts(rollouts: Iterable[Trajectory], version: int) -> list[LagCount]:
    """Return the number of tokens by policy lag (the trainer's `version` minus the token's version), ascending."""
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        counts.update((version - sampled_versions(rollout)).tolist())
    return [LagCount(lag, tokens) for lag, tokens in sorted(counts.items())]


def lag_metrics(lag: Sequence[LagCount]) -> dict[str, float]:
    """Return the mean and the greatest policy lag of the trained tokens, in versions."""
    tokens = sum(count.tokens for count in lag)
    return {
        "lag/mean": sum(count.lag * count.tokens for count in lag) / tokens,
        "lag/max": float(max(count.lag for count in lag)),
    }


def staleness_records(record: TrainStep, sampled: Iterable[Trajectory]) -> list[Staleness]:
    """Return the policy lag of the tokens that a step trained on, for each replica."""

    def source(trajectory: Trajectory) -> tuple[str, str]:
        return trajectory.replica_id, trajectory.region

    return [
        Staleness(
            run_id=record.run_id,
            replica_id=replica_id,
            region=region,
            stage=STAGE,
            step=record.step,
            version=record.parent_version,
            lag=lag_counts(found, record.parent_version),
            at=record.finished_at,
        )
        for (replica_id, region), found in groupby(sorted(sampled, key=source), source)
    ]


def _log_ratio(traces: Sequence[TokenTrace]) -> Tensor:
    return torch.cat([t.logprobs for t in traces]) - torch.cat([t.sampler_logprobs for t in traces])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
