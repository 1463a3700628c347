"""The serving view: the bf16 values that replicas serve, as bit patterns in checkpoint coordinates.

A view names each weight once, by the model's own state-dict name, in the order of the state dict. A tied weight has
the first of its names in the model (`model.embed_tokens.weight`, not `lm_head.weight`), as in a Hugging
Face checkpoint. A view is a snapshot: later optimizer steps do not change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from tidemill.kernels.backend import HOST_DEVICE

SERVING_DTYPE = "bfloat16"

ServingView = Mapping[str, npt.NDArray[np.uint16]]
"""State-dict name -> u2 bit patterns, in the tensor's shape."""


def serving_view(model: torch.nn.Module) -> dict[str, npt.NDArray[np.uint16]]:
    """Return a snapshot of `model`'s weights in bf16 (to nearest, ties to even); if it is sharded, on every rank.

    Raises TypeError for a weight that is not a floating-point tensor.
    """
    return {name: bf16_bits(name, tensor) for name, tensor in named_weights(model)}


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of `model`, each once, by the first of its names, in state-dict order."""
    seen: set[int] = set()
    # keep_vars: tied names then refer to the same object, not to two views.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def quantised_weights(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the weights that are stored in a format of few bits: those of linear layers and experts.

    Weights of the head, routers and gates are not included; routers and gates choose among few and are small. Raises
    ValueError for a model without such weights.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head, found = get_head() if get_head else None, set()
    for prefix, module in model.named_modules():
        linear = isinstance(module, torch.nn.Linear) and module is not head and not prefix.endswith(("gate", "router"))
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # Experts are a stack of matrices.
            if (linear and parameter.dim() == 2) or parameter.dim() == 3:
                found.add(name)
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear weights: set trainer.serving_format to bf16")
    return frozenset(found)


def bf16_bits(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Return a copy like `bf16_copy`, as bit patterns in the CPU's memory."""
    bits: npt.NDArray[np.uint16] = bf16_copy(name, tensor, HOST_DEVICE).view(torch.int16).numpy().view(np.uint16)
    return bits


def bf16_copy(name: str, tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return a contiguous bf16 copy of a floating-point tensor, in its shape. Raises TypeError for another type."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {tensor.dtype}: only floating-point weights can be served as {SERVING_DTYPE}")
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to(device, torch.bfloat16, copy=True).contiguous()
