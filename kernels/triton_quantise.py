"""Block formats on a GPU: each program computes a tile of whole blocks; codes and scales use integer arithmetic.

See `kernels.quantise` for the formats. Divisions are IEEE divisions (`div_rn`): the error of the compiler's own `/` is
up to two units in the last place, enough to change a code.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from tidemill.kernels.quantise import LEAST_EXPONENT, BlockFormat, blocks_of
from tidemill.kernels.triton_rows import Kernel, kernel, tiles

TILE_ROWS = 8
"""Rows of a tile, for a format whose blocks are in one row."""
TILE_COLUMNS = 128
WARPS = 8

CARRY = tl.constexpr(0x1FFFFF)
"""Added to a fraction, it carries into the exponent if the fraction is above that of 448 = 1.75 x 2**8."""
LEAST = tl.constexpr(LEAST_EXPONENT)
E2M1_GREATEST = tl.constexpr(6.0)


@kernel
def encode(
    values: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, TOP: tl.constexpr
) -> tl.tensor:
    """Return the codes (i4) of values (f4) by rounding to nearest, ties to even, saturating."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Adding a number whose unit in the last place equals the distance of the subnormals rounds to a subnormal.
    SHIFTER: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    shifter = tl.full(values.shape, SHIFTER, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + shifter).to(tl.int32, bitcast=True) - SHIFTER
    code = tl.where(size < ((128 - BIAS) << 23), subnormal, normal)
    return tl.minimum(code, TOP) | (((bits >> 31) & 1) << SIGN)


@kernel
def decode(
    codes: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, TOP: tl.constexpr
) -> tl.tensor:
    """Return the values (f4) of codes (i4); NaN for codes above the greatest finite one."""
    size = codes & ((1 << SIGN) - 1)
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    STEP: tl.constexpr = (128 - BIAS - MANTISSA) << 23
    step = tl.full(codes.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << MANTISSA), size.to(tl.float32) * step, normal).to(tl.int32, bitcast=True)
    signed = value | ((codes >> SIGN) << 31)
    return tl.where(size > TOP, 0x7FC00000, signed).to(tl.float32, bitcast=True)


@kernel
def quantise_tile(
    values_pointer: tl.tensor,
    codes_pointer: tl.tensor,
    scales_pointer: tl.tensor,
    outer_pointer: tl.tensor | None,
    rows: tl.int64,
    columns: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Write codes and scales of a tile of matrix `program_id(2)`; `outer_pointer` is None without outer scales."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (matrix * rows + row)[:, None] * columns + column[None, :]
    BLOCKS_DOWN: tl.constexpr = TILE_ROWS // ROWS
    BLOCKS_ACROSS: tl.constexpr = TILE_COLUMNS // COLUMNS
    values = tl.load(values_pointer + at, mask=inside, other=0.0)
    blocks = tl.reshape(values, (BLOCKS_DOWN, ROWS, BLOCKS_ACROSS, COLUMNS))
    greatest = tl.max(tl.max(tl.abs(blocks), axis=3), axis=1)
    block_row = tl.program_id(1).to(tl.int64) * BLOCKS_DOWN + tl.arange(0, BLOCKS_DOWN)
    block_column = tl.program_id(0).to(tl.int64) * BLOCKS_ACROSS + tl.arange(0, BLOCKS_ACROSS)
    if outer_pointer is not None:
        # Scales are E4M3: three bits of mantissa, a bias of 7, the sign in bit 7.
        outer = tl.load(outer_pointer + matrix * rows + block_row, mask=block_row < rows, other=1.0)[:, None]
        wanted = tl.div_rn(greatest, tl.broadcast_to(outer * E2M1_GREATEST, greatest.shape))
        scale = tl.maximum(encode(wanted, 3, 7, 7, 0x7E), 1)
        factor = decode(scale, 3, 7, 7, 0x7E) * outer
    else:
        scale = tl.maximum(((greatest.to(tl.int32, bitcast=True) + CARRY) >> 23) - 8, LEAST)
        factor = (scale << 23).to(tl.float32, bitcast=True)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    kept = (block_row < down)[:, None] & (block_column < across)[None, :]
    scale_at = (matrix * down + block_row)[:, None] * across + block_column[None, :]
    tl.store(scales_pointer + scale_at, scale.to(tl.uint8), mask=kept)
    factors = tl.reshape(factor, (BLOCKS_DOWN, 1, BLOCKS_ACROSS, 1))
    quotients = tl.div_rn(blocks, tl.broadcast_to(factors, blocks.shape))
    codes = encode(tl.reshape(quotients, values.shape), MANTISSA, BIAS, SIGN, TOP)
    tl.store(codes_pointer + at, codes.to(tl.uint8), mask=inside)


@kernel
def dequantise_tile(
    values_pointer: tl.tensor,
    codes_pointer: tl.tensor,
    scales_pointer: tl.tensor,
    outer_pointer: tl.tensor | None,
    rows: tl.int64,
    columns: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Write the values of a tile of matrix `program_id(2)`; `outer_pointer` is None without outer scales."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (matrix * rows + row)[:, None] * columns + column[None, :]
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    scale_at = (matrix * down + row // ROWS)[:, None] * across + (column // COLUMNS)[None, :]
    codes = tl.load(codes_pointer + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_pointer + scale_at, mask=inside, other=1).to(tl.int32)
    if outer_pointer is not None:
        outer = tl.load(outer_pointer + matrix * rows + row, mask=row < rows, other=1.0)[:, None]
        factor = decode(scale, 3, 7, 7, 0x7E) * outer
    else:
        factor = (scale << 23).to(tl.float32, bitcast=True)
    values = decode(codes, MANTISSA, BIAS, SIGN, TOP) * factor
    # A GPU's NaN has another pattern than a CPU's.
    values = tl.where(values == values, values.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(values_pointer + at, values, mask=inside)


def quantise(values: Tensor, form: BlockFormat, outer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes (u1[B, R, C]) and scales (u1[B, blocks, blocks]) of `values` (f4[B, R, C], contiguous)."""
    codes = torch.empty_like(values, dtype=torch.uint8)
    scales = torch.empty((len(values), *blocks_of(form, values.shape)), dtype=torch.uint8, device=values.device)
    _launch(quantise_tile, values, codes, scales, outer, form)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, outer: Tensor | None, form: BlockFormat) -> Tensor:
    """Return the values (f4[B, R, C]) of `codes` (u1[B, R, C], contiguous)."""
    values = torch.empty_like(codes, dtype=torch.float32)
    _launch(dequantise_tile, values, codes, scales, outer, form)
    return values


def _launch(
    launched: Kernel, values: Tensor, codes: Tensor, scales: Tensor, outer: Tensor | None, form: BlockFormat
) -> None:
    """Run a kernel on every tile of every matrix, on the GPU that holds them."""
    if not values.numel():
        return
    count, rows, columns = values.shape
    tile_rows, tile_columns = max(TILE_ROWS, form.rows), max(TILE_COLUMNS, form.columns)
    grid = (tiles(columns, tile_columns), tiles(rows, tile_rows), count)
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        launched[grid](
            values,
            codes,
            scales,
            outer,
            rows,
            columns,
            ROWS=form.rows,
            COLUMNS=form.columns,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            MANTISSA=form.codes.mantissa,
            BIAS=form.codes.bias,
            SIGN=form.codes.sign,
            TOP=form.codes.top,
            num_warps=WARPS,
        )
