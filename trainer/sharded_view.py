"""A rank's part of the serving view: for each weight, the elements that this rank holds and publishes itself.

This is the view of `trainer.serving_view`, divided over the ranks of a sharded model. The parts of all ranks are the
whole view, each element once: a weight sharded over its first dimension is a run of elements on each rank, in
checkpoint coordinates, also with expert parallelism, where two dimensions of the mesh divide it; a weight that every
rank holds whole is published by the first rank; a tied weight counts once, by its first name.
"""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tidemill.kernels.backend import HOST_DEVICE, is_on_host
from tidemill.kernels.elements import flat_row
from tidemill.kernels.weights.tensor_parts import TensorPart
from tidemill.trainer.serving_view import SERVING_DTYPE, bf16_copy, named_weights


class PlacementError(ValueError):
    """The placement of a weight on the ranks does not allow publishing it from them."""


def local_parts(model: torch.nn.Module, *, first: bool, on_device: bool = False) -> dict[str, TensorPart]:
    """Return a snapshot of this rank's part of each weight of `model`, in state-dict order, the same on every rank.

    Args:
        first: whether this is the rank that publishes the weights that are not sharded.
        on_device: keep each part on the device of its weight; otherwise all parts are in the CPU's memory.

    Raises PlacementError for a weight that is sharded over another dimension than its first, and TypeError for a weight
    that is not a floating-point tensor. If a rank's rows of a weight are not consecutive, the publisher raises
    VersionError.
    """
    parts = {}
    for name, tensor in named_weights(model):
        if isinstance(tensor, DTensor):
            start, local = _own_elements(name, tensor)
        else:
            start, local = 0, tensor if first else tensor.reshape(-1)[:0]
        row = flat_row(bf16_copy(name, local, local.device if on_device else HOST_DEVICE))
        bits = row.numpy() if is_on_host(row) else row
        parts[name] = TensorPart(name, SERVING_DTYPE, tuple(tensor.shape), start, bits)
    return parts


def _own_elements(name: str, tensor: DTensor) -> tuple[int, torch.Tensor]:
    """Return the first flat element of a weight that this rank publishes, and the elements. Raises PlacementError."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(p.is_replicate() or (isinstance(p, Shard | _StridedShard) and p.dim == 0) for p in placements):
        raise PlacementError(
            f"{name} is placed as {tuple(placements)}: only weights sharded over their first dimension can be "
            "published from their ranks"
        )
    place, local = mesh.get_coordinate(), tensor.to_local()
    if place is None or any(at and p.is_replicate() for at, p in zip(place, placements, strict=True)):
        # A copy: another rank holds and publishes the same elements.
        return 0, local.reshape(-1)[:0]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise PlacementError(f"{name} has shape {tuple(local.shape)} on this rank, placed as it is it has {shape}")
    # If a rank's rows are not consecutive, they overlap those of another rank: such ranks cannot cover the weight.
    return offset[0] * prod(tensor.shape[1:]) if offset else 0, local
