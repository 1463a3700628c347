"""Synthetic weights in training: fp32 masters changed by Adam, and the patterns in which they are served.

A matrix is Gaussian with log-normal row scales. Its gradient is noise of unit variance, so that Adam's second moment
has settled at one and a step is the learning rate times the first moment (decay 0.9): a weight moves by about a
quarter of the learning rate, and similarly in consecutive steps. A served weight changes when its master crosses a
rounding boundary; small weights do so more often.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tidemill.kernels.compiled import Bits
from tidemill.kernels.elements import TensorChange

BETA = 0.9
FP8_LARGEST = 448.0
PATTERNS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float8_e4m3fn: np.uint8}


def fp8_scale(largest: float) -> float:
    """Return the largest power of two that keeps `largest` within float8_e4m3fn's range."""
    return 2.0 ** math.floor(math.log2(FP8_LARGEST / largest)) if largest else 1.0


class SyntheticMatrix:
    """One matrix in training."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        scale = 0.02 * np.exp(0.5 * self._normal(rows, 1))
        self._master = scale * self._normal(rows, columns)
        self._moment = np.float32(math.sqrt((1 - BETA) / (1 + BETA))) * self._normal(rows, columns)
        self._fp8_scale = fp8_scale(float(np.abs(self._master).max()))

    def step(self, learning_rate: float) -> None:
        """Move the masters by one step."""
        self._moment *= np.float32(BETA)
        self._moment += np.float32(1 - BETA) * self._normal(*self._master.shape)
        self._master += np.float32(learning_rate) * self._moment

    def served(self, dtype: str) -> Bits:
        """Return the patterns of a served type, flat."""
        kind = getattr(torch, dtype)
        scale = self._fp8_scale if kind == torch.float8_e4m3fn else 1.0
        bits: Bits = (torch.from_numpy(self._master) * scale).to(kind).view(torch.uint8).numpy().view(PATTERNS[kind])
        return bits.reshape(-1)

    def _normal(self, rows: int, columns: int) -> np.ndarray:
        return self._generator.standard_normal((rows, columns), dtype=np.float32)


def synthetic_change(dtype: str, learning_rate: float, rows: int, columns: int, seed: int) -> TensorChange:
    """Return one step of one matrix."""
    matrix = SyntheticMatrix(rows, columns, seed)
    before = matrix.served(dtype)
    matrix.step(learning_rate)
    return TensorChange("model.layers.0.mlp.up_proj.weight", dtype, before, matrix.served(dtype))
