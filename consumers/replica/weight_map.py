"""The place of each checkpoint element in one rank of the live engine, recorded from the model's own loader.

A serving engine fuses, pads, ties and shards checkpoint tensors. Instead of an own model of this, `record_map` runs the
engine's `load_weights` once on meta tensors (no memory) and records each copy that it would make. Invariants:

- an element of a checkpoint tensor has at most one place in the rank, otherwise the map is refused;
  `ranks.RankCoverage` checks that the ranks together hold every element;
- every parameter of the rank is loaded from the checkpoint (except rows and columns that only pad it);
- the engine's type has every value of the checkpoint's type, otherwise the map is refused.

If the engine reorders a loaded parameter (`cpu_layers`), the order is part of the place. Bits are the checkpoint's own
patterns; an fp32 engine holds bf16 bits in the upper half of each element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidemill.consumers.replica.places import Box, Layout
from tidemill.kernels.weights.bits import TensorSpec

Indices = npt.NDArray[np.int64]

_SHIFTS = {("bfloat16", "float32"): 16}
"""Bits by which a pattern is shifted up to get the same value in a wider type."""


class UnsupportedModelError(ValueError):
    """Error for an engine whose form of the weights this replica cannot write or read back exactly."""


def record_map(
    model: torch.nn.Module, tensors: Sequence[TensorSpec], orders: Mapping[str, Indices]
) -> dict[str, Layout]:
    """Map this rank's elements of each checkpoint tensor to a parameter of the model.

    Args:
        model: the engine's model, whose `load_weights` takes an iterable of (name, tensor).
        tensors: every tensor of the checkpoint.
        orders: parameters that the engine reordered after loading, from `cpu_layers.orders_of_experts`.

    Raises:
        UnsupportedModelError: a weight is packed into a private copy, or in an unknown order, or in a type that lacks
            some values; or a tensor has no name in the engine, or a parameter none in the checkpoint.
    """
    parameters, owners = dict(model.named_parameters()), dict[int, str]()
    for name, parameter in parameters.items():
        if parameter.numel() == 0:
            raise UnsupportedModelError(f"the engine packed {name} out of reach: weight packing must stay off")
        owners.setdefault(parameter.untyped_storage().data_ptr(), name)
    layouts: dict[str, Layout] = {}
    for spec in tensors:
        copies = _record_copies(model, spec, owners)
        found = sorted({parameter for parameter, _, _ in copies})
        if len(found) > 1:
            raise UnsupportedModelError(
                f"{spec.name} lies in {len(found)} of the engine's parameters: {', '.join(found)}"
            )
        owner = found[0] if found else ""
        held = str(parameters[owner].dtype).removeprefix("torch.") if owner else spec.dtype
        if held != spec.dtype and (spec.dtype, held) not in _SHIFTS:
            raise UnsupportedModelError(
                f"{spec.name} is {spec.dtype}, the engine holds it as {held} in {owner}, which is another value for "
                "some patterns: serve bfloat16 tensors in a float32 engine, or every tensor in the engine's own dtype"
            )
        boxes = sorted((_box_of(spec, *copy) for copy in copies if copy[1].numel()), key=lambda box: box.source)
        for before, box in pairwise(boxes):
            if box.source < before.end:
                raise UnsupportedModelError(f"elements of {spec.name} from {box.source} lie in two places: not mapped")
        layouts[spec.name] = Layout.of(owner, boxes, orders.get(owner), _SHIFTS.get((spec.dtype, held), 0))
    unfed = sorted(set(owners.values()) - {layout.parameter for layout in layouts.values() if layout.boxes})
    if unfed:
        raise UnsupportedModelError(f"the checkpoint names no tensor for the engine's {', '.join(unfed)}")
    return layouts


def _record_copies(
    model: torch.nn.Module, spec: TensorSpec, owners: Mapping[int, str]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Record each copy of the loader: the parameter, its part to write, and the part of the tensor to read."""
    source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    storage = source.untyped_storage()._cdata
    original = torch.Tensor.copy_
    copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def spy(target: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if value.device.type != "meta":
            return original(target, value, non_blocking)
        if value.untyped_storage()._cdata != storage or value.shape != target.shape:
            raise UnsupportedModelError(f"the engine's loader changes the values or shape of {spec.name}")
        owner = owners.get(target.untyped_storage().data_ptr())
        if owner is None:
            raise UnsupportedModelError(f"the engine's loader writes {spec.name} to no parameter of the model")
        copies.append((owner, target.detach(), value))
        return target

    loader: Any = model  # vLLM's models share no base class
    torch.Tensor.copy_ = spy  # type: ignore[method-assign, assignment]
    try:
        loader.load_weights([(spec.name, source)])
    except UnsupportedModelError:
        raise
    except (KeyError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"the engine has no place for checkpoint tensor {spec.name}: {error}") from error
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
    return copies


def _box_of(spec: TensorSpec, parameter: str, target: torch.Tensor, value: torch.Tensor) -> Box:
    axes: list[tuple[int, int, int]] = []
    for size, pitch, step in zip(target.shape, value.stride(), target.stride(), strict=True):
        outer = axes[-1] if axes else (1, 0, 0)
        if axes and outer[1:] == (pitch * size, step * size):
            axes[-1] = (outer[0] * size, pitch, step)
        elif size > 1:
            # The stride of an axis of size 1 is never used.
            axes.append((size, pitch, step))
    row = axes.pop()[0] if axes and axes[-1][1:] == (1, 1) else 1
    rows, pitch, step = axes.pop() if axes else (1, row, row)
    if axes or min(pitch, step) < row:
        raise UnsupportedModelError(f"{spec.name} lies in {parameter} with gaps or in another order: not mapped")
    return Box(int(value.storage_offset()), int(target.storage_offset()), rows, row, pitch, step)
