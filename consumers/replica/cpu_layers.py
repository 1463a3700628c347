"""Replacements for layers of vLLM's CPU engine that a replica cannot use: experts of a mixture, and attention.

vLLM's grouped product on a CPU reads each expert's matrix in its own order, to which it packs the matrix once at load;
a weight that is written later in the checkpoint's order would silently be another weight. The order depends only on the
matrix's shape, its dtype and the instruction set: it is found by packing a matrix whose elements are their own numbers.
Invariant: the returned order is a permutation of an expert's elements, checked element by element.

With `replica.batch_invariant` a token's result does not depend on the rest of the batch. On a GPU vLLM has this option.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from tidemill.consumers.replica.activations import activation_format, apply_rounded
from tidemill.consumers.replica.plugin import plain_product
from tidemill.consumers.replica.weight_map import Indices, UnsupportedModelError

_PACKED = ("w13_weight", "w2_weight")
_AS_LOADED = "TritonExperts"
"""vLLM's experts for GPUs that keep the checkpoint's order; by name, because a CPU need not import their kernels."""
_DIGIT = 7
"""Bits of a number that are packed in one pass: bf16 holds the integers below 2**8 exactly."""


def orders_of_experts(model: torch.nn.Module) -> dict[str, Indices]:
    """Return for each reordered parameter i8[elements of an expert]: an element's place in its expert, by loaded place.

    Raises:
        UnsupportedModelError: the model has experts of an unknown kernel.
    """
    orders: dict[str, Indices] = {}
    known: set[str] = set()
    for prefix, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        experts = kernel.fused_experts
        kind = type(experts).__name__
        if kind != _AS_LOADED and not isinstance(experts, CPUUnquantizedExperts):
            raise UnsupportedModelError(
                f"{prefix} keeps its experts in the order of {kind}, which is not known: on a GPU set "
                '`moe-backend = "triton"` in replica.vllm_args'
            )
        for name in _PACKED:
            known.add(f"{prefix}.{name}")
            if kind != _AS_LOADED and not experts._use_zentorch and activation_format() is None:
                weight = getattr(layer, name)
                if not weight.is_contiguous() or weight.storage_offset():
                    raise UnsupportedModelError(
                        f"experts of shape {tuple(weight.shape)} are a view of something else: not mapped"
                    )
                orders[f"{prefix}.{name}"] = packed_order(weight.shape[1], weight.shape[2], weight.dtype, experts.isa)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2 and name not in known:
            raise UnsupportedModelError(f"parameter {name} holds experts whose kernel is not known: not mapped")
    return orders


@lru_cache(maxsize=8)
def packed_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Indices:
    """Return the place of each element of a matrix after packing for `isa`, i8[rows * columns].

    Raises:
        UnsupportedModelError: the packing is not a permutation of the matrix.
    """
    size = rows * columns
    numbers = torch.arange(size)
    found = torch.zeros(size, dtype=torch.int64)
    for low in range(0, max(size - 1, 1).bit_length(), _DIGIT):
        digit = ((numbers >> low) & ((1 << _DIGIT) - 1)).to(dtype).view(1, rows, columns)
        found |= cpu_prepack_moe_weight(digit, isa).view(-1).to(torch.int64) << low
    order = np.full(size, -1, dtype=np.int64)
    inside = found.numpy()[(found.numpy() >= 0) & (found.numpy() < size)]
    order[inside] = np.arange(size)[: inside.size]
    if inside.size != size or order.min(initial=0) < 0:
        raise UnsupportedModelError(
            f"packing a {rows} x {columns} {dtype} matrix for {isa!r} loses elements: not mapped"
        )
    return order


def apply_held(experts: CPUUnquantizedExperts, /, **given: Any) -> None:  # noqa: ANN401 - vLLM's own arguments
    """Run vLLM's `apply` on a rank that holds some of the experts, each whole (`replica.expert_parallel`).

    vLLM's products for CPUs use a token's expert ids in the model as ids on the rank. This function converts them and
    gives experts on other ranks weight 0, so that the sum over the ranks contains each expert of a token once.
    """
    if (held := given["expert_map"]) is not None:
        if given["apply_router_weight_on_input"]:
            raise UnsupportedModelError(
                "replica.expert_parallel: this model weighs the input of its experts, which a CPU engine cannot do for "
                "experts of other ranks; set replica.tensor_parallel alone, which cuts every expert"
            )
        ids = held.to(torch.int64)[given["topk_ids"].to(torch.int64)]
        given["topk_ids"] = ids.clamp(min=0).to(given["topk_ids"].dtype)
        given["topk_weights"] = torch.where(ids < 0, 0.0, given["topk_weights"]).to(given["topk_weights"].dtype)
    if (form := activation_format()) is None:
        _vllm_apply(experts, **given)
    else:
        apply_rounded(experts, form, plain_product(), given)


def pack_held(experts: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    """Pack weights for vLLM's kernel (`process_weights_after_loading`), unless `apply_rounded` replaces the kernel."""
    if activation_format() is None:
        _vllm_pack(experts, layer)


def gather_rows(group: CpuCommunicator, given: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Return each tensor with the rows of every rank (`sizes`), to send tokens to experts of other engine cores.

    vLLM's communicator for CPUs lacks this (`all_gatherv`, in dimension 0) and the inverse.
    """
    gathered = []
    for rows in given:
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group.device_group)
        gathered.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return gathered


def scatter_sums(group: CpuCommunicator, given: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Sum over the ranks and return this rank's rows (`reduce_scatterv`): the inverse of `gather_rows`."""
    summed = given.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(summed, group=group.device_group)
    rank = group.rank_in_group
    return summed.narrow(dim, sum(sizes[:rank]), sizes[rank])


_vllm_apply, _vllm_pack = CPUUnquantizedExperts.apply, CPUUnquantizedExperts.process_weights_after_loading


class TokenwiseBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is read without its types
    """Builder of metadata in which every token is a request with one query.

    vLLM's kernel cuts keys and values into pieces by the number of queries, so that the sums have another order in a
    whole prefill than in a part of it or in decoding. With linear layers in tiles (`linear`), nothing else in a model
    of `Attention` layers depends on the batch: all other layers of vLLM compute each token's row separately.
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,  # noqa: ANN401 - vLLM's type
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Return the metadata of a step with the requests of `common_attn_metadata`."""
        given = common_attn_metadata
        starts = given.query_start_loc[: given.num_reqs + 1].long()
        request = torch.repeat_interleave(torch.arange(given.num_reqs), starts.diff())
        # The last token of a request attends to its whole length, each earlier token to one less.
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
    """vLLM's attention for CPUs, token by token: a token's result does not depend on the rest of the batch."""

    @staticmethod
    def get_builder_cls() -> type[TokenwiseBuilder]:
        return TokenwiseBuilder


def require_tokenwise(model: torch.nn.Module) -> None:
    """Raise UnsupportedModelError if a layer mixes tokens in another way than `TokenwiseAttention`."""
    for name, layer in model.named_modules():
        if not isinstance(layer, AttentionLayerBase):
            continue
        if layer.get_attn_backend() is not TokenwiseAttention or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedModelError(
                f"numerics.batch_invariant: layer {name} ({type(layer).__name__}) has no form on a CPU in which a "
                "token does not depend on its company; set it to false"
            )
