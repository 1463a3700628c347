"""The engine's linear layers on plain, unpacked weights: what is written to a parameter is what is computed with.

vLLM's own choice on a CPU packs each weight into a private copy. oneDNN also multiplies by a plain weight, which is two
to four times as fast as MKL's plain product once a batch has some rows (measured on AVX-512); below that MKL is faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear, pad

_ROWS = 16
"""From this many rows on, oneDNN's product of plain weights is the faster one. Also the rows of a tile."""
_MORE = (512, 256, 128, 64, 32)
"""Rows of several tiles at once."""


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times weight [n, k] transposed, plus bias [n]."""
    if x.dtype is torch.float32 and x.numel() >= _ROWS * x.shape[-1]:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return linear(x, weight, bias)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by products of a few fixed numbers of rows, so that no row depends on how many there are.

    The order in which a product is summed up is that of its kernel, which a library chooses by the number of rows.
    Tiles of `_ROWS` rows are multiplied, the last one padded; several at once where that was seen to give equal bits.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = pad(rows, (0, 0, 0, -len(rows) % _ROWS))
    shape = len(weight), x.shape[-1], x.dtype
    if shape not in _TOGETHER:
        _TOGETHER[shape] = _sizes(weight)
    tiles = (unpacked_linear(padded[tile], weight, bias) for tile in _cut(len(padded), _TOGETHER[shape]))
    return torch.cat(list(tiles))[: len(rows)].view(*x.shape[:-1], len(weight))


_TOGETHER: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
"""By the shape and type of a weight, the numbers of rows that are multiplied at once, the greatest first."""


def _sizes(weight: torch.Tensor) -> tuple[int, ...]:
    """The numbers of rows whose product has the bits of tiles.

    Where a kernel sums up in another order, some of the many products of random numbers have other bits.
    """
    rows = torch.randn(max(_MORE), weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    tiles = torch.cat([unpacked_linear(rows[tile], weight) for tile in _cut(len(rows), (_ROWS,))])
    return *(size for size in _MORE if torch.equal(unpacked_linear(rows[:size], weight), tiles[:size])), _ROWS


def _cut(length: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Runs of these sizes that cover a length, which is a multiple of the last one."""
    first = 0
    for size in sizes:
        while length - first >= size:
            yield slice(first, first + size)
            first += size
