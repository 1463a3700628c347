"""Block formats compared with their definition in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, isnan, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kernels import quantise as quantise_module
from tidemill.kernels.quantise import (
    BLOCK_FORMATS,
    E4M3,
    FP8_BLOCKS,
    MXFP8,
    NVFP4,
    ROW_FORMATS,
    BlockFormat,
    MiniFloat,
    QuantisedTensor,
    dequantise,
    dequantise_by_torch,
    quantise,
    quantise_by_torch,
    round_rows,
)

TINY = Fraction(2) ** -116
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def number(kind: MiniFloat, code: int) -> Fraction:
    """Return the value of a code without its sign, by the definition of a floating-point type."""
    exponent, fraction = divmod(code, 1 << kind.mantissa)
    if exponent == 0:
        return Fraction(fraction, 1 << kind.mantissa) * Fraction(2) ** (1 - kind.bias)
    return (1 + Fraction(fraction, 1 << kind.mantissa)) * Fraction(2) ** (exponent - kind.bias)


def nearest(kind: MiniFloat, value: Fraction) -> int:
    """Return the code of the nearest value of a type, ties to even."""
    size, sign = abs(value), (1 << kind.sign) if value < 0 else 0
    return sign | min(range(kind.top + 1), key=lambda code: (abs(number(kind, code) - size), code & 1))


def power(value: Fraction) -> Fraction:
    """Return the least power of two that is at least `value`, in range."""
    return max(TINY, Fraction(2) ** ceil(log2(value))) if value else TINY


def single(value: Fraction) -> Fraction:
    """Round to f4, like the result of an IEEE division."""
    return Fraction(torch.tensor(float(value), dtype=torch.float64).float().item())


def block_reference(form: BlockFormat, block: list[float], outer: Fraction | None) -> tuple[int, list[int]]:
    """Return scale and codes of a block by the definition of the format."""
    values = [Fraction(value) for value in block]
    greatest = max(map(abs, values))
    if outer is None:
        factor = power(greatest / 448)
        scale = int(log2(factor)) + 127
    else:
        scale = max(1, nearest(E4M3, single(greatest / (6 * outer))))
        factor = number(E4M3, scale) * outer
    codes = [nearest(form.codes, single(value / factor)) for value in values]
    # A zero keeps the sign of the value before quantisation.
    signs = [(1 << form.codes.sign) if torch.tensor(value).signbit() else 0 for value in block]
    return scale, [code | sign for code, sign in zip(codes, signs, strict=True)]


@settings(max_examples=25, derandomize=True)
@given(st.lists(st.one_of(FLOATS, st.sampled_from([0.0, -0.0, 1.0, 448.0, 6.0, 5.0, 2.5, 1e-42])), min_size=32,
                max_size=32), st.sampled_from([MXFP8, NVFP4]))  # fmt: skip
def test_codes_and_scales_equal_the_definition(row, form):
    held = quantise(torch.tensor([row]), form)
    outer = power(max(abs(Fraction(value)) for value in row) / 2688) if form.has_outer else None
    assert outer is None or (held.outer is not None and Fraction(held.outer.item()) == outer)
    for place in range(32 // form.columns):
        block = slice(place * form.columns, (place + 1) * form.columns)
        scale, codes = block_reference(form, torch.tensor(row)[block].tolist(), outer)
        assert held.scales[0, place] == scale and held.codes[0, block].tolist() == codes


def test_blocks_of_rows_and_columns_have_one_scale_each_and_ragged_ends_are_blocks():
    values = torch.randn(2, 130, 300, generator=torch.Generator().manual_seed(0))
    held = quantise(values, FP8_BLOCKS)
    assert held.scales.shape == (2, 2, 3)
    for matrix, down, across in ((0, 0, 0), (1, 1, 2), (0, 1, 1)):
        block = (matrix, slice(down * 128, down * 128 + 128), slice(across * 128, across * 128 + 128))
        factor = power(Fraction(values[block].abs().max().item()) / 448)
        assert held.scales[matrix, down, across] == int(log2(factor)) + 127
        some = zip(values[block].flatten().tolist()[:50], held.codes[block].flatten().tolist()[:50], strict=True)
        assert all(code == nearest(E4M3, Fraction(value) / factor) for value, code in some)


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=lambda form: form.name)
def test_values_are_exact_in_bf16_and_codes_of_values_give_the_values_again(form):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 70, 200, generator=generator) * torch.exp2(
        torch.randint(-120, 100, (3, 70, 1), generator=generator).float()
    )
    made = dequantise(quantise(values, form))
    assert torch.equal(made.bfloat16().float(), made)
    assert bool((made - values).abs().max() > 0)
    assert torch.equal(dequantise(quantise(made, form)), made)


def test_codes_equal_those_of_vllm():
    """Repeats vLLM 0.32's code of `per_block_cast_to_fp8`, `_mxfp8_e4m3_quantize_torch` and `ref_nvfp4_quant`, the last
    with the outer scale of a row."""
    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(2)) * 0.02
    blocks = values.view(2, 128, 4, 128)
    scale = torch.pow(2.0, torch.ceil(torch.log2(blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448)))
    held = quantise(values, FP8_BLOCKS)
    assert torch.equal((blocks * (1 / scale)).to(torch.float8_e4m3fn).view(values.shape).view(torch.uint8), held.codes)
    narrow = values.view(256, 16, 32)
    biased = torch.ceil(torch.log2(narrow.abs().amax(-1) / 448)) + 127
    held = quantise(values, MXFP8)
    scaled = narrow / torch.exp2(biased - 127)[..., None]
    assert torch.equal(scaled.to(torch.float8_e4m3fn).view(values.shape).view(torch.uint8), held.codes)
    assert torch.equal(biased.to(torch.uint8), held.scales)
    held = quantise(values, NVFP4)
    assert held.outer is not None
    wanted = (1 / held.outer) * (values.view(256, 32, 16).abs().amax(-1) * (1 / 6.0))
    assert torch.equal(wanted.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), held.scales)


def test_ties_are_rounded_after_a_division_and_not_after_a_product_with_the_reciprocal():
    loud, ties = torch.full((16,), 2688.0), torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
    factor = torch.tensor(15.0)
    held = quantise(torch.cat((loud, ties * factor))[None], NVFP4)
    assert (held.outer.item(), held.scales[0, 1].view(torch.float8_e4m3fn).item()) == (1.0, 15.0)
    assert held.codes[0, 16:].tolist() == [7, 0, 2, 2, 4, 4, 6, 6] * 2
    # The quotients as a product with the reciprocal, with a scale of 1.
    products = quantise(torch.cat((loud, ties * factor * (1 / factor)))[None], NVFP4)
    assert products.codes[0, 16:].tolist() != held.codes[0, 16:].tolist()


def one_row_louder() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and the same rows with a last row so large that a shared outer scale would make the E4M3 scales of
    the others subnormal. A smaller factor would have no effect: a power of two changes only E4M3's exponent."""
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    louder = rows.clone()
    louder[-1] *= 2.0**15
    return rows, louder


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=lambda form: form.name)
def test_a_later_row_does_not_change_an_earlier_one(form):
    """Rows are tokens in order. `fp8_blocks` is only for weights: its blocks span rows."""
    rows, louder = one_row_louder()
    first, then = (dequantise(quantise(values, form))[:-1] for values in (rows, louder))
    assert torch.equal(first, then) is (form is not FP8_BLOCKS)


def test_a_scale_of_a_whole_tensor_would_change_earlier_rows():
    """Control of the test above: published NVFP4 has one outer scale for a tensor."""
    rows, louder = one_row_louder()

    def per_tensor(values: torch.Tensor) -> torch.Tensor:
        # One row for the whole tensor, so that all values share one outer scale.
        return dequantise(quantise(values.view(1, -1), NVFP4)).view(values.shape)[:-1]

    assert not torch.equal(per_tensor(rows), per_tensor(louder))


def changed(held: QuantisedTensor, what: str, value: float) -> QuantisedTensor:
    part = getattr(held, what).clone()
    part.view(-1)[-1] = value
    parts = {"codes": held.codes, "scales": held.scales, "outer": held.outer, what: part}
    return QuantisedTensor(held.form, **parts)


def test_a_subnormal_e4m3_scale_is_valid():
    held = changed(quantise(torch.ones(1, 16), NVFP4), "scales", 1)
    assert dequantise(held).unique().tolist() == [held.outer.item() * 6 * 2.0**-9]


def test_a_nan_code_is_nan():
    assert isnan(dequantise(changed(quantise(torch.ones(1, 32), MXFP8), "codes", 0xFF))[0, -1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127 * 1.5])
@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=lambda form: form.name)
def test_values_without_codes_are_refused(form, value):
    values = torch.ones(3, 40)
    values[1, 7] = value
    with pytest.raises(ValueError, match="not finite, or beyond"):
        quantise(values, form)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        quantise(torch.ones(8), MXFP8)


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=lambda form: form.name)
def test_zeros_and_empty_matrices_have_codes(form):
    assert dequantise(quantise(torch.zeros(3, 40), form)).unique().tolist() == [0.0]
    assert dequantise(quantise(torch.zeros(0, 40), form)).shape == (0, 40)
    assert dequantise(quantise(torch.full((2, 33), 1e-45), form)).unique().tolist() == [0.0]


@pytest.fixture(params=[(form, way) for form in ROW_FORMATS.values() for way in ("loop", "operations")],
                ids=lambda given: f"{given[0].name} {given[1]}")  # fmt: skip
def row_form(request, monkeypatch) -> BlockFormat:
    """A format of activations, rounded by the compiled loop, or by torch's operations as on a GPU without Triton."""
    form, way = request.param
    if way == "operations":
        monkeypatch.setattr(quantise_module, "is_on_host", lambda _: False)
    return form


def tokens() -> torch.Tensor:
    """Return activations of 16 tokens, some of them with outliers, in rows that do not end with a block."""
    rows = torch.randn(16, 200, generator=torch.Generator().manual_seed(6))
    rows[3, 7], rows[9] = 80.0, rows[9] * 2.0**20
    return rows


def test_rows_are_rounded_to_the_values_of_codes_and_scales(row_form):
    rows = tokens().view(2, 8, 200)
    made = round_rows(rows, row_form)
    assert torch.equal(made, dequantise(quantise(rows, row_form))) and not torch.equal(made, rows)
    narrow = rows.bfloat16()
    assert torch.equal(round_rows(narrow, row_form), round_rows(narrow.float(), row_form).bfloat16())
    assert round_rows(rows[:0], row_form).shape == (0, 8, 200)


def test_rows_of_any_size_are_rounded_to_the_same_bits(row_form):
    generator = torch.Generator().manual_seed(7)
    sizes = torch.exp2(torch.randint(-140, 110, (60, 333), generator=generator).float())
    rows = torch.randn(60, 333, generator=generator) * torch.where(
        torch.arange(60)[:, None] % 2 == 0, sizes, sizes[:, :1]
    )
    ties = torch.arange(-4000, 4000).view(-1, 320) / 64
    for values in (rows, ties, rows.bfloat16().float()):
        bits = dequantise(quantise(values, row_form)).view(torch.int32)
        assert torch.equal(round_rows(values, row_form).view(torch.int32), bits)


def test_a_token_does_not_depend_on_its_batch(row_form):
    rows = tokens()
    whole = round_rows(rows, row_form)
    for one in range(len(rows)):
        assert torch.equal(round_rows(rows[one], row_form), whole[one])


def test_a_louder_last_token_does_not_change_earlier_ones(row_form):
    louder = tokens()
    louder[-1] *= 50
    assert torch.equal(round_rows(tokens(), row_form)[:-1], round_rows(louder, row_form)[:-1])


def test_a_louder_last_token_would_change_earlier_ones_with_an_outer_scale_of_the_tensor():
    """Control of the test above: published NVFP4 has one outer scale for a tensor, which is not a power of two."""

    def per_tensor(rows: torch.Tensor) -> torch.Tensor:
        outer = (rows.abs().max() / (6 * 448)).expand(1, len(rows), 1)
        return dequantise_by_torch(*quantise_by_torch(rows[None], NVFP4, outer), outer, NVFP4)[0, :-1]

    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(6))
    louder = rows.clone()
    louder[-1] *= 50
    assert float((per_tensor(rows) != per_tensor(louder)).float().mean()) > 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127 * 1.5])
def test_a_token_without_codes_is_returned_unchanged_and_no_other_one_is(row_form, value):
    bad = tokens()
    bad[5, 11] = value
    made, expected = round_rows(bad, row_form), round_rows(tokens(), row_form)
    others = [place for place in range(16) if place != 5]
    assert torch.equal(made[others], expected[others])
    assert torch.equal(made[5].view(torch.int32), bad[5].view(torch.int32))


def test_tokens_of_zeros_and_subnormal_numbers_become_zeros(row_form):
    rows = torch.stack([torch.zeros(40), torch.full((40,), 1e-42), torch.ones(40)])
    made = round_rows(rows, row_form)
    assert made[:2].unique().tolist() == [0.0] and made[2].unique().tolist() == pytest.approx([1.0], rel=0.05)
