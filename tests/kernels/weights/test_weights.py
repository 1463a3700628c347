"""Weights as bit patterns: every type without rounding or guesses; the held copy is not shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.records import tensor_infos
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.delta import apply_change, decode_delta, resolve_all
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights import tensor_parts
from tidemill.kernels.weights.bits import Weight, as_weight, total_fingerprint
from tidemill.kernels.weights.config import CodecChoice, PublishSettings
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.held import HeldVersion
from tidemill.kernels.weights.tensor_parts import TensorPart, merged_tensors
from tidemill.schemas.config import RunSettings

TORCH_TYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
]  # fmt: skip


def infos(held):
    """Return the manifest's tensor infos of a version that one process holds."""
    return merged_tensors([held.infos])


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_the_patterns_of_a_tensor_are_its_bits(dtype):
    width = torch.empty(0, dtype=dtype).element_size()
    patterns = np.random.default_rng(0).integers(0, 256, (6, 4 * width), dtype=np.uint8)
    tensor = torch.from_numpy(patterns).view(dtype)
    weight = as_weight("w", tensor)
    assert weight.dtype == str(dtype).removeprefix("torch.") and weight.bits.dtype == BY_NAME[weight.dtype].bits
    assert weight.bits.shape == tuple(tensor.shape)
    assert weight.bits.tobytes() == patterns.tobytes()


def test_a_view_or_a_tensor_with_a_gradient_is_read_in_its_own_order():
    tensor = torch.arange(12, dtype=torch.float32, requires_grad=True).reshape(3, 4)
    np.testing.assert_array_equal(as_weight("w", tensor.t()).bits.view(np.float32), tensor.detach().numpy().T)
    assert as_weight("w", tensor[0, 0]).bits.shape == ()


@pytest.mark.parametrize(("width", "dtype"), [(np.uint16, "bfloat16"), (np.uint32, "float32")])
def test_a_plain_array_has_the_only_possible_type(width, dtype):
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
def test_a_type_that_a_version_cannot_contain_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^layers\.0"):
        as_weight("layers.0", value)


def test_a_copy_is_independent_and_is_updated_tensor_by_tensor(first_view, next_view):
    old, new = first_view(), next_view(first_view(), seed=1)
    given = {name: Weight(weight.dtype, weight.bits.copy()) for name, weight in old.items()}
    held = HeldVersion.copy_of(4, given)
    for weight in given.values():
        weight.bits.fill(0)
    assert infos(held) == tensor_infos(old)
    seen = []
    for change in held.take_over(5, new):
        np.testing.assert_array_equal(change.old_bits, old[change.name].bits.reshape(-1))
        seen.append(change.name)
    assert seen == list(old)
    assert all((held.parts[name].bits == weight.bits.reshape(-1)).all() for name, weight in new.items())


@pytest.mark.parametrize("settings", [CodecSettings(), CodecSettings(block_elements=64)], ids=["whole", "in blocks"])
def test_a_delta_leads_a_copy_to_the_next_version(first_view, next_view, settings):
    old, new = first_view(), next_view(first_view(), seed=1)
    held = HeldVersion.copy_of(0, old)
    sender = HeldVersion.copy_of(0, old)
    with DeltaShard(1, 0, sender.take_over(1, new), settings=settings) as shard:
        sender.becomes(1, [shard.covered])
        shard._spool.seek(0)
        blocks = list(decode_delta([shard._spool.read()], 1, 0))
    for block in blocks:
        for change in resolve_all(block, {name: part.bits for name, part in held.parts.items()}):
            apply_change(change, held.parts[change.name].bits)
    assert (sender.version, infos(sender)) == (1, tensor_infos(new))
    assert all((held.parts[name].bits == part.bits).all() for name, part in sender.parts.items())
    assert total_fingerprint(infos(held)) + shard.change == total_fingerprint(infos(sender))


def test_a_snapshot_does_not_change(first_view, next_view):
    held = HeldVersion.copy_of(0, first_view())
    before = held.snapshot()
    list(held.take_over(1, next_view(first_view(), seed=1)))
    held.becomes(1, [])
    assert before.version == 0
    assert all((before.parts[name].bits == weight.bits.reshape(-1)).all() for name, weight in first_view().items())


def test_tensors_are_compared_before_any_is_moved_to_the_processor(first_view):
    held = HeldVersion.copy_of(0, {"w": torch.zeros(4, 4)})
    held.check(1, {"w": torch.zeros(4, 4, device="meta")})
    with pytest.raises(VersionError, match=r"w is float32\[5, 4\], in version 0 it is float32\[4, 4\]"):
        held.check(1, {"w": torch.zeros(5, 4, device="meta")})


def test_parts_are_compared_together_with_their_positions():
    whole = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    held = HeldVersion.copy_of(0, {"w": part("w", whole, 3, 9)})
    held.check(1, {"w": part("w", whole, 3, 9)})
    with pytest.raises(VersionError, match="has 3 elements of w from 3 on, of version 0 it holds 6 from 3 on"):
        held.check(1, {"w": part("w", whole, 3, 6)})
    held.check(1, {"w": whole}, cuts=False)
    with pytest.raises(VersionError, match="has 12 elements of w from 0 on"):
        list(held.take_over(1, {"w": whole}))


def part(name, whole, start, end):
    bits = as_weight(name, whole).bits.reshape(-1)
    return TensorPart(name, "bfloat16", tuple(whole.shape), start, bits[start:end])


@pytest.mark.parametrize(
    "wrong",
    [
        TensorPart("other", "bfloat16", (4,), 0, np.zeros(4, np.uint16)),
        TensorPart("w", "bfloat16", (4,), 1, np.zeros(4, np.uint16)),
        TensorPart("w", "bfloat16", (4,), -1, np.zeros(4, np.uint16)),
        TensorPart("w", "bfloat16", (2, 2), 0, np.zeros((2, 2), np.uint16)),
    ],
    ids=["another tensor's", "past the end", "before the start", "not flat"],
)
def test_a_part_that_does_not_belong_to_the_tensor_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^w: it is elements"):
        HeldVersion.copy_of(0, {"w": wrong})


@pytest.mark.parametrize("bits", [np.zeros(4, np.uint16), torch.zeros(4, dtype=torch.uint16)], ids=["host", "device"])
def test_a_part_of_an_impossible_type_is_refused(bits):
    with pytest.raises(TypeError, match="int8 has patterns of uint8"):
        HeldVersion.copy_of(0, {"w": TensorPart("w", "int8", (4,), 0, bits)})


def test_a_version_on_a_device_is_an_independent_copy_with_the_same_deltas_as_on_the_cpu(monkeypatch):
    """A tensor in the CPU's memory stands for one on a device."""
    monkeypatch.setattr(tensor_parts, "is_on_host", lambda array: isinstance(array, np.ndarray))
    old = {"w": torch.randn(300, 20).to(torch.bfloat16), "norm": torch.ones(7)}
    new = {name: tensor + (torch.rand(tensor.shape) < 0.1) for name, tensor in old.items()}
    said, sent = [], []
    for on_device in (False, True):
        held = HeldVersion.copy_of(0, old, on_device=on_device)
        assert {isinstance(part.bits, torch.Tensor) for part in held.parts.values()} == {on_device}
        given = {name: tensor.clone() for name, tensor in new.items()}
        with DeltaShard(1, 0, held.take_over(1, given, on_device=on_device)) as shard:
            sent.append(b"".join(chunk.payload for chunk in shard._chunks(RunSettings(run_id="r"))))
            held.becomes(1, [shard.covered])
        for tensor in given.values():
            tensor.zero_()
        assert infos(held) == tensor_infos(new)
        said.append([part.fingerprint() for part in held.snapshot().parts.values()])
    assert sent[0] == sent[1] and len(sent[0]) > 100
    assert said[0] == said[1]


def test_a_rebuilt_version_moves_to_the_device_at_the_first_comparison(monkeypatch):
    monkeypatch.setattr(tensor_parts, "is_on_host", lambda array: isinstance(array, np.ndarray))
    made_again = HeldVersion.copy_of(0, {"w": torch.zeros(9)})
    ((_, _, before, after, *_),) = made_again.take_over(1, {"w": torch.ones(9)}, on_device=True)
    assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    assert isinstance(made_again.parts["w"].bits, torch.Tensor)
    made_again.becomes(1, [{"w": (1, ZERO)}])
    assert infos(made_again) == tensor_infos({"w": torch.ones(9)})


def test_the_configuration_has_all_choices_of_the_codec():
    """The choices are defined twice, since the configuration must not import the codec's libraries."""
    from typing import get_args, get_type_hints

    from tidemill.kernels.block import BLOCK_ELEMENTS

    hints = get_type_hints(CodecSettings)
    fields = CodecChoice.model_fields
    assert fields.keys() == hints.keys()
    assert get_args(fields["coder"].annotation) == get_args(hints["coder"])
    assert get_args(fields["digest"].annotation) == get_args(hints["digest"])
    assert CodecSettings(**PublishSettings().codec.model_dump()) == CodecSettings()
    assert CodecChoice().block_elements == BLOCK_ELEMENTS
    with pytest.raises(ValueError, match="less than or equal"):
        CodecChoice(block_elements=BLOCK_ELEMENTS + 1)
