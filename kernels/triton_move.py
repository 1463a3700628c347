"""Gather and scatter of bit patterns on a GPU, by flat index."""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]

from tidemill.kernels.tensor_rows import check_places, check_type, flat_patterns, flat_row
from tidemill.kernels.triton_runtime import kernel, tiles

TILE = 1024


@kernel
def gather_patterns(
    bits_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    taken_pointer: tl.tensor,
    n: tl.int64,
    n_bits: tl.int64,
    TILE: tl.constexpr,
) -> None:
    """taken[k] = bits[indices[k]] for k < n; 0 for an index outside the tensor."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    held = inside & (index >= 0) & (index < n_bits)
    tl.store(taken_pointer + at, tl.load(bits_pointer + index, mask=held, other=0), mask=inside)


@kernel
def scatter_patterns(
    bits_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    new_pointer: tl.tensor,
    n: tl.int64,
    n_bits: tl.int64,
    TILE: tl.constexpr,
) -> None:
    """bits[indices[k]] = new[k] for k < n; an index outside the tensor writes nothing."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    held = inside & (index >= 0) & (index < n_bits)
    tl.store(bits_pointer + index, tl.load(new_pointer + at, mask=inside, other=0), mask=held)


def take(bits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The patterns (uN[n]) of `bits`, contiguous, at `indices` (i8[n])."""
    flat, places = flat_patterns(bits), flat_row(indices)
    taken = torch.empty(places.numel(), dtype=flat.dtype, device=flat.device)
    check_places(places, taken)
    if taken.numel():
        gather_patterns[(tiles(taken.numel(), TILE),)](flat, places, taken, taken.numel(), flat.numel(), TILE=TILE)
    return taken


def scatter(bits: torch.Tensor, indices: torch.Tensor, new_at: torch.Tensor) -> None:
    """Write `new_at` (uN[n]) into `bits`, contiguous, at `indices` (i8[n], each once), in place."""
    flat, places, new = flat_patterns(bits), flat_row(indices), flat_patterns(new_at)
    check_places(places, new)
    check_type(flat, new)
    if new.numel():
        scatter_patterns[(tiles(new.numel(), TILE),)](flat, places, new, new.numel(), flat.numel(), TILE=TILE)
