"""Attention of a fixed shape for CPU engines: a token's result does not depend on what is computed beside it.

vLLM's kernel cuts keys and values into pieces by the number of queries that it is given, so that the sums have another
order in a prefill than in a piece of it or in decoding. Here each token is a request of its own, of one query. With
linear layers in tiles (`linear`) nothing else of a model of `Attention` layers depends on the company: all else that
vLLM computes works on a token's row alone. On a GPU vLLM has a switch of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from tidemill.consumers.replica.weight_map import UnsupportedModelError


class TokenwiseBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is read without its types
    """Tells the attention kernel that every token is a request."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,  # noqa: ANN401 - vLLM's type
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """The metadata of a step with the requests of `common_attn_metadata`."""
        given = common_attn_metadata
        starts = given.query_start_loc[: given.num_reqs + 1].long()
        request = torch.repeat_interleave(torch.arange(given.num_reqs), starts.diff())
        # The last token of a request attends to its whole length, each before that to one less.
        after = starts[1:][request] - 1 - torch.arange(len(request))
        tokens = replace(
            given,
            num_reqs=len(request),
            max_query_len=1,
            query_start_loc=torch.arange(len(request) + 1, dtype=given.query_start_loc.dtype),
            seq_lens=(given.seq_lens[request] - after).to(given.seq_lens.dtype),
            block_table_tensor=given.block_table_tensor[request],
        )
        return super().build(common_prefix_len, tokens, fast_build)


class TokenwiseAttention(CPUAttentionBackend):  # type: ignore[misc]  # vLLM is read without its types
    """vLLM's attention for CPUs, token by token."""

    @staticmethod
    def get_builder_cls() -> type[TokenwiseBuilder]:
        """The class that prepares a step."""
        return TokenwiseBuilder


def require_tokenwise(model: torch.nn.Module) -> None:
    """Raise UnsupportedModelError for a layer that mixes tokens in another way than `TokenwiseAttention`."""
    for name, layer in model.named_modules():
        if not isinstance(layer, AttentionLayerBase):
            continue
        if layer.get_attn_backend() is not TokenwiseAttention or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedModelError(
                f"numerics.batch_invariant: layer {name} ({type(layer).__name__}) has no form on a CPU in which a "
                "token does not depend on its company; set it to false"
            )
