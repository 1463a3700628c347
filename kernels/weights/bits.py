"""Weights as bit patterns: what a version is made of, in any form in which the trainer keeps them.

A weight has one of the element types that a delta can carry (`kernels.elements`), and keeps it: nothing is rounded on
the way. Tensors of several types make up one version, such as fp8 matrices beside fp32 norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tidemill.kernels.elements import BY_NAME, flat_row
from tidemill.kernels.fingerprint import ZERO, Bits, Fingerprint
from tidemill.schemas.records import TensorInfo

PLAIN = {np.dtype(np.uint16): "bfloat16", np.dtype(np.uint32): "float32"}
"""The element type of a plain array of bit patterns; one byte a pattern could be several types, so it has none."""


class Weight(NamedTuple):
    """One tensor as bit patterns, in the shape that it has in the checkpoint (packed int4: that of its bytes)."""

    dtype: str
    """Name of the element type, for instance "bfloat16"."""
    bits: Bits
    """uN, any shape."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor: name, shape, dtype by its torch name (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


WeightLike = torch.Tensor | Bits | Weight
"""A tensor as a trainer may hand it over; a plain u2 array stands for bfloat16, a plain u4 array for float32."""


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    """The element type of a tensor. Raises TypeError for one that a version cannot carry."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        raise TypeError(f"{name} is {tensor.dtype}; a version can carry {', '.join(BY_NAME)}")
    return dtype


def as_weight(name: str, value: WeightLike) -> Weight:
    """`value` as bit patterns on the CPU: a view of its memory where that is possible, not a copy.

    Raises TypeError for a type that a version cannot carry; the message says what can be done.
    """
    if isinstance(value, torch.Tensor):
        dtype = dtype_of(name, value)
        # numpy knows none of the small float types: it sees patterns of the same width.
        bits: Bits = flat_row(value.detach().to("cpu").contiguous()).numpy()
        return Weight(dtype, bits.reshape(value.shape))
    if isinstance(value, Weight):
        if value.dtype not in BY_NAME:
            raise TypeError(f"{name} is {value.dtype!r}; a version can carry {', '.join(BY_NAME)}")
        if value.bits.dtype != BY_NAME[value.dtype].bits:
            expected = BY_NAME[value.dtype].bits
            raise TypeError(f"{name}: {value.dtype} has patterns of {expected}, not {value.bits.dtype}")
        return value
    if value.dtype not in PLAIN:
        raise TypeError(f'{name}: an array of {value.dtype} does not say what it holds: give Weight("int8", bits)')
    return Weight(PLAIN[value.dtype], value)


def total_fingerprint(tensors: Iterable[TensorInfo]) -> Fingerprint:
    """Fingerprint of a whole version: the sum of its tensors' fingerprints."""
    return sum((Fingerprint.from_hex(tensor.fingerprint) for tensor in tensors), ZERO)
