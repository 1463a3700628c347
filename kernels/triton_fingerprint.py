"""The linear fingerprint of `kernels.fingerprint` on a GPU: of a range, of chosen elements, and of a change of them.

Each program walks over tiles at a fixed stride and keeps both lanes in registers; the sums of all programs are added
at the end. Sums modulo 2**64 do not depend on the order, so neither does the fingerprint. The host waits once, for
them.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]

from tidemill.kernels.fingerprint import MASK, Fingerprint, TensorKey
from tidemill.kernels.tensor_rows import check_places, check_rows, flat_patterns, flat_row
from tidemill.kernels.triton_runtime import kernel, tiles

TILE = 1024
PROGRAMS = 2048
"""Programs of a full grid: several for each processor of any GPU, and few enough to add up their sums."""

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@kernel
def prf(position: tl.tensor) -> tl.tensor:
    """splitmix64's output for a state, u8 -> u8."""
    mixed = (position ^ (position >> 30)) * MIX_1
    mixed = (mixed ^ (mixed >> 27)) * MIX_2
    return mixed ^ (mixed >> 31)


@kernel
def store_sums(sums_pointer: tl.tensor, lo: tl.tensor, hi: tl.tensor) -> None:
    """Leave this program's two sums (of u8[tile] each) in its row of `sums` (i8[programs, 2])."""
    row = sums_pointer + tl.program_id(0) * 2
    tl.store(row, tl.sum(lo, axis=0).to(tl.int64, bitcast=True))
    tl.store(row + 1, tl.sum(hi, axis=0).to(tl.int64, bitcast=True))


@kernel
def sum_range(
    bits_pointer: tl.tensor,
    sums_pointer: tl.tensor,
    n: tl.int64,
    start: tl.int64,
    key_lo: tl.uint64,
    key_hi: tl.uint64,
    TILE: tl.constexpr,
) -> None:
    """Sums over the elements of the tensor's range that begins at `start`: whole tiles first, then the last part."""
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    whole = n // TILE
    index = (start + first * TILE + lanes + 1).to(tl.uint64)
    position, stride = index * GAMMA, (programs * TILE).to(tl.uint64) * GAMMA
    lo = tl.zeros((TILE,), tl.uint64)
    hi = tl.zeros((TILE,), tl.uint64)
    for tile in range(first, whole, programs):
        weight = tl.load(bits_pointer + tile * TILE + lanes).to(tl.uint64) + 1
        lo += prf(position + key_lo.to(tl.uint64)) * weight
        hi += prf(position + key_hi.to(tl.uint64)) * weight
        position += stride
    inside = lanes < n - whole * TILE
    if first == whole % programs:
        position = (start + whole * TILE + lanes + 1).to(tl.uint64) * GAMMA
        weight = tl.load(bits_pointer + whole * TILE + lanes, mask=inside, other=0).to(tl.uint64) + 1
        weight = tl.where(inside, weight, 0)
        lo += prf(position + key_lo.to(tl.uint64)) * weight
        hi += prf(position + key_hi.to(tl.uint64)) * weight
    store_sums(sums_pointer, lo, hi)


@kernel
def sum_chosen(
    indices_pointer: tl.tensor,
    old_pointer: tl.tensor,
    new_pointer: tl.tensor,
    sums_pointer: tl.tensor,
    n: tl.int64,
    key_lo: tl.uint64,
    key_hi: tl.uint64,
    CHANGE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Sums over the `n` elements at `indices`: of new - old with `CHANGE`, of new + 1 without."""
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    lo = tl.zeros((TILE,), tl.uint64)
    hi = tl.zeros((TILE,), tl.uint64)
    for tile in range(first, (n + TILE - 1) // TILE, programs):
        at = tile * TILE + lanes
        inside = at < n
        weight = tl.load(new_pointer + at, mask=inside, other=0).to(tl.uint64)
        if CHANGE:
            weight = weight - tl.load(old_pointer + at, mask=inside, other=0).to(tl.uint64)
        else:
            weight = tl.where(inside, weight + 1, 0)
        index = tl.load(indices_pointer + at, mask=inside, other=0)
        position = (index + 1).to(tl.uint64) * GAMMA
        lo += prf(position + key_lo.to(tl.uint64)) * weight
        hi += prf(position + key_hi.to(tl.uint64)) * weight
    store_sums(sums_pointer, lo, hi)


def fingerprint(bits: torch.Tensor, key: TensorKey, start: int = 0, programs: int = PROGRAMS) -> Fingerprint:
    """Fingerprint of elements [start, start + bits.numel()) of a tensor; `bits` is contiguous."""
    flat = flat_patterns(bits)
    if start < 0:
        raise ValueError(f"start must not be negative, got {start}")
    sums = _sums(flat.numel(), flat.device, programs)
    sum_range[(len(sums),)](flat, sums, flat.numel(), start, key.lo, key.hi, TILE=TILE)
    return _total(sums)


def fingerprint_at(bits: torch.Tensor, key: TensorKey, indices: torch.Tensor) -> Fingerprint:
    """Fingerprint of the elements at `indices` (i8[n], in any order) whose patterns are `bits` (uN[n])."""
    return _chosen(indices, None, bits, key)


def fingerprint_change(
    key: TensorKey, indices: torch.Tensor, old_at: torch.Tensor, new_at: torch.Tensor
) -> Fingerprint:
    """F(new) - F(old) when the elements at `indices` (i8[n]) go from `old_at` to `new_at` (uN[n] each)."""
    return _chosen(indices, old_at, new_at, key)


def _chosen(indices: torch.Tensor, old_at: torch.Tensor | None, new_at: torch.Tensor, key: TensorKey) -> Fingerprint:
    new = flat_patterns(new_at)
    old = new if old_at is None else flat_patterns(old_at)
    places = flat_row(indices)
    check_rows(old, new)
    check_places(places, new)
    sums = _sums(new.numel(), new.device, PROGRAMS)
    sum_chosen[(len(sums),)](places, old, new, sums, new.numel(), key.lo, key.hi, CHANGE=old_at is not None, TILE=TILE)
    return _total(sums)


def _sums(n: int, device: torch.device, programs: int) -> torch.Tensor:
    return torch.empty((max(1, min(programs, tiles(n, TILE))), 2), dtype=torch.int64, device=device)


def _total(sums: torch.Tensor) -> Fingerprint:
    lo, hi = sums.sum(dim=0).tolist()
    return Fingerprint(lo & MASK, hi & MASK)
