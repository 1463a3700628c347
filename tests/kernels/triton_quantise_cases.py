"""Triton's block formats, in Triton's interpreter or on a GPU, give the same bits as their twins on the CPU.

Run in its own process, like `triton_cases.py`. Inputs are inside larger arrays with other values, and a kernel must not
change the values around its results.
"""

from __future__ import annotations

import os

import pytest
import torch
from triton.runtime import interpreter

from tidemill.kernels import quantise, triton_quantise
from tidemill.kernels.backend import runs_triton
from tidemill.kernels.quantise import (
    BLOCK_FORMATS,
    MXFP8,
    NVFP4,
    QuantisedTensor,
    dequantise_by_torch,
    quantise_by_torch,
)

DEVICE = os.environ.get("TIDEMILL_TEST_DEVICE", "cpu")
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

EDGES = [(1, 1, 1), (1, 8, 128), (1, 9, 129), (2, 130, 140), (3, 7, 16)]
"""Numbers of matrices, rows and columns. A tile of most formats has 8 rows and 128 columns."""


def values_of(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return f4 rows of very different magnitudes, with zeros of both signs, very small numbers and ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1)))
    flat = values.view(-1)
    flat[1::13], flat[2::17], flat[3::19] = 0.0, -0.0, 1e-42
    flat[5::7] = flat[5::7].bfloat16().float()
    return values


def surrounded(values: torch.Tensor, fill: float) -> torch.Tensor:
    """Return the same values in the middle of a larger tensor that is filled with `fill`."""
    whole = torch.full((values.numel() + 8192,), fill, dtype=values.dtype)
    whole[4096 : 4096 + values.numel()] = values.reshape(-1)
    return whole.to(DEVICE)[4096 : 4096 + values.numel()].view(values.shape)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    width = {1: torch.uint8, 4: torch.int32}[expected.element_size()]
    return torch.equal(found.cpu().view(width), expected.view(width))


@pytest.mark.parametrize("shape", EDGES, ids=str)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_block_formats_at_the_edges_of_a_tile(name, shape):
    form, values = BLOCK_FORMATS[name], values_of(shape, sum(shape))
    outer = quantise.quantise(values, form).outer
    placed = None if outer is None else surrounded(outer, float("nan"))
    expected = quantise_by_torch(values, form, outer)
    found = triton_quantise.quantise(surrounded(values, 1e30), form, placed)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])
    codes, scales = (surrounded(part, 255) for part in expected)
    values_again = triton_quantise.dequantise(codes, scales, placed, form)
    assert same_bits(values_again, dequantise_by_torch(*expected, outer, form))


@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_every_code_under_every_scale(form):
    sign = 1 << form.codes.sign
    codes = torch.arange(2 * sign, dtype=torch.uint8).repeat(254, 256 // (2 * sign)).view(1, 254, 256)
    scales = torch.arange(1, 255, dtype=torch.uint8).view(1, 254, 1).expand(1, 254, 256 // form.columns).contiguous()
    outer = torch.full((1, 254, 1), 0.375) if form.has_outer else None
    placed = [None if part is None else part.to(DEVICE) for part in (codes, scales, outer)]
    found = triton_quantise.dequantise(*placed, form)
    assert same_bits(found, dequantise_by_torch(codes, scales, outer, form))


def test_a_tensor_on_the_device_uses_these_kernels(monkeypatch):
    monkeypatch.setenv("TIDEMILL_KERNELS", "triton")
    values = values_of((2, 5, 48), 3)
    assert runs_triton(values.to(DEVICE))
    held = quantise.quantise(values.to(DEVICE), NVFP4)
    monkeypatch.setenv("TIDEMILL_KERNELS", "cpu")
    twin = quantise.quantise(values, NVFP4)
    assert same_bits(held.codes, twin.codes) and same_bits(held.scales, twin.scales)
    on_host = QuantisedTensor(NVFP4, held.codes.cpu(), held.scales.cpu(), twin.outer)
    assert same_bits(quantise.dequantise(held), quantise.dequantise(on_host))
