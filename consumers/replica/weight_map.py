"""Where each checkpoint element lies in the live engine, recorded from the model's own loader.

A serving engine fuses, pads and ties checkpoint tensors. Instead of guessing how, `record_map` runs the model's own
`load_weights` once on meta tensors (no memory) and notes each copy that it would make. What holds afterwards:

- every element of every checkpoint tensor has exactly one place in the engine, or the map is refused;
- every parameter of the engine is fed by the checkpoint (rows that only pad the vocabulary excepted).

Bits are the checkpoint's: bf16 as u2. An fp32 engine holds bf16 bits in the upper half of each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]


class UnsupportedModelError(ValueError):
    """The engine holds weights in a way that this replica cannot write or read back exactly."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor: name, shape, dtype by its torch name (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [source, source + length) of a tensor lie at [target, target + length) of a parameter's storage."""

    source: int
    length: int
    parameter: str
    target: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy that the loader asked for: where from and where to, in elements and strides."""

    parameter: str
    target: int
    source: int
    shape: tuple[int, ...]
    target_stride: tuple[int, ...]
    source_stride: tuple[int, ...]


def record_map(model: torch.nn.Module, tensors: Sequence[TensorSpec]) -> dict[str, tuple[Run, ...]]:
    """Map each checkpoint tensor to runs of the model's parameters.

    Args:
        model: the engine's model, its `load_weights` taking an iterable of (name, tensor).
        tensors: every tensor of the checkpoint.

    Raises:
        UnsupportedModelError: a weight is packed, permuted or strided, or a tensor or parameter has no counterpart.
    """
    _refuse_experts(model)
    owners = _owners(model)
    runs: dict[str, tuple[Run, ...]] = {}
    for spec in tensors:
        copies = _record_copies(model, spec, owners)
        runs[spec.name] = _runs_of(spec, copies)
    _check_parameters(model, runs)
    return runs


def _refuse_experts(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name or parameter.ndim > 2:
            raise UnsupportedModelError(
                f"parameter {name} holds mixture-of-experts weights, which a CPU engine keeps in a permuted order: "
                "this replica serves dense models only"
            )


def _owners(model: torch.nn.Module) -> dict[int, str]:
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise UnsupportedModelError(f"the engine packed {name} out of reach: weight packing must stay off")
        owners.setdefault(parameter.untyped_storage().data_ptr(), name)
    return owners


@contextmanager
def _copy_spy(spy: Callable[..., torch.Tensor]) -> Iterator[None]:
    original = torch.Tensor.copy_
    torch.Tensor.copy_ = spy  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]


def _record_copies(model: torch.nn.Module, spec: TensorSpec, owners: Mapping[int, str]) -> list[_Copy]:
    source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    storage = source.untyped_storage()._cdata
    original = torch.Tensor.copy_
    copies: list[_Copy] = []

    def spy(target: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if value.device.type != "meta":
            return original(target, value, non_blocking)
        if value.untyped_storage()._cdata != storage or value.shape != target.shape:
            raise UnsupportedModelError(f"the engine's loader changes the values or shape of {spec.name}")
        owner = owners[target.untyped_storage().data_ptr()]
        target_start, source_start = int(target.storage_offset()), int(value.storage_offset())
        strides = (target.stride(), value.stride())
        copies.append(_Copy(owner, target_start, source_start, tuple(target.shape), *strides))
        return target

    with _copy_spy(spy):
        _load_one(model, spec.name, source)
    return copies


def _load_one(model: Any, name: str, tensor: torch.Tensor) -> None:  # noqa: ANN401 - vLLM models share no base class
    try:
        model.load_weights([(name, tensor)])
    except (KeyError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"the engine has no place for checkpoint tensor {name}: {error}") from error


def _runs_of(spec: TensorSpec, copies: Iterable[_Copy]) -> tuple[Run, ...]:
    runs = sorted((_run_of(spec, copy) for copy in copies), key=lambda run: run.source)
    position = 0
    for run in runs:
        if run.source != position:
            raise UnsupportedModelError(f"elements of {spec.name} from {position} lie in two places or in none")
        position += run.length
    if position != spec.n_elements:
        raise UnsupportedModelError(f"the engine takes {position} of the {spec.n_elements} elements of {spec.name}")
    return tuple(runs)


def _run_of(spec: TensorSpec, copy: _Copy) -> Run:
    dense = _dense_stride(copy.shape)
    strides = (copy.target_stride, copy.source_stride)
    if not all(_same_layout(copy.shape, stride, dense) for stride in strides):
        raise UnsupportedModelError(f"{spec.name} lies in {copy.parameter} with gaps or in another order: not mapped")
    return Run(copy.source, int(np.prod(copy.shape, dtype=np.int64)), copy.parameter, copy.target)


def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _same_layout(shape: tuple[int, ...], stride: tuple[int, ...], dense: tuple[int, ...]) -> bool:
    # The stride of a dimension of size 1 is never used.
    return all(size == 1 or a == b for size, a, b in zip(shape, stride, dense, strict=False))


def _check_parameters(model: torch.nn.Module, runs: Mapping[str, tuple[Run, ...]]) -> None:
    fed = {run.parameter for tensor_runs in runs.values() for run in tensor_runs}
    unfed = sorted(set(_owners(model).values()) - fed)
    if unfed:
        raise UnsupportedModelError(f"the checkpoint names no tensor for the engine's {', '.join(unfed)}")
