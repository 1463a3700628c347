"""The order in which a CPU engine keeps the weights of a mixture of experts, learned from its own packing.

vLLM's grouped product on a CPU reads each expert's matrix in an order of its own, which it makes once at load; a weight
that is written in the checkpoint's order afterwards would silently be another weight. The order depends only on the
matrix's shape, its dtype and the instruction set: it is found by packing a matrix whose elements number themselves.

Keeps true: what is returned is a permutation of an expert's elements, checked element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tidemill.consumers.replica.weight_map import Indices, UnsupportedModelError

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
    for prefix, experts, layer in _expert_layers(model):
        kind = type(experts).__name__
        if kind != _AS_LOADED and not isinstance(experts, CPUUnquantizedExperts):
            raise UnsupportedModelError(
                f"{prefix} keeps its experts in the order of {kind}, which is not known: on a GPU set "
                '`moe-backend = "triton"` in replica.vllm_args'
            )
        for name in _PACKED:
            known.add(f"{prefix}.{name}")
            if kind != _AS_LOADED and not experts._use_zentorch:
                orders[f"{prefix}.{name}"] = _order_of(getattr(layer, name), experts.isa)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2 and name not in known:
            raise UnsupportedModelError(f"parameter {name} holds experts whose kernel is not known: not mapped")
    return orders


def _expert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any, torch.nn.Module]]:
    for prefix, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            yield prefix, kernel.fused_experts, layer


def _order_of(weight: torch.Tensor, isa: str) -> Indices:
    if not weight.is_contiguous() or weight.storage_offset():
        raise UnsupportedModelError(f"experts of shape {tuple(weight.shape)} are a view of something else: not mapped")
    return packed_order(weight.shape[1], weight.shape[2], weight.dtype, isa)


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
