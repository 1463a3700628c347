"""Block-diagonal causal attention for packed rows.

A row holds many sequences end to end, and a token must see only the earlier tokens of its own sequence. Instead of
masking a square of the whole row, each sequence's block is computed by itself: the cost is that of the unpacked
sequences, and a sequence's result does not depend on what it is packed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

PACKED_ATTENTION = "tidemill_packed"
"""Name under which transformers knows this attention."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sequence_lengths: Sequence[int] = (),
    **_unused: Any,  # noqa: ANN401 - what other attention functions of the interface take
) -> tuple[Tensor, None]:
    """transformers' attention interface: `query` f4[1, heads, L, d] to f4[1, L, heads, d].

    `sequence_lengths` sums to L; empty means one sequence.
    """
    lengths = list(sequence_lengths) or [query.shape[2]]
    grouped = query.shape[1] != key.shape[1]
    blocks = zip(*(torch.split(states, lengths, 2) for states in (query, key, value)), strict=True)
    out = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in blocks
    ]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` take `sequence_lengths`. Raises ValueError for a model with sliding-window layers."""
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise ValueError("packed rows need full causal attention in every layer, and this model has sliding windows")
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
