"""Weights as bit patterns: every type as it is, nothing rounded, nothing guessed; the held copy is nobody else's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill.kernels.delta import apply_change, decode_delta, encode_delta, resolve_all
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.weights.bits import Weight, as_weight, changed, tensor_infos
from tidemill.kernels.weights.config import CodecChoice, PublishSettings
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.held import HeldVersion

TORCH_TYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_a_tensor_s_patterns_are_its_own(dtype):
    width = torch.empty(0, dtype=dtype).element_size()
    patterns = np.random.default_rng(0).integers(0, 256, (6, 4 * width), dtype=np.uint8)
    tensor = torch.from_numpy(patterns).view(dtype)
    weight = as_weight("w", tensor)
    assert weight.dtype == str(dtype).removeprefix("torch.") and weight.bits.dtype == BY_NAME[weight.dtype].bits
    assert weight.bits.shape == tuple(tensor.shape)
    assert weight.bits.tobytes() == patterns.tobytes()


def test_a_tensor_that_is_a_view_or_has_a_gradient_is_read_in_its_own_order():
    tensor = torch.arange(12, dtype=torch.float32, requires_grad=True).reshape(3, 4)
    np.testing.assert_array_equal(as_weight("w", tensor.t()).bits.view(np.float32), tensor.detach().numpy().T)
    assert as_weight("w", tensor[0, 0]).bits.shape == ()


@pytest.mark.parametrize(("width", "dtype"), [(np.uint16, "bfloat16"), (np.uint32, "float32")])
def test_a_plain_array_stands_for_the_one_type_that_it_can(width, dtype):
    assert as_weight("w", np.zeros(3, width)).dtype == dtype


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, np.uint8),
        np.zeros(3, np.float32),
        np.zeros(3, np.uint64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.float64),
        Weight("bfloat16", np.zeros(3, np.uint8)),
        Weight("bf16", np.zeros(3, np.uint16)),
    ],
)
def test_what_a_version_cannot_carry_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^layers\.0"):
        as_weight("layers.0", value)


def test_a_copy_is_its_own_and_advances_tensor_by_tensor(first_view, next_view):
    old, new = first_view(), next_view(first_view(), seed=1)
    given = {name: Weight(weight.dtype, weight.bits.copy()) for name, weight in old.items()}
    held = HeldVersion.copy_of(4, given)
    for weight in given.values():
        weight.bits.fill(0)
    assert held.tensors == tensor_infos(old)
    seen = []
    for change in held.take_over(5, new):
        np.testing.assert_array_equal(change.old_bits, old[change.name].bits)
        seen.append(change.name)
    assert seen == list(old)
    assert all((held.weights[name].bits == weight.bits).all() for name, weight in new.items())


def test_a_delta_leads_a_copy_to_the_next_version(first_view, next_view):
    old, new = first_view(), next_view(first_view(), seed=1)
    held = HeldVersion.copy_of(0, old)
    changes = {}
    for block in decode_delta(encode_delta(1, 0, HeldVersion.copy_of(0, old).take_over(1, new)), 1, 0):
        for change in resolve_all(block, {name: weight.bits for name, weight in held.weights.items()}):
            apply_change(change, held.weights[change.name].bits)
            changes[change.name] = change.target - change.base
    held.becomes(1, changes)
    assert (held.version, held.tensors) == (1, tensor_infos(new))
    assert held.tensors == changed(tensor_infos(old), [changes])


def test_a_snapshot_stays_what_it_was(first_view, next_view):
    held = HeldVersion.copy_of(0, first_view())
    before = held.snapshot()
    list(held.take_over(1, next_view(first_view(), seed=1)))
    held.becomes(1, {})
    assert before.version == 0
    assert all((before.weights[name].bits == weight.bits).all() for name, weight in first_view().items())


def test_tensors_are_compared_before_any_is_moved_to_the_processor(first_view):
    held = HeldVersion.copy_of(0, {"w": torch.zeros(4, 4)})
    held.check(1, {"w": torch.zeros(4, 4, device="meta")})
    with pytest.raises(VersionError, match=r"w is float32\[5, 4\], in version 0 it is float32\[4, 4\]"):
        held.check(1, {"w": torch.zeros(5, 4, device="meta")})


def test_the_configuration_knows_the_codec_s_choices():
    """It is written down twice, since the configuration must not import the codec's libraries."""
    from typing import get_args, get_type_hints

    from tidemill.kernels.settings import BLOCK_ELEMENTS, CodecSettings

    hints = get_type_hints(CodecSettings)
    fields = CodecChoice.model_fields
    assert fields.keys() == hints.keys()
    assert get_args(fields["coder"].annotation) == get_args(hints["coder"])
    assert get_args(fields["digest"].annotation) == get_args(hints["digest"])
    assert CodecSettings(**PublishSettings().codec.model_dump()) == CodecSettings()
    assert CodecChoice().block_elements == BLOCK_ELEMENTS
    with pytest.raises(ValueError, match="less than or equal"):
        CodecChoice(block_elements=BLOCK_ELEMENTS + 1)
