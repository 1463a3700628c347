"""Weights and activations in formats of few bits: codes with a scale for each block, and the values they stand for.

Four formats; the scales make every value exact in bf16:

    fp8_blocks  E4M3 codes, an E8M0 scale for 128 x 128 (DeepSeek-V3.1's `ue8m0` scales), for weights
    fp8_rows    E4M3 codes, an E8M0 scale for 128 of a row, for activations beside such weights
    mxfp8       E4M3 codes, an E8M0 scale for 32 of a row (OCP Microscaling Formats 1.0)
    nvfp4       E2M1 codes, an E4M3 scale for 16 of a row, and an outer scale for each row: a power of two, in f4

A power-of-two scale is the smallest for which the greatest value of its block is in range: greatest / 448 rounded up
(an outer scale: greatest / (6 x 448)), never below 2**-116, so that no value and no scale is subnormal in f4. An E4M3
scale is greatest / (6 x outer) rounded to nearest, and at least 2**-9, its smallest. A code is the quotient of value
and scale, by an IEEE division, rounded to nearest, ties to even, saturating. An outer scale belongs to one row, never
to a tensor: the values of a later row change nothing in an earlier one. A row of activations is a token.

The functions here run Triton's kernels or torch's operations, which give the same bits (`kernels.backend` chooses);
`round_rows` runs a compiled loop on the CPU, also with the same bits: by torch's operations a few rows take 30 to 80
times as long, more than the product that they are rounded for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from tidemill.kernels.backend import is_on_host, runs_triton
from tidemill.kernels.compiled import compiled

EXPONENT_BIAS = 127
"""The bias of f4 and of E8M0."""
LEAST_EXPONENT = EXPONENT_BIAS - 116
"""Biased exponent of the smallest power-of-two scale."""
LARGEST = 2.0**127
"""Greater values are refused: rounded up they could exceed the range of bf16."""


@dataclass(frozen=True, slots=True)
class MiniFloat:
    """A floating-point type of at most 8 bits: a sign, an exponent, `mantissa` bits."""

    mantissa: int
    bias: int
    sign: int
    """Position of the sign bit."""
    top: int
    """Code of the greatest finite value, without the sign."""
    greatest: float


E4M3 = MiniFloat(mantissa=3, bias=7, sign=7, top=0x7E, greatest=448.0)
E2M1 = MiniFloat(mantissa=1, bias=1, sign=3, top=0x7, greatest=6.0)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format of codes with a scale for each block of `rows` x `columns`; a tensor's last blocks may be smaller."""

    name: str
    codes: MiniFloat
    rows: int
    columns: int
    has_outer: bool
    """Whether scales are E4M3, with an outer scale for each row, instead of E8M0."""


FP8_BLOCKS = BlockFormat("fp8_blocks", E4M3, 128, 128, has_outer=False)
MXFP8 = BlockFormat("mxfp8", E4M3, 1, 32, has_outer=False)
NVFP4 = BlockFormat("nvfp4", E2M1, 1, 16, has_outer=True)
FP8_ROWS = BlockFormat("fp8_rows", E4M3, 1, 128, has_outer=False)
BLOCK_FORMATS = {form.name: form for form in (FP8_BLOCKS, MXFP8, NVFP4)}
"""Formats of weights, by name."""
ROW_FORMATS = {form.name: form for form in (FP8_ROWS, MXFP8, NVFP4)}
"""Formats of activations, by name: no block spans two rows."""
CHOOSERS = ("gate", "router")
"""Ends of the names of linear layers that choose among experts: their weights and inputs are not quantised."""


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A tensor of shape [..., R, C] in a format."""

    form: BlockFormat
    codes: Tensor
    """u1[..., R, C]: one code in each byte, also for codes of four bits."""
    scales: Tensor
    """u1[..., blocks of R, blocks of C]: E8M0 or E4M3 codes."""
    outer: Tensor | None = None
    """f4[..., R, 1], if the format has outer scales."""


def quantise(values: Tensor, form: BlockFormat) -> QuantisedTensor:
    """Return the codes and scales of `values` (f4[..., R, C]), on the same device.

    Raises ValueError for values that are not finite or beyond 2**127, and for tensors of fewer than two dimensions.
    """
    if values.dim() < 2:
        raise ValueError(f"a tensor of shape {tuple(values.shape)} has no rows to quantise")
    flat = _matrices(values.detach().float())
    # The negated comparison is true for NaN as well.
    if flat.numel() and not bool(flat.abs().amax() <= LARGEST):
        raise ValueError(f"values that are not finite, or beyond 2**127, have no {form.name} codes")
    codes, scales, outer = _encode(flat, form)
    lead = values.shape[:-2]
    whole = None if outer is None else outer.view(*lead, *outer.shape[-2:])
    return QuantisedTensor(form, codes.view(values.shape), scales.view(*lead, *scales.shape[-2:]), whole)


def round_rows(rows: Tensor, form: BlockFormat) -> Tensor:
    """Return `rows` (f4 or bf16 [..., C]) with the values of their codes and scales, in the same type; no row depends
    on another one. `form` is one of `ROW_FORMATS`.

    A row with a value that is not finite, or beyond 2**127, has no codes and is returned unchanged.
    """
    flat = rows.detach().reshape(1, -1, rows.shape[-1]).float()
    if is_on_host(flat) and not runs_triton(flat):
        made = _round_on_host(flat[0].contiguous().numpy(), form)
        return torch.from_numpy(made).to(rows.dtype).view(rows.shape)
    # False for NaN as well.
    have_codes = flat.abs().amax(-1, keepdim=True) <= LARGEST
    held = QuantisedTensor(form, *_encode(flat.where(have_codes, 0.0), form))
    return dequantise(held).where(have_codes, flat).to(rows.dtype).view(rows.shape)


def _encode(flat: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and outer scales of finite values (f4[B, R, C])."""
    outer = _power_of_two(flat.abs().amax(-1, keepdim=True), 6 * 448) if form.has_outer else None
    if runs_triton(flat):
        from tidemill.kernels import triton_quantise

        return *triton_quantise.quantise(flat, form, outer), outer
    return *quantise_by_torch(flat, form, outer), outer


def dequantise(held: QuantisedTensor) -> Tensor:
    """Return the values (f4[..., R, C]) of codes and scales; those of `quantise` are exact in bf16 too.

    An E4M3 code of NaN gives NaN. The scales are those of `quantise`: valid, and as many as the codes need.
    """
    form, shape = held.form, held.codes.shape
    codes, scales = _matrices(held.codes), _matrices(held.scales)
    outer = None if held.outer is None else _matrices(held.outer)
    if runs_triton(codes):
        from tidemill.kernels import triton_quantise

        return triton_quantise.dequantise(codes, scales, outer, form).view(shape)
    return dequantise_by_torch(codes, scales, outer, form).view(shape)


def blocks_of(form: BlockFormat, shape: torch.Size) -> tuple[int, int]:
    """Return the numbers of blocks along the rows and along the columns of a tensor (shape [..., R, C])."""
    return -(-shape[-2] // form.rows), -(-shape[-1] // form.columns)


def quantise_by_torch(values: Tensor, form: BlockFormat, outer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes (u1[B, R, C]) and scales (u1[B, blocks, blocks]) of `values` (f4[B, R, C]), by torch operations."""
    count, rows, columns = values.shape
    down, across = blocks_of(form, values.shape)
    filled = pad(values, (0, across * form.columns - columns, 0, down * form.rows - rows))
    blocks = filled.view(count, down, form.rows, across, form.columns)
    greatest = blocks.abs().amax((2, 4))
    if outer is None:
        factors = _power_of_two(greatest, 448)
        # The biased exponents of the powers of two.
        scales = (factors.view(torch.int32) >> 23).to(torch.uint8)
    else:
        scales = _encode_e4m3(greatest / (outer * E2M1.greatest)).clamp_(min=1)
        factors = _decode_e4m3(scales) * outer
    quotients = blocks / factors[:, :, None, :, None]
    codes = _encode_e4m3(quotients) if form.codes is E4M3 else _encode_e2m1(quotients)
    return codes.view(filled.shape)[:, :rows, :columns].contiguous(), scales


def dequantise_by_torch(codes: Tensor, scales: Tensor, outer: Tensor | None, form: BlockFormat) -> Tensor:
    """Return the values (f4[B, R, C]) of `codes` (u1[B, R, C]), by torch operations."""
    values = _decode_e4m3(codes) if form.codes is E4M3 else _decode_e2m1(codes)
    factors = (scales.to(torch.int32) << 23).view(torch.float32) if outer is None else _decode_e4m3(scales) * outer
    if form.rows > 1:
        factors = factors.repeat_interleave(form.rows, 1)[:, : codes.shape[1]]
    return values.mul_(factors.repeat_interleave(form.columns, 2)[:, :, : codes.shape[2]])


def _matrices(tensor: Tensor) -> Tensor:
    """Return a tensor of shape [..., R, C] as one row of matrices: [B, R, C]."""
    return tensor.contiguous().view(prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _power_of_two(greatest: Tensor, divisor: int) -> Tensor:
    """Return the smallest power of two (f4) that is at least `greatest` (f4, none negative) / `divisor`, in range.

    Integer arithmetic gives the same result on every device: a fraction of `greatest` above that of `divisor` carries.
    """
    fraction, exponent = frexp(divisor)
    below = int((2 * fraction - 1) * 2**23)
    carried = (greatest.contiguous().view(torch.int32) + (0x7FFFFF - below)) >> 23
    biased: Tensor = (carried - (exponent - 1)).clamp_(min=LEAST_EXPONENT) << 23
    return biased.view(torch.float32)


def _encode_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3.greatest, E4M3.greatest).to(torch.float8_e4m3fn).view(torch.uint8)


def _decode_e4m3(codes: Tensor) -> Tensor:
    values = codes.view(torch.float8_e4m3fn).float()
    return values.masked_fill_(values.isnan(), torch.nan)


def _encode_e2m1(values: Tensor) -> Tensor:
    """Encode E2M1, whose numbers are 0.5 apart below 2, 1 below 4, and 2 above; `round` rounds ties to even."""
    sizes = values.abs().clamp_(max=E2M1.greatest)
    codes = torch.where(sizes < 2, (2 * sizes).round_(), (sizes.round() + 2))
    codes = torch.where(sizes < 4, codes, (sizes / 2).round_() + 4)
    return codes.to(torch.uint8) | (values.signbit().to(torch.uint8) << E2M1.sign)


def _decode_e2m1(codes: Tensor) -> Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.int()]


Floats = npt.NDArray[np.float32]
_SIZE, _EXPONENT, _FRACTION = np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(23)
_LARGEST, _LEAST = np.float32(LARGEST).view(np.int32), np.int32(LEAST_EXPONENT)
_E4M3_GREATEST, _E4M3_NORMAL, _E4M3_SHIFTER = np.float32(E4M3.greatest), np.float32(2**-6), np.float32(1.5 * 2**20)
_E4M3_LEAST, _E2M1_GREATEST = np.float32(2**-9), np.float32(E2M1.greatest)


@compiled
def _power_above(greatest: Any, carry: Any, exponent: Any) -> Any:  # noqa: ANN401 - numba's scalars
    biased = max(((greatest + carry) >> _FRACTION) - exponent, _LEAST)
    return np.int32(biased << _FRACTION).view(np.float32)


@compiled
def _nearest(size: Any, greatest: Any, normal: Any, shifter: Any) -> Any:  # noqa: ANN401 - numba's scalars
    """Round a number without a sign to nearest, ties to even, saturating.

    It adds a number whose unit in the last place is the distance of the neighbouring values.
    """
    kept = min(size, greatest)
    power = max(np.int32(np.float32(kept).view(np.int32) & _EXPONENT).view(np.float32), normal)
    added = power * shifter
    return (kept + added) - added


@compiled
def _round(
    rows: Floats, made: Floats, columns: int, has_outer: bool, greatest: Any, normal: Any, shifter: Any,  # noqa: ANN401
    carry: Any, exponent: Any,  # noqa: ANN401 - numba's scalars
) -> None:  # fmt: skip
    for row in range(rows.shape[0]):
        largest = np.int32(0)
        for column in range(rows.shape[1]):
            largest = max(largest, np.int32(np.float32(rows[row, column]).view(np.int32) & _SIZE))
        if largest > _LARGEST:
            made[row] = rows[row]
            continue
        outer = _power_above(largest, carry, exponent)
        for begin in range(0, rows.shape[1], columns):
            end = min(begin + columns, rows.shape[1])
            most = np.int32(0)
            for column in range(begin, end):
                most = max(most, np.int32(np.float32(rows[row, column]).view(np.int32) & _SIZE))
            if has_outer:
                wanted = np.int32(most).view(np.float32) / (outer * _E2M1_GREATEST)
                scale = max(_nearest(wanted, _E4M3_GREATEST, _E4M3_NORMAL, _E4M3_SHIFTER), _E4M3_LEAST)
                factor = scale * outer
            else:
                factor = _power_above(most, carry, exponent)
            for column in range(begin, end):
                value = rows[row, column]
                size = _nearest(abs(value) / factor, greatest, normal, shifter)
                made[row, column] = np.copysign(size * factor, value)


def _round_on_host(rows: Floats, form: BlockFormat) -> Floats:
    """Return rows f4[R, C] rounded to a format whose blocks are in one row; those without codes unchanged."""
    made, codes = np.empty_like(rows), form.codes
    fraction, exponent = frexp(6 * 448 if form.has_outer else 448)
    _round(
        rows,
        made,
        form.columns,
        form.has_outer,
        np.float32(codes.greatest),
        np.float32(2.0 ** (1 - codes.bias)),
        np.float32(1.5 * 2.0 ** (23 - codes.mantissa)),
        np.int32(0x7FFFFF - int((2 * fraction - 1) * 2**23)),
        np.int32(exponent - 1),
    )
    return made
