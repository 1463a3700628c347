"""The experts of a CPU engine: the order in which it keeps their weights, which of them a rank multiplies by, how
tokens get to those of other engine cores, and to which of them each token was sent.

vLLM's grouped product on a CPU reads each expert's matrix in an order of its own, which it makes once at load; a weight
that is written in the checkpoint's order afterwards would silently be another weight. The order depends only on the
matrix's shape, its dtype and the instruction set: it is found by packing a matrix whose elements number themselves.
Keeps true: what is returned is a permutation of an expert's elements, checked element by element.

vLLM's own flag for the experts of a token needs Triton. Here each router tells the ids of the tokens that it computes,
and they are kept under the slots of the KV cache into which those tokens' keys and values go. A request reads them from
its blocks when it has ended. So a prefix that was found in the cache has the ids of its computation, whichever request
that was; a prompt computed in pieces has those of every piece; and where a version came in the middle, each token has
the ids of the version that computed its keys and values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from tidemill.consumers.replica.weight_map import Indices, UnsupportedModelError
from tidemill.schemas.expert_ids import ExpertIds

_PACKED = ("w13_weight", "w2_weight")
_AS_LOADED = "TritonExperts"
"""vLLM's experts for GPUs that lie in the checkpoint's order; by name, because a CPU need not import their kernels."""
_DIGIT = 7
"""Bits of a number that are packed at once: bf16 holds the integers below 2**8 exactly."""


def orders_of_experts(model: torch.nn.Module) -> dict[str, Indices]:
    """Parameter name -> i8[elements of an expert]: the place within an expert of each element, by its loaded place.

    Raises:
        UnsupportedModelError: the model has experts that no known kernel multiplies by.
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
            if kind != _AS_LOADED and not experts._use_zentorch:
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
    """Where the packing for `isa` puts each element of a matrix, i8[rows * columns].

    Raises:
        UnsupportedModelError: the packing is no permutation of the matrix.
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
    """vLLM's `apply` on a rank that holds whole experts, and not all of them (`replica.expert_parallel`).

    vLLM's products for CPUs take the ids of a token's experts in the model for those on the rank. Here an expert that
    another rank holds has weight 0, so that the sum over the ranks has each expert of a token once.
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
    _vllm_apply(experts, **given)


def gather_rows(group: CpuCommunicator, given: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Give each tensor the rows of every rank, `sizes` of them: tokens on their way to experts of other engine cores.

    vLLM's communicator for CPUs has neither this (`all_gatherv`, in dimension 0) nor the way back.
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
    """Sum over the ranks and keep this rank's rows (`reduce_scatterv`): the way back of `gather_rows`."""
    summed = given.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(summed, group=group.device_group)
    rank = group.rank_in_group
    return summed.narrow(dim, sum(sizes[:rank]), sizes[rank])


_vllm_apply = CPUUnquantizedExperts.apply


class ExpertCapture:
    """The expert ids of every token in the KV cache of one rank.

    Args:
        runner: vLLM's model runner (V1).

    Raises UnsupportedModelError for a model without experts, with routers that tell no ids, or with several KV caches.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM is read without its types
        model, caches = runner.model_config, runner.kv_cache_config.kv_cache_groups
        experts = model.get_num_experts()
        if not experts:
            raise UnsupportedModelError("replica.expert_ids: the model has no experts; set it to false")
        if runner.parallel_config.data_parallel_size > 1:
            raise UnsupportedModelError(
                "replica.expert_ids: with replica.data_parallel a CPU engine also computes tokens of other engines; "
                "set one of the two"
            )
        if len(caches) != 1:
            raise UnsupportedModelError(
                f"replica.expert_ids: the layers keep {len(caches)} kinds of KV cache, and the ids go with one; set it "
                "to false"
            )
        self._runner = runner
        self._block = int(caches[0].kv_cache_spec.block_size)
        # One more for tokens that have no slot (-1), which pad a batch.
        slots = runner.kv_cache_config.num_blocks * self._block + 1
        shape = (slots, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self._ids = np.zeros(shape, np.uint8 if experts <= 256 else np.uint16)
        try:
            bind_routed_experts_capturer(runner.model, self)
        except ValueError as error:
            raise UnsupportedModelError(f"replica.expert_ids: {error}") from error

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep the ids [tokens, top_k] of a layer for the tokens that are being computed; vLLM's routers call it."""
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[: len(topk_ids)]
        self._ids[slots.numpy(), layer_id] = topk_ids.numpy()

    def ids_of(self, request_id: str) -> ExpertIds:
        """The ids of all tokens but the last of a request that has ended, from `routed_experts_prompt_start` on.

        To be asked for between the engine step that ended the request and the next one. Raises KeyError later.
        """
        request = self._runner.requests[request_id]
        places = np.arange(request.sampling_params.routed_experts_prompt_start, request.num_tokens - 1)
        blocks = np.array(request.block_ids[0], np.int64)
        found: ExpertIds = self._ids[blocks[places // self._block] * self._block + places % self._block]
        return found
