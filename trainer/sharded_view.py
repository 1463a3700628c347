"""A rank's part of the serving view: of each weight the elements that this rank holds, and publishes, itself.

The view of `trainer.serving_view` cut over the ranks of a sharded model. Parts of all ranks together are the whole
view, each element once: a weight sharded over its first dimension is a run of elements on each rank, in checkpoint
coordinates; a weight that every rank holds whole is the first rank's; a tied weight counts once, by its first name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tidemill.kernels.weights.sharded_parts import TensorPart
from tidemill.trainer.serving_view import SERVING_DTYPE, bf16_bits


class PlacementError(ValueError):
    """A weight lies on the ranks in a way that cannot be published from them."""


def local_parts(model: torch.nn.Module, *, first: bool) -> dict[str, TensorPart]:
    """A snapshot of this rank's part of each weight of `model`, in state-dict order, the same on every rank.

    Args:
        first: whether this is the rank that publishes the weights that are not sharded.

    Raises PlacementError for a weight that is sharded over another dimension than its first, or over two dimensions of
    the mesh, and TypeError for a weight that is no floating-point tensor.
    """
    parts: dict[str, TensorPart] = {}
    seen: set[int] = set()
    # keep_vars: tied names then hold the same object, not two views of it.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            parts[name] = _sharded_part(name, tensor) if isinstance(tensor, DTensor) else _whole(name, tensor, first)
    return parts


def _whole(name: str, tensor: torch.Tensor, held: bool) -> TensorPart:
    return _part(name, tensor, 0, tensor if held else tensor.reshape(-1)[:0])


def _sharded_part(name: str, tensor: DTensor) -> TensorPart:
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    dimension = _sharded_dimension(name, tensor.placements)
    local = tensor.to_local()
    if place is None or any(at for d, at in enumerate(place) if d != dimension):
        # A copy of what another rank holds and publishes.
        return _part(name, tensor, 0, local.reshape(-1)[:0])
    if dimension is None:
        return _part(name, tensor, 0, local)
    rows = -(-tensor.shape[0] // mesh.size(dimension))
    first_row = min(place[dimension] * rows, tensor.shape[0])
    return _part(name, tensor, first_row * prod(tensor.shape[1:]), local)


def _sharded_dimension(name: str, placements: Sequence[Placement]) -> int | None:
    """The mesh dimension over which the tensor's first dimension is sharded; None where it is sharded over none."""
    sharded = [d for d, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    # Subclasses of Shard lay rows out in another order.
    if len(sharded) > 1 or any(type(placements[d]) is not Shard or not placements[d].is_shard(0) for d in sharded):
        raise PlacementError(
            f"{name} is placed as {tuple(placements)}: only weights sharded over their first dimension, by one "
            "dimension of the mesh, can be published from their ranks"
        )
    return sharded[0] if sharded else None


def _part(name: str, whole: torch.Tensor, start: int, local: torch.Tensor) -> TensorPart:
    return TensorPart(name, SERVING_DTYPE, tuple(whole.shape), start, bf16_bits(name, local).reshape(-1))
