"""Rounded inputs of the engine's linear layers and experts on a CPU (`Manifest.serving_activations`).

The layers are those with quantised weights: all linear layers but those that choose among experts
(`kernels.quantise.CHOOSERS`), and experts; not the head. A row is a token and is rounded by itself, so that nothing
depends on the rest of a batch. If a rank has only a part of each row, all ranks gather the rows: a scale may span them.

Experts are computed by plain products, with their weights in the checkpoint's order: vLLM's kernel for CPUs does not
show the input of the second product. The trainer rounds at the same places (`trainer/activations.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from tidemill.consumers.replica.environment import ACTIVATIONS_VARIABLE
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.quantise import CHOOSERS, ROW_FORMATS, BlockFormat, round_rows

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps x [..., k], weight [n, k] and bias [n] to [..., n]."""
_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)


def activation_format() -> BlockFormat | None:
    """Return the format to which this process's engine rounds its inputs; None for none."""
    return ROW_FORMATS.get(os.environ.get(ACTIVATIONS_VARIABLE, ""))


def product_of(layer: torch.nn.Module, product: Product) -> Product:
    """Return `product`, with rounded inputs if those of a linear layer are to be rounded."""
    form = activation_format()
    if form is None or not _is_rounded(layer):
        return product
    divided = isinstance(layer, RowParallelLinear) and layer.tp_size > 1
    return partial(_rounded_product, product, _round_parts if divided else round_rows, form)


def require_rounding_layers(model: torch.nn.Module) -> None:
    """Raise UnsupportedModelError if the engine rounds its inputs, and a layer computes in a way that cannot."""
    if activation_format() is None:
        return
    for name, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            experts = kernel.fused_experts
            able = isinstance(experts, CPUUnquantizedExperts) and experts.moe_config.activation in _ACTIVATIONS
        else:
            computed = getattr(layer, "cpu_linear", None)
            able = not _is_rounded(layer) or (isinstance(computed, partial) and computed.func is _rounded_product)
        if not able:
            raise UnsupportedModelError(
                f"trainer.serving_activations: {name} ({type(layer).__name__}) has no form with rounded inputs on a "
                "CPU; train a new run with it set to none"
            )


def apply_rounded(experts: CPUUnquantizedExperts, form: BlockFormat, product: Product, given: dict[str, Any]) -> None:
    """Run the experts' `apply`, whose arguments are `given`, with the inputs of both products rounded."""
    ids, first, second = given["topk_ids"].to(torch.int64), given["w1"], given["w2"]
    tokens, chosen = ids.shape
    # Pairs of a token and one of its experts, ordered by expert.
    expert_of, order = ids.reshape(-1).sort(stable=True)
    bounds = [0, *accumulate(torch.bincount(expert_of, minlength=len(first)).tolist())]
    pieces = [(expert, slice(a, b)) for expert, (a, b) in enumerate(pairwise(bounds)) if a < b]
    rows = round_rows(given["hidden_states"], form)[order // chosen]
    inner = rows.new_empty(len(rows), second.shape[-1])
    for expert, piece in pieces:
        made = product(rows[piece], first[expert], _of(experts.w1_bias, expert))
        apply_moe_activation(given["activation"], inner[piece], made)
    divided = experts.moe_config.moe_parallel_config.tp_size > 1
    inner = _round_parts(inner, form) if divided else round_rows(inner, form)
    found = rows.new_empty(len(rows), second.shape[1], dtype=torch.float32)
    for expert, piece in pieces:
        found[order[piece]] = product(inner[piece], second[expert], _of(experts.w2_bias, expert)).float()
    summed = found.view(tokens, chosen, -1)
    if not given["apply_router_weight_on_input"]:
        summed = summed * given["topk_weights"].float()[..., None]
    given["output"].copy_(summed.sum(1))


def _is_rounded(layer: torch.nn.Module) -> bool:
    return isinstance(layer, LinearBase) and not layer.prefix.endswith(CHOOSERS)


def _rounded_product(
    product: Product,
    rounding: Callable[[Tensor, BlockFormat], Tensor],
    form: BlockFormat,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return product(rounding(x, form), weight, bias)


def _round_parts(x: Tensor, form: BlockFormat) -> Tensor:
    """Round rows of which this rank has the columns `x`, and the ranks before and after it the others."""
    whole: Tensor = round_rows(tensor_model_parallel_all_gather(x, -1), form)
    own: Tensor = whole.chunk(whole.shape[-1] // x.shape[-1], -1)[get_tensor_model_parallel_rank()]
    return own.contiguous()


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
