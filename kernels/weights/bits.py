"""Weights as bit patterns: the content of a version, in any form in which the trainer keeps them.

A weight has one of the element types that a delta can carry (`kernels.elements`) and keeps it: nothing is rounded.
A version may contain tensors of several types, for instance fp8 matrices and fp32 norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tidemill.kernels.compiled import Bits
from tidemill.kernels.elements import BY_NAME, flat_row
from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.schemas.records import TensorInfo

if TYPE_CHECKING:  # a trainer that passes arrays need not load torch, which takes three seconds
    import torch

PLAIN = {np.dtype(np.uint16): "bfloat16", np.dtype(np.uint32): "float32"}
"""Element type of a plain array of bit patterns. Patterns of one byte could be of several types, so they have none."""


class Weight(NamedTuple):
    """One tensor as bit patterns, in its shape in the checkpoint (packed int4: the shape of its bytes)."""

    dtype: str
    """Name of the element type, for instance "bfloat16"."""
    bits: Bits
    """uN, any shape."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (torch name, `bfloat16`) of a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


WeightLike: TypeAlias = "torch.Tensor | Bits | Weight"
"""A tensor in a form that a trainer may pass; a plain u2 array means bfloat16, a plain u4 array float32."""


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    """Return the element type of a tensor. Raises TypeError for a type that a version cannot carry."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        raise TypeError(f"{name} is {tensor.dtype}; a version can carry {', '.join(BY_NAME)}")
    return dtype


def as_weight(name: str, value: WeightLike) -> Weight:
    """Return `value` as bit patterns on the CPU: a view of its memory if possible, otherwise a copy.

    Raises TypeError for a type that a version cannot carry; the message names a remedy.
    """
    if isinstance(value, Weight):
        if value.dtype not in BY_NAME:
            raise TypeError(f"{name} is {value.dtype!r}; a version can carry {', '.join(BY_NAME)}")
        if value.bits.dtype != BY_NAME[value.dtype].bits:
            expected = BY_NAME[value.dtype].bits
            raise TypeError(f"{name}: {value.dtype} has patterns of {expected}, not {value.bits.dtype}")
        return value
    if isinstance(value, np.ndarray):
        if value.dtype not in PLAIN:
            raise TypeError(f'{name}: an array of {value.dtype} has no element type: give Weight("int8", bits)')
        return Weight(PLAIN[value.dtype], value)
    dtype = dtype_of(name, value)
    # numpy has no small float types: it gets patterns of the same width.
    bits: Bits = flat_row(value.detach().to("cpu").contiguous()).numpy()
    return Weight(dtype, bits.reshape(value.shape))


def total_fingerprint(tensors: Iterable[TensorInfo]) -> Fingerprint:
    """Return the fingerprint of a whole version: the sum of its tensors' fingerprints."""
    return sum((Fingerprint.from_hex(tensor.fingerprint) for tensor in tensors), ZERO)
