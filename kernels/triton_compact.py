"""Compare and compact on a GPU: the indices of the elements whose patterns differ, ascending.

Two passes. The first reads both tensors once and leaves one bit an element and a count a tile; a scan of the counts
says where each tile's indices begin; the second reads the bits alone and writes the indices. The one thing that the
host waits for is the number of changed elements.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]

from tidemill.kernels.tensor_rows import check_rows, flat_patterns
from tidemill.kernels.triton_runtime import kernel, tiles

TILE_BYTES = 8192
"""Bytes of each tensor that one program compares."""
WORDS_WRITTEN = 512
"""Words of 32 elements whose indices one program writes; a multiple of the words of a compared tile."""


@kernel
def bits_set(word: tl.tensor) -> tl.tensor:
    """Number of bits set in each word, u4 -> u4."""
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
    """One program a tile: bit i % 32 of word i // 32 says whether element i differs; `counts` says how many do."""
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
    """One program for `WORDS` words: takes the lowest bit off every word at once until none is left.

    `begins` says for each tile of `TILE_WORDS` words how many changed elements lie before it.
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
    """Indices (i8[changed], ascending) of the elements whose patterns differ; both tensors contiguous, of one type."""
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
