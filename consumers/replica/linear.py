"""The engine's linear layers on plain, unpacked weights: what is written to a parameter is what is computed with.

vLLM's own choice on a CPU packs each weight into a private copy. oneDNN also multiplies by a plain weight, which is two
to four times as fast as MKL's plain product once a batch has some rows (measured on AVX-512); below that MKL is faster.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

_ROWS = 16
"""From this many rows on, oneDNN's product of plain weights is the faster one. Also the rows of a tile."""


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times weight [n, k] transposed, plus bias [n]."""
    if x.dtype is torch.float32 and x.numel() >= _ROWS * x.shape[-1]:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return linear(x, weight, bias)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by products of equally many rows, the last one padded, so that no row depends on how many there are.

    The order in which a product is summed up is that of its kernel, which a library chooses by the number of rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = pad(rows, (0, 0, 0, -len(rows) % _ROWS))
    tiles = (padded[first : first + _ROWS] for first in range(0, len(padded), _ROWS))
    products = torch.cat([unpacked_linear(tile, weight, bias) for tile in tiles])
    return products[: len(rows)].view(*x.shape[:-1], len(weight))
