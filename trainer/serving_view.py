"""The serving view: the bf16 values that replicas serve, as bit patterns in checkpoint coordinates.

A view names each weight once, by the model's own state-dict name, in the order of the state dict. A tied weight has
the first of its names in the model (`model.embed_tokens.weight`, not `lm_head.weight`), as in a Hugging
Face checkpoint. A view is a snapshot: later optimizer steps do not change it.

The view of a sharded model is divided over its ranks. The parts of all ranks are the whole view, each element once: a
weight sharded over its first dimension is a run of elements on each rank, in checkpoint coordinates, also with expert
parallelism, where two dimensions of the mesh divide it; a weight that every rank holds whole is published by the first
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tidemill.kernels.backend import HOST_DEVICE, is_on_host
from tidemill.kernels.elements import flat_row
from tidemill.kernels.weights.tensor_parts import TensorPart

SERVING_DTYPE = "bfloat16"

ServingView = Mapping[str, npt.NDArray[np.uint16]]
"""State-dict name -> u2 bit patterns, in the tensor's shape."""


def serving_view(model: torch.nn.Module) -> dict[str, npt.NDArray[np.uint16]]:
    """Return a snapshot of `model`'s weights in bf16 (to nearest, ties to even); if it is sharded, on every rank.

    Raises TypeError for a weight that is not a floating-point tensor.
    """
    view = {}
    for name, tensor in named_weights(model):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        view[name] = _bf16_row(name, whole, HOST_DEVICE).numpy().reshape(tensor.shape)
    return view


def local_parts(model: torch.nn.Module, *, first: bool, on_device: bool = False) -> dict[str, TensorPart]:
    """Return a snapshot of this rank's part of each weight of `model`, in state-dict order, the same on every rank.

    Args:
        first: whether this is the rank that publishes the weights that are not sharded.
        on_device: keep each part on the device of its weight; otherwise all parts are in the CPU's memory.

    Raises ValueError for a weight that is sharded over another dimension than its first, and TypeError for a weight
    that is not a floating-point tensor. If a rank's rows of a weight are not consecutive, the publisher raises
    VersionError.
    """
    parts = {}
    for name, tensor in named_weights(model):
        if isinstance(tensor, DTensor):
            start, local = _own_elements(name, tensor)
        else:
            start, local = 0, tensor if first else tensor.reshape(-1)[:0]
        row = _bf16_row(name, local, local.device if on_device else HOST_DEVICE)
        bits = row.numpy() if is_on_host(row) else row
        parts[name] = TensorPart(name, SERVING_DTYPE, tuple(tensor.shape), start, bits)
    return parts


def _own_elements(name: str, tensor: DTensor) -> tuple[int, torch.Tensor]:
    """Return the first flat element of a weight that this rank publishes, and the elements. Raises ValueError."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(p.is_replicate() or (isinstance(p, Shard | _StridedShard) and p.dim == 0) for p in placements):
        raise ValueError(
            f"{name} is placed as {tuple(placements)}: only weights sharded over their first dimension can be "
            "published from their ranks"
        )
    place, local = mesh.get_coordinate(), tensor.to_local()
    if place is None or any(at and p.is_replicate() for at, p in zip(place, placements, strict=True)):
        # A copy: another rank holds and publishes the same elements.
        return 0, local.reshape(-1)[:0]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(local.shape)} on this rank, placed as it is it has {shape}")
    # If a rank's rows are not consecutive, they overlap those of another rank: such ranks cannot cover the weight.
    return offset[0] * prod(tensor.shape[1:]) if offset else 0, local


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of `model`, each once, by the first of its names, in state-dict order."""
    seen: set[int] = set()
    # keep_vars: tied names then refer to the same object, not to two views.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _bf16_row(name: str, tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return a bf16 copy of a floating-point tensor as one row of bit patterns. Raises TypeError for another type."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {tensor.dtype}: only floating-point weights can be served as {SERVING_DTYPE}")
    row: torch.Tensor = flat_row(tensor.detach().to(device, torch.bfloat16, copy=True).contiguous())
    return row
