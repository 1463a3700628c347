"""The engine's linear layers on plain, unpacked weights: what is written to a parameter is what is computed with.

vLLM's own choice on a CPU packs each weight into a private copy. oneDNN also multiplies by a plain weight, which is two
to four times as fast as MKL's plain product once a batch has some rows (measured on AVX-512); below that MKL is faster.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

_ROWS = 16
"""From this many rows on, oneDNN's product of plain weights is the faster one."""


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times weight [n, k] transposed, plus bias [n]."""
    if x.dtype is torch.float32 and x.numel() >= _ROWS * x.shape[-1]:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return linear(x, weight, bias)
