"""The engine's linear layers on plain, unpacked weights: they compute with the values written to the parameters.

On a CPU vLLM would pack each weight into a private copy. oneDNN can also multiply by a plain weight: two to four times
as fast as MKL's plain product for batches with several rows (measured on AVX-512); for fewer rows MKL is faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear, pad

_ROWS = 16
"""From this number of rows on, oneDNN's product of plain weights is faster. Also the rows of a tile."""
_MORE = (512, 256, 128, 64, 32)
"""Numbers of rows for several tiles in one product."""


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., k] times weight [n, k] transposed, plus bias [n]."""
    if x.dtype is torch.float32 and x.numel() >= _ROWS * x.shape[-1]:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return linear(x, weight, bias)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the same from products with a few fixed numbers of rows, so that no row depends on the number of rows.

    The kernel determines the summation order of a product, and the library chooses the kernel by the number of rows.
    Tiles of `_ROWS` rows are multiplied, the last one padded; several in one product if a test gave equal bits.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = pad(rows, (0, 0, 0, -len(rows) % _ROWS))
    shape = len(weight), x.shape[-1], x.dtype
    if shape not in _TOGETHER:
        _TOGETHER[shape] = _sizes(weight)
    tiles = (unpacked_linear(padded[tile], weight, bias) for tile in _cut(len(padded), _TOGETHER[shape]))
    return torch.cat(list(tiles))[: len(rows)].view(*x.shape[:-1], len(weight))


_TOGETHER: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
"""For the shape and type of a weight: the numbers of rows of its products, the greatest first."""


def _sizes(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers of rows whose product has the same bits as tiles.

    If a kernel has another summation order, some of the many products of random numbers have other bits.
    """
    rows = torch.randn(max(_MORE), weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    tiles = torch.cat([unpacked_linear(rows[tile], weight) for tile in _cut(len(rows), (_ROWS,))])
    return *(size for size in _MORE if torch.equal(unpacked_linear(rows[:size], weight), tiles[:size])), _ROWS


def _cut(length: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of these sizes that cover `length`, which is a multiple of the last size."""
    first = 0
    for size in sizes:
        while length - first >= size:
            yield slice(first, first + size)
            first += size
