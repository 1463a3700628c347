"""Kernels on a GPU over rows of bit patterns: compare and compact, gather, the linear fingerprint.

Kernels are compiled for the GPU that holds their tensors, or run by Triton's interpreter on the CPU if
TRITON_INTERPRET=1 was set before triton was first imported. Invariants of every kernel, also in the other modules:

- integers only, no atomics, disjoint stores: the bytes do not depend on the schedule, the tile size or the GPU;
- offsets of whole tiles are 64-bit, offsets within a tile 32-bit: tensors of more than 2**31 elements are in bounds;
- whole tiles are read without a mask, so that loads are vectorised for any length; only the last one has a mask.

The comparison has two passes. The first reads both tensors once and writes one bit per element and a count per tile; a
scan of the counts gives the position at which each tile's indices begin; the second reads only the bits and writes the
indices. The host waits only for the number of changed elements.

In the fingerprint (`kernels.fingerprint`) each program processes tiles at a fixed stride and keeps both lanes in
registers; the sums of all programs are added at the end. Sums modulo 2**64 do not depend on the order, so the
fingerprint does not either. The host waits once, for these sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tidemill.kernels.elements import flat_row
from tidemill.kernels.fingerprint import MASK, Fingerprint, TensorKey

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors, instead of being compiled for a GPU."""


Kernel = Any
"""A Triton kernel: `kernel[grid](...)` runs one program for each point of the grid. Within another kernel it is a
device function, with Triton values as arguments and result."""


def kernel(function: Callable[..., Any]) -> Kernel:
    """Apply `triton.jit`, typed.

    Scalars named `start`, `n`, `n_*` or `key_*` differ from call to call. By default Triton compiles a kernel again if
    such a number is 1 or divisible by 16; these are excluded, so that a new length does not wait for the compiler.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    varying = [name for name in names if name in ("start", "n") or name.startswith(("n_", "key_"))]
    return triton.jit(function, do_not_specialize=varying)


def tiles(n: int, tile: int) -> int:
    """Return the number of tiles that cover `n` elements."""
    return -(-n // tile)


def flat_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """Return bit patterns as one row of u1, u2 or u4. Raises like `flat_row`, and TypeError for elements of 8 bytes."""
    if tensor.element_size() > 4:
        raise TypeError(f"bit patterns have 1, 2 or 4 bytes, {tensor.dtype} has {tensor.element_size()}")
    row: torch.Tensor = flat_row(tensor)
    return row


def check_rows(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise ValueError unless two rows have the same length, type and device."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        raise ValueError(
            f"{first.dtype}{list(first.shape)} on {first.device} does not fit "
            f"{second.dtype}{list(second.shape)} on {second.device}"
        )


def check_places(indices: torch.Tensor, patterns: torch.Tensor) -> None:
    """Raise ValueError unless `indices` (i8[k]) has the length and the device of `patterns`."""
    if indices.dtype != torch.int64 or indices.shape != patterns.shape or indices.device != patterns.device:
        raise ValueError(
            f"{list(indices.shape)} indices ({indices.dtype}) on {indices.device} "
            f"for {list(patterns.shape)} patterns on {patterns.device}"
        )


TILE_BYTES = 8192
"""Bytes of each tensor that one program compares."""
WORDS_WRITTEN = 512
"""Number of 32-element words whose indices one program writes; a multiple of the words of a compared tile."""


@kernel
def bits_set(word: tl.tensor) -> tl.tensor:
    """Return the number of bits set in each word, u4 -> u4."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@kernel
def mark_changes(
    old_pointer: tl.tensor,
    new_pointer: tl.tensor,
    words_pointer: tl.tensor,
    counts_pointer: tl.tensor,
    n: tl.int64,
    TILE: tl.constexpr,
) -> None:
    """Mark one tile: bit i % 32 of word i // 32 is set if element i differs; `counts` is the number of set bits."""
    tile = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    left = n - tile * TILE
    if left >= TILE:
        changed = tl.load(old_pointer + tile * TILE + lanes) != tl.load(new_pointer + tile * TILE + lanes)
    else:
        inside = lanes < left
        old = tl.load(old_pointer + tile * TILE + lanes, mask=inside, other=0)
        changed = old != tl.load(new_pointer + tile * TILE + lanes, mask=inside, other=0)
    placed = changed.to(tl.uint32) << (lanes % 32).to(tl.uint32)
    words = tl.sum(tl.reshape(placed, (TILE // 32, 32)), axis=1)
    tl.store(words_pointer + tile * (TILE // 32) + tl.arange(0, TILE // 32), words)
    tl.store(counts_pointer + tile, tl.sum(changed.to(tl.int32)))


@kernel
def write_indices(
    words_pointer: tl.tensor,
    begins_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    n_words: tl.int64,
    TILE_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Write the indices of `WORDS` words: clear the lowest bit of all words in parallel until no bit is set.

    `begins` contains, for each tile of `TILE_WORDS` words, the number of changed elements before it.
    """
    program = tl.program_id(0).to(tl.int64)
    at = program * WORDS + tl.arange(0, WORDS)
    word = tl.load(words_pointer + at, mask=at < n_words, other=0)
    held = bits_set(word).to(tl.int32)
    place = tl.load(begins_pointer + program * (WORDS // TILE_WORDS)) + tl.cumsum(held, 0) - held
    for _ in range(tl.max(held, axis=0)):
        present = word != 0
        rest = word & (word - 1)
        lowest = word ^ rest
        tl.store(indices_pointer + place, at * 32 + bits_set(lowest - 1).to(tl.int64), mask=present)
        place = place + present.to(tl.int64)
        word = rest


def compare_and_compact(old: torch.Tensor, new: torch.Tensor, tile_bytes: int = TILE_BYTES) -> torch.Tensor:
    """Return the indices (i8[changed], ascending) of differing patterns in two contiguous tensors of the same type."""
    old, new = flat_patterns(old), flat_patterns(new)
    check_rows(old, new)
    n, tile = old.numel(), tile_bytes // old.element_size()
    if not n:
        return torch.empty(0, dtype=torch.int64, device=old.device)
    words = torch.empty(tiles(n, tile) * (tile // 32), dtype=torch.uint32, device=old.device)
    counts = torch.empty(tiles(n, tile), dtype=torch.int32, device=old.device)
    mark_changes[(counts.numel(),)](old, new, words, counts, n, TILE=tile)
    through = torch.cumsum(counts, 0, dtype=torch.int64)
    indices = torch.empty(int(through[-1]), dtype=torch.int64, device=old.device)
    if indices.numel():
        grid = (tiles(words.numel(), WORDS_WRITTEN),)
        write_indices[grid](words, through - counts, indices, words.numel(), TILE_WORDS=tile // 32, WORDS=WORDS_WRITTEN)
    return indices


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
    """Write taken[k] = bits[indices[k]] for k < n; 0 for an index outside the tensor."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    held = inside & (index >= 0) & (index < n_bits)
    tl.store(taken_pointer + at, tl.load(bits_pointer + index, mask=held, other=0), mask=inside)


def changed_elements(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of `kernels.elements.changed_elements` for the same arrays, contiguous."""
    indices = compare_and_compact(old, new)
    return indices, take(old, indices), take(new, indices)


def take(bits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the patterns (uN[n]) of `bits`, contiguous, at `indices` (i8[n])."""
    flat, places = flat_patterns(bits), flat_row(indices)
    taken = torch.empty(places.numel(), dtype=flat.dtype, device=flat.device)
    check_places(places, taken)
    if taken.numel():
        gather_patterns[(tiles(taken.numel(), TILE),)](flat, places, taken, taken.numel(), flat.numel(), TILE=TILE)
    return taken


PROGRAMS = 2048
"""Programs of a full grid: several for each multiprocessor of any GPU, and few enough to add up their sums."""

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@kernel
def prf(position: tl.tensor) -> tl.tensor:
    """Return splitmix64's output for a state, u8 -> u8."""
    mixed = (position ^ (position >> 30)) * MIX_1
    mixed = (mixed ^ (mixed >> 27)) * MIX_2
    return mixed ^ (mixed >> 31)


@kernel
def store_sums(sums_pointer: tl.tensor, lo: tl.tensor, hi: tl.tensor) -> None:
    """Write this program's two sums (of u8[tile] each) to its row of `sums` (i8[programs, 2])."""
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
    """Sum over the elements of the tensor's range that begins at `start`: whole tiles first, then the last part."""
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
    """Sum over the `n` elements at `indices`: new - old with `CHANGE`, new + 1 without."""
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
    """Compute the fingerprint of elements [start, start + bits.numel()) of a tensor; `bits` is contiguous."""
    flat = flat_patterns(bits)
    if start < 0:
        raise ValueError(f"start must not be negative, got {start}")
    sums = _sums(flat.numel(), flat.device, programs)
    sum_range[(len(sums),)](flat, sums, flat.numel(), start, key.lo, key.hi, TILE=TILE)
    return _total(sums)


def fingerprint_at(bits: torch.Tensor, key: TensorKey, indices: torch.Tensor) -> Fingerprint:
    """Compute the fingerprint of the elements at `indices` (i8[n], in any order) with patterns `bits` (uN[n])."""
    return fingerprint_change(key, indices, None, bits)


def fingerprint_change(
    key: TensorKey, indices: torch.Tensor, old_at: torch.Tensor | None, new_at: torch.Tensor
) -> Fingerprint:
    """Compute F(new) - F(old) for elements at `indices` (i8[n]): `old_at` becomes `new_at` (uN[n] each).

    If `old_at` is None, compute F(new).
    """
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
