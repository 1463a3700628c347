"""A PyTorch tensor as a flat row of bit patterns, or of indices, in the memory that it has."""

from __future__ import annotations

import torch

ROW_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}
"""Bytes of an element -> what it is read as. Elements of 8 bytes are indices."""


def flat_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one row of u1, u2, u4 or i8, sharing the tensor's memory.

    Raises ValueError when the tensor is not contiguous, TypeError for elements of another size.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: its patterns are no single row")
    if tensor.element_size() not in ROW_TYPES:
        raise TypeError(f"elements have 1, 2, 4 or 8 bytes, those of {tensor.dtype} {tensor.element_size()}")
    return tensor.detach().view(-1).view(ROW_TYPES[tensor.element_size()])


def flat_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as one row of u1, u2 or u4. Raises like `flat_row`, and TypeError for elements of 8 bytes."""
    if tensor.element_size() > 4:
        raise TypeError(f"bit patterns have 1, 2 or 4 bytes, {tensor.dtype} has {tensor.element_size()}")
    return flat_row(tensor)


def check_rows(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise ValueError unless two rows have one length, one type and one device."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        raise ValueError(
            f"{first.dtype}{list(first.shape)} on {first.device} does not fit "
            f"{second.dtype}{list(second.shape)} on {second.device}"
        )


def check_places(indices: torch.Tensor, patterns: torch.Tensor) -> None:
    """Raise ValueError unless `indices` (i8[k]) is a row of as many places as `patterns` has, on its device."""
    if indices.dtype != torch.int64 or indices.shape != patterns.shape or indices.device != patterns.device:
        raise ValueError(
            f"{list(indices.shape)} indices ({indices.dtype}) on {indices.device} "
            f"for {list(patterns.shape)} patterns on {patterns.device}"
        )


def check_type(bits: torch.Tensor, patterns: torch.Tensor) -> None:
    """Raise ValueError unless two rows have one type and one device."""
    if bits.dtype != patterns.dtype or bits.device != patterns.device:
        raise ValueError(f"{patterns.dtype} on {patterns.device} for {bits.dtype} on {bits.device}")
