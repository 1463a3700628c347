"""Logprobs of the sampled tokens of a packed row, recomputed by the trained model.

Logits of a real vocabulary are the largest tensor of a step, so they are never in memory as a whole: a few hundred
predicting tokens at a time are scored, and scored again for the gradient unless they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, log_softmax
from transformers import PreTrainedModel

from tidemill.trainer.batch import PackedRow

CHUNK_SCORES = 1 << 24
"""Scores in memory at a time."""
KEPT_SCORES = 1 << 26
"""Maximum probabilities of a row that are kept for its backward pass, so that they are not computed again."""
SCORING = "tidemill_scored"
"""Method of a sharded model: `scored` with its weights gathered for the call."""
REPLAY = "tidemill_replay"
"""Attribute of a model whose tokens are routed by expert ids: its `routing.RoutingReplay`."""


def sampled_logprobs(model: PreTrainedModel, row: PackedRow) -> tuple[Tensor, Tensor]:
    """Return the logprob (f4[T], with gradient) and the entropy (f4[T], without) at each sampled token of `row`.

    At temperature 1 over the whole vocabulary, in nats. `model` must have passed `use_packed_attention`.
    """
    logprobs, entropy = _scoring(model)(row, True)
    return logprobs, entropy[row.predictors]


def frozen_logprobs(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Return f4[T]: logprobs as `sampled_logprobs`, without gradient or entropy."""
    with torch.no_grad():
        return _scoring(model)(row, False)[0]


def scored(model: PreTrainedModel, row: PackedRow, wanted: bool) -> tuple[Tensor, Tensor]:
    """Return logprobs (f4[T]) of the sampled tokens, and entropies (f4[P]) if they are `wanted`."""
    if (replay := getattr(model, REPLAY, None)) is not None:
        replay.lay(row)
    states = model.base_model(
        input_ids=row.input_ids, position_ids=row.position_ids, tree=row.tree, use_cache=False
    ).last_hidden_state
    head, hidden = model.get_output_embeddings(), states[0].index_select(0, row.predicting)
    made: tuple[Tensor, Tensor] = SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, row.predictors, row.targets, wanted
    )
    return made


def keeps_scores(predicting: int, vocabulary: int) -> bool:
    """Return whether the probabilities of a row's predicting tokens are kept for its backward pass."""
    return predicting * vocabulary <= KEPT_SCORES


class SampledLogprobs(torch.autograd.Function):
    """Logprobs of targets (f4[T]) under softmax(hidden weight^T + bias), and entropies (f4[P], without gradient).

    Inputs: hidden f4[P, H], weight f4[V, H], bias f4[V] or None, for each target the index of P that predicts it
    (i8[T]), the targets (i8[T]), and whether entropies are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, predictors: Tensor, targets: Tensor, wanted: bool  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = hidden.new_empty(len(targets), dtype=exact), hidden.new_zeros(len(hidden), dtype=exact)
        ctx.kept = []
        for rows, chosen in _chunks(hidden, weight, predictors):
            scores = _scores(hidden[rows], weight, bias)
            logprobs[chosen] = scores[predictors[chosen] - rows.start, targets[chosen]]
            if wanted:
                chances = scores.exp()
                entropy[rows] = -torch.linalg.vecdot(chances, scores)
                if keeps_scores(len(hidden), len(weight)):
                    ctx.kept.append(chances)
        ctx.save_for_backward(hidden, weight, bias, predictors, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, predictors, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        summed = grad.new_zeros(len(hidden)).index_add_(0, predictors, grad)
        for place, (rows, chosen) in enumerate(_chunks(hidden, weight, predictors)):
            chances = ctx.kept[place] if ctx.kept else _scores(hidden[rows], weight, bias).exp_()
            # d log p[y] / d logits = onehot(y) - p
            slopes = chances * -summed[rows, None]
            slopes.index_put_((predictors[chosen] - rows.start, targets[chosen]), grad[chosen], accumulate=True)
            slopes = slopes.to(weight.dtype)
            torch.mm(slopes, weight, out=grad_hidden[rows])
            torch.addmm(grad_weight, slopes.T, hidden[rows], beta=float(place > 0), out=grad_weight)
            if grad_bias is not None:
                grad_bias += slopes.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _scoring(model: PreTrainedModel) -> Callable[[PackedRow, bool], tuple[Tensor, Tensor]]:
    """Return `scored` for `model`; if the model is sharded, the method that gathers its weights for the call."""
    return getattr(model, SCORING, None) or partial(scored, model)


def _chunks(hidden: Tensor, weight: Tensor, predictors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of predicting tokens, with the sampled tokens (i8[n]) that they predict."""
    step = max(1, CHUNK_SCORES // len(weight))
    for start in range(0, len(hidden), step):
        rows = slice(start, min(start + step, len(hidden)))
        yield rows, ((predictors >= rows.start) & (predictors < rows.stop)).nonzero()[:, 0]


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return f4[n, V]: logprobs of every token of the vocabulary."""
    return log_softmax(linear(hidden, weight, bias), -1, dtype=torch.promote_types(hidden.dtype, torch.float32))
