"""The policy's view of a packed row: logprobs of the sampled tokens, recomputed by the model under training."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.trainer.batch import Row


def sampled_logprobs(model: PreTrainedModel, row: Row) -> tuple[Tensor, Tensor]:
    """Logprob (f4[T], with gradient) of each sampled token of `row`, and the entropy (f4[T], without) there.

    At temperature 1 over the whole vocabulary, in nats. The head runs on the T predicting positions only, so a row's
    token budget also bounds the memory of its logits. `model` must use `attention.PACKED_ATTENTION`.
    """
    out = model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        logits_to_keep=row.predictors,
        sequence_lengths=row.lengths,
        use_cache=False,
    )
    scores = torch.log_softmax(out.logits[0].float(), dim=-1)
    logprobs = scores.gather(1, row.targets[:, None]).squeeze(1)
    return logprobs, _entropy(scores.detach())


def frozen_logprobs(model: PreTrainedModel, row: Row) -> Tensor:
    """f4[T]: like `sampled_logprobs`, without gradient or entropy."""
    with torch.no_grad():
        return sampled_logprobs(model, row)[0]


def _entropy(scores: Tensor) -> Tensor:
    return -(scores.exp() * scores).sum(-1)
