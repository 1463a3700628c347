"""The mismatch between sampler and trainer on the tokens of a step, by part and by kind of token. Pure.

A token was sampled by an engine at weights s, and is trained from weights t. Its difference is a sum
(arXiv 2512.01374): log pi_trainer(t) - log pi_sampler(s) =

- log pi_trainer(s) - log pi_sampler(s): the difference between two engines at equal weights (`engines`), plus
- log pi_trainer(t) - log pi_trainer(s): the effect of the updates in between (`staleness`).

Tokens of policy lag 0 have only the first summand. Tokens of older weights (`lagged`) have both; if the trainer
also scored them at these weights (`master.OlderWeights`), each summand is known.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.schemas.records import Mismatch, MismatchSlice, Rollout, TrainStep, WorstToken
from tidemill.trainer.batch import Trajectory, token_versions
from tidemill.trainer.corrections import k1, k3
from tidemill.trainer.metrics import TokenTrace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Dimension = tuple[str, Ints, Sequence[str]]
"""A property of tokens: its name, the code of each token, and the values of the codes."""

WHOLE = "all"
"""The dimension of a whole part, and its only value."""
POSITIONS = (64, 256, 1024, 4096, 16_384, 65_536)
"""The first positions of the second and later buckets."""
LAST_TURN = 8
"""This turn and all later ones are one bucket."""
PROBABILITIES = {0.1: "below 0.1", 0.9: "0.1 to 0.9", np.inf: "above 0.9"}
"""Buckets of the sampler's probability by their upper ends. Engines differ most for unlikely tokens."""
PLACES = ("first", "inner", "last")
"""Position of a token in its turn. The token of a one-token turn counts as last: it is the end-of-turn token."""
WORST_TOKENS = 16
"""Number of tokens of a step that are recorded individually."""
ALARMS = {"k3": 1e-2, "beyond_2": 0.1}
"""Bounds on numbers of a whole part. At a KL divergence of 0.013 between engines nearly half of the tokens were clipped
and the reward collapsed within 20 steps; a share of 0.1 of ratios beyond 2 precedes the collapse of mixture-of-experts
training. Both as others quote them, the first from Fireworks, "Frontier-lab Training Infrastructure" (June 2026), the
second from arXiv 2510.11370: neither figure was read in its source."""


class MismatchPart(StrEnum):
    """The part of the difference that a slice describes."""

    ALL = "all"
    """The whole difference of every token."""
    ENGINES = "engines"
    """The first summand, for tokens of policy lag 0 and for tokens scored at the weights that sampled them."""
    STALENESS = "staleness"
    """The second summand, for tokens of older weights that were also scored at these weights."""
    LAGGED = "lagged"
    """The whole difference of tokens of older weights: engines and staleness together."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The T sampled tokens that a step trained on, in the order of `trajectories`, on a CPU and without gradient."""

    trajectories: Sequence[Trajectory]
    trainer_logprobs: Tensor
    """f4[T]: at the weights that the step started from."""
    sampler_logprobs: Tensor
    """f4[T]."""
    weights: Tensor
    """f4[T]: the weights of the correction."""
    cut: Tensor
    """bool[T]: whether the correction bounded a token's weight, or set it to 0."""
    advantages: Tensor
    """f4[n]: the advantages of the n `trajectories`."""
    older_version: int
    """The version of `older_logprobs`; -1 without any."""
    older_logprobs: Tensor
    """f4[T]: the trainer's logprobs at older weights; NaN for tokens that were not scored there."""
    routed: Tensor | None = None
    """i8[5], as `RoutingReplay.seen`, of all rows; None if the routing is not compared."""
    experts: Mapping[int, Tensor] = field(default_factory=dict)
    """i4[2, layers, top_k], as `RoutingReplay.experts`, by index of a sampled token, for the tokens that predicted it:
    for each row, the tokens on which sampler and trainer differ most."""


def trained_tokens(
    trajectories: Sequence[Trajectory],
    sequences: Sequence[Tensor],
    traces: Sequence[TokenTrace],
    advantages: Tensor,
    older: tuple[int, Tensor] | None,
) -> TrainedTokens:
    """Return the tokens of the rows of a step.

    Args:
        sequences: i8[n] for each row: the index in `trajectories` of each token. A record's tokens are in one row.
        traces: the traces of the same rows.
        advantages: f4[n] of the trajectories.
        older: version and logprobs of older weights, for the first of these rows (`OlderWeights.score`).
    """
    # Rows contain the tokens of a record in order, but the records in any order.
    order = torch.cat(list(sequences)).argsort(stable=True)
    scored = torch.full((len(order),), torch.nan)
    routed = [trace.routed for trace in traces if trace.routed is not None]
    if older is not None:
        scored[: len(older[1])] = older[1]
    places, experts, begin = order.argsort().tolist(), {}, 0
    for trace in traces:
        for place, found in zip(*(trace.experts or ((), ())), strict=True):
            experts[places[begin + int(place)]] = found
        begin += len(trace.logprobs)
    return TrainedTokens(
        trajectories=trajectories,
        trainer_logprobs=torch.cat([trace.logprobs for trace in traces])[order],
        sampler_logprobs=torch.cat([trace.sampler_logprobs for trace in traces])[order],
        weights=torch.cat([trace.weights for trace in traces])[order],
        cut=torch.cat([trace.cut for trace in traces])[order],
        advantages=advantages,
        older_version=-1 if older is None else older[0],
        older_logprobs=scored[order],
        routed=torch.stack(routed).sum(0) if routed else None,
        experts=experts,
    )


def mismatch_record(record: TrainStep, trained: TrainedTokens) -> Mismatch:
    """Return the record of the mismatch on the tokens of a step."""
    started = time.perf_counter()
    slices, worst = measure(trained, record.parent_version)
    tokens_otherwise, layers_otherwise = routed_otherwise(trained)
    return Mismatch(
        run_id=record.run_id,
        step=record.step,
        version=record.parent_version,
        tokens=record.tokens,
        slices=slices,
        worst=worst,
        alarms=sorted(alarms(slices)),
        tokens_routed_otherwise=tokens_otherwise,
        layers_routed_otherwise=layers_otherwise,
        seconds=time.perf_counter() - started,
        at=record.finished_at,
        incarnation=record.incarnation,
    )


def measure(tokens: TrainedTokens, version: int) -> tuple[list[MismatchSlice], list[WorstToken]]:
    """Return all slices with tokens, and the worst tokens, of a step that started from weight version `version`."""
    found = _TokenPlaces(tokens.trajectories, version)
    difference = tokens.trainer_logprobs - tokens.sampler_logprobs
    scored = (found.version == tokens.older_version) & ~tokens.older_logprobs.isnan().numpy() & (found.lag != 0)
    at_sampling = torch.where(torch.from_numpy(scored), tokens.older_logprobs, tokens.trainer_logprobs)
    parts = {
        MismatchPart.ALL: (difference, np.arange(len(difference))),
        MismatchPart.ENGINES: (at_sampling - tokens.sampler_logprobs, np.flatnonzero((found.lag == 0) | scored)),
        MismatchPart.STALENESS: (tokens.trainer_logprobs - at_sampling, np.flatnonzero(scored)),
        MismatchPart.LAGGED: (difference, np.flatnonzero(found.lag != 0)),
    }
    dimensions = found.dimensions(tokens.sampler_logprobs)
    slices: list[MismatchSlice] = []
    for part, (of, which) in parts.items():
        own = [(name, codes[which], values) for name, codes, values in dimensions]
        slices += _slices(part, of[which], tokens.cut[which], own)
    return slices, [found.token(place, tokens) for place in farthest(difference).tolist()]


def farthest(difference: Tensor) -> Tensor:
    """Return the indices of the `WORST_TOKENS` largest values of |difference| (f4[T]), the largest first."""
    return difference.abs().argsort(descending=True, stable=True)[:WORST_TOKENS]


def routed_otherwise(tokens: TrainedTokens) -> tuple[float | None, float | None]:
    """Return the shares of the tokens, and of the (token, layer) pairs, for which the trainer chose other experts than
    the sampler; None if the sampler's experts are not known."""
    if tokens.routed is None:
        return None, None
    pairs_otherwise, _, pairs, otherwise, seen = tokens.routed.tolist()
    return (otherwise / seen, pairs_otherwise / pairs) if seen else (None, None)


def alarms(slices: Sequence[MismatchSlice]) -> dict[str, float]:
    """Return the numbers of whole parts that are at or beyond their bounds, as `part/number`."""
    whole = [each for each in slices if each.dimension == WHOLE]
    found = {f"{each.part}/{name}": getattr(each, name) for each in whole for name in ALARMS}
    return {name: value for name, value in found.items() if value >= ALARMS[name.split("/")[1]]}


def warning(found: Mapping[str, float]) -> str:
    """Return the text of a warning about alarms: their numbers, and the advice."""
    bounds = {name: ALARMS[name.split("/")[1]] for name in found}
    numbers = ", ".join(f"{name} is {value:.3g} (alarm from {bounds[name]:g} on)" for name, value in found.items())
    return (
        f"the mismatch between sampler and trainer is large: {numbers}. If `{MismatchPart.ENGINES}` is large, they "
        "compute different logprobs from equal weights: compare the model, the precision and the device of replica and "
        f"trainer. If only `{MismatchPart.LAGGED}` is, the weights have changed too much since sampling: lower "
        "run.max_policy_lag or the learning rate. `tidemill query mismatch_where` shows on which tokens"
    )


class _TokenPlaces:
    """The positions and other properties of the T tokens; every array is i8[T]."""

    def __init__(self, trajectories: Sequence[Trajectory], version: int) -> None:
        per_record = [_sampled(trajectory) for trajectory in trajectories]
        self.trajectories = trajectories
        self.record = np.repeat(np.arange(len(trajectories)), [each.shape[1] for each in per_record])
        self.version, self.segment, self.position, self.turn, self.place = np.concatenate(per_record, axis=1)
        self.lag = version - self.version

    def dimensions(self, sampler_logprobs: Tensor) -> list[Dimension]:
        """Return the properties by which tokens are sliced."""
        ends = [0, *POSITIONS]
        positions = [f"{begin}-{end - 1}" for begin, end in zip(ends, POSITIONS, strict=False)]
        lags, lag = np.unique(self.lag, return_inverse=True)
        probability = np.searchsorted(list(PROBABILITIES), sampler_logprobs.double().exp().numpy(), side="right")
        return [
            (WHOLE, np.zeros_like(self.record), [WHOLE]),
            ("environment", *self._named([_environment(each) for each in self.trajectories])),
            ("replica", *self._named([each.replica_id for each in self.trajectories])),
            ("lag", lag, [str(each) for each in lags]),
            ("position", np.digitize(self.position, POSITIONS), [*positions, f"{POSITIONS[-1]}-"]),
            ("turn", self.turn.clip(max=LAST_TURN), [*map(str, range(LAST_TURN)), f"{LAST_TURN}-"]),
            ("place", self.place, PLACES),
            ("probability", probability, list(PROBABILITIES.values())),
        ]

    def token(self, place: int, tokens: TrainedTokens) -> WorstToken:
        trajectory = self.trajectories[self.record[place]]
        is_rollout = isinstance(trajectory, Rollout)
        segment, position = int(self.segment[place]), int(self.position[place])
        experts: Sequence[Any] = tokens.experts[place].tolist() if place in tokens.experts else ((), ())
        sampled, own = (" ".join(",".join(map(str, layer)) for layer in layers) for layers in experts)
        return WorstToken(
            record_id=trajectory.rollout_id if is_rollout else trajectory.interaction_id,
            environment=_environment(trajectory),
            replica_id=trajectory.replica_id,
            version=int(self.version[place]),
            lag=int(self.lag[place]),
            segment=segment,
            position=position,
            turn=int(self.turn[place]),
            token_id=int(trajectory.segments[segment].ids()[position]) if is_rollout else None,
            sampler_logprob=float(tokens.sampler_logprobs[place]),
            trainer_logprob=float(tokens.trainer_logprobs[place]),
            weight=float(tokens.weights[place]),
            sampler_experts=sampled,
            trainer_experts=own,
        )

    def _named(self, names: Sequence[str]) -> tuple[Ints, list[str]]:
        values, codes = np.unique(names, return_inverse=True)
        return codes[self.record], values.tolist()


def _environment(trajectory: Trajectory) -> str:
    return trajectory.environment if isinstance(trajectory, Rollout) else ""


def _sampled(trajectory: Trajectory) -> Ints:
    """Return i8[5, T]: version, segment, position in it, turn and place in the turn of each sampled token of a record.

    A turn is a run of sampled tokens: at least the end of its message separates it from the next turn.
    """
    found, turns = [], 0
    for number, segment in enumerate(trajectory.segments):
        at = np.flatnonzero(segment.mask())
        if not at.size:
            continue
        begins = np.diff(at, prepend=-1) > 1
        begins[0] = True
        ends = np.append(begins[1:], True)
        turn = turns + np.cumsum(begins) - 1
        place = np.where(ends, 2, np.where(begins, 0, 1))
        found.append(np.stack([token_versions(segment)[at], np.full_like(at, number), at, turn, place]))
        turns = int(turn[-1]) + 1
    return np.concatenate(found, axis=1)


def _slices(
    part: MismatchPart, difference: Tensor, cut: Tensor, dimensions: Sequence[Dimension]
) -> list[MismatchSlice]:
    """Return the slices of the n tokens of a part; empty without tokens.

    Args:
        difference: f4[n].
        cut: bool[n].
        dimensions: the codes of these tokens.
    """
    if not len(difference):
        return []
    log_ratio, size = difference.double().numpy(), difference.abs().double().numpy()
    is_beyond = difference.abs() > np.log(2.0)
    terms = torch.stack([k1(difference), k3(difference), is_beyond, cut]).double().numpy()
    found, by_size = [], np.argsort(size, kind="stable")
    for dimension, codes, values in dimensions:
        order = by_size[np.argsort(codes[by_size], kind="stable")]
        begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
        tokens = np.diff(begins, append=len(order))
        ends = begins + tokens - 1
        k1_sums, k3_sums, beyond_2, are_cut = np.add.reduceat(terms[:, order], begins, axis=1)
        greatest = np.repeat(np.maximum.reduceat(log_ratio[order], begins), tokens)
        weights = np.exp(log_ratio[order] - greatest)
        ess = np.add.reduceat(weights, begins) ** 2 / (tokens * np.add.reduceat(weights**2, begins))
        ordered = size[order]
        columns = {
            "tokens": tokens,
            "k1": k1_sums / tokens,
            "k3": k3_sums / tokens,
            "p50": _quantile(ordered, begins, ends, 0.5),
            "p99": _quantile(ordered, begins, ends, 0.99),
            "max": ordered[ends],
            "beyond_2": beyond_2 / tokens,
            "ess": ess,
            "cut": are_cut.astype(np.int64),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        named: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in rows]
        found += [
            MismatchSlice(part.value, dimension, values[code], **numbers)
            for code, numbers in zip(codes[order][begins].tolist(), named, strict=True)
        ]
    return found


def _quantile(ordered: Floats, begins: Ints, ends: Ints, share: float) -> Floats:
    """Return the quantile of each run of ascending values from `begins` to `ends`, inclusive; linear interpolation."""
    place = begins + share * (ends - begins)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, ends)
    found: Floats = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return found
