"""The steps of publication from ranks, in a group of one: parts, distribution, merging, exchange."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.records import tensor_infos
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.anchor import write_anchor
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import WeightFilesError
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.tensor_parts import (
    TensorPart,
    balanced,
    merged_tensors,
    part_info,
)
from tidemill.trainer import serving_view as views
from tidemill.trainer.serving_view import local_parts, serving_view


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def placed(placements, mesh_shape=(1,)):
    """Return a module whose only weight has the given placements on a mesh of one rank."""
    mesh = DeviceMesh("cpu", torch.zeros(mesh_shape, dtype=torch.int))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, placements))
    return module


def cut(view, bounds):
    """Yield the parts of `len(bounds) + 1` ranks. Each tensor is split at the same shares of its elements."""
    for low, high in zip((0.0, *bounds), (*bounds, 1.0), strict=True):
        yield {name: part_of(name, bits, int(low * bits.size), int(high * bits.size)) for name, bits in view.items()}


def part_of(name, bits, start, end):
    return TensorPart(name, "bfloat16", bits.shape, start, bits.reshape(-1)[start:end])


def reports(view, bounds=(0.3, 0.3, 0.7)):
    return [{name: part_info(part) for name, part in parts.items()} for parts in cut(view, bounds)]


VIEW = {
    "a": np.arange(60, dtype=np.uint16).reshape(15, 4),
    "b": np.arange(7, dtype=np.uint16),
    "c": np.uint16([[9]]),
    "none": np.zeros((0, 3), np.uint16),
}


def test_the_first_rank_has_all_parts_of_an_unsharded_model():
    model = Tied()
    view, parts = serving_view(model), local_parts(model, first=True)
    assert list(parts) == list(view) == ["embed.weight", "head.bias"]
    for name, bits in view.items():
        part = parts[name]
        assert (part.start, part.total, part.shape, part.dtype) == (0, bits.size, bits.shape, "bfloat16")
        np.testing.assert_array_equal(part.bits, bits.reshape(-1))
    others = local_parts(model, first=False)
    assert list(others) == list(view)
    assert all(part.bits.size == 0 and part.shape == view[name].shape for name, part in others.items())
    assert others["head.bias"].fingerprint() == ZERO


@pytest.mark.parametrize("on_device", [False, True])
def test_a_part_is_a_snapshot(monkeypatch, on_device):
    """A tensor in the CPU's memory stands for one on a device."""
    if on_device:
        monkeypatch.setattr(views, "is_on_host", lambda array: isinstance(array, np.ndarray))
    model = Tied()
    part = local_parts(model, first=True, on_device=on_device)["head.bias"]
    assert isinstance(part.bits, torch.Tensor if on_device else np.ndarray)
    before = part.hosted().bits.copy()
    with torch.no_grad():
        model.head.bias.add_(1.0)
    np.testing.assert_array_equal(part.hosted().bits, before)


def test_an_outline_needs_no_memory():
    part = TensorPart("w", "bfloat16", (1 << 20, 1 << 20), 0, np.zeros(0, np.uint16))
    assert part.outline().bits.shape == part.shape
    assert part.outline().bits.strides == (0, 0)


@pytest.mark.parametrize(
    "placements", [[Shard(0)], [Replicate()], [Shard(0), Shard(0)], [_StridedShard(0, split_factor=1), Shard(0)]]
)
def test_placements_that_can_be_published(ranks, placements):
    (part,) = local_parts(placed(placements, (1,) * len(placements)), first=False).values()
    assert (part.start, part.bits.size) == (0, 12)


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [([Shard(1)], (1,)), ([Partial()], (1,)), ([Shard(0), Shard(1)], (1, 1)), ([Shard(0), Partial()], (1, 1))],
)
def test_other_placements_are_refused(ranks, placements, mesh_shape):
    with pytest.raises(ValueError, match=r"weight is placed as .* only weights sharded over their first dimension"):
        local_parts(placed(placements, mesh_shape), first=True)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_assignment_is_balanced_and_keeps_the_order(sizes, bins):
    chosen = balanced(sizes, bins)
    assert list(chosen) == list(sizes)
    loads = [sum(size for name, size in sizes.items() if chosen[name] == to) for to in range(bins)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert balanced(dict(reversed(sizes.items())), bins) == chosen


def test_assignment_to_no_bin_is_refused():
    with pytest.raises(ValueError, match="at least one bin"):
        balanced({"w": 1}, 0)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), max_size=5).map(sorted))
def test_merged_parts_are_the_whole_for_every_split(bounds):
    assert merged_tensors(reports(VIEW, bounds)) == tensor_infos(VIEW)


def test_the_order_of_the_ranks_does_not_matter():
    assert merged_tensors(reports(VIEW)[::-1]) == tensor_infos(VIEW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 1}, "a: elements 0 to 1 are held by no rank"),
        ({"n": 19}, "a: elements 18 to 19 are held by several ranks"),
        ({"n": 10}, "a: elements 10 to 18 are held by no rank"),
        ({"name": "z"}, "do not hold the same tensors in the same order"),
        ({"shape": (4, 15)}, "do not hold the same tensors in the same order"),
        ({"dtype": "float16"}, "do not hold the same tensors in the same order"),
    ],
)
def test_parts_that_do_not_form_a_whole_are_refused(changes, message):
    first, *rest = reports(VIEW)
    (name, (place, made)), *others = first.items()
    changed = changes.get("name", name), (place._replace(**{k: v for k, v in changes.items() if k != "name"}), made)
    wrong = dict([changed, *others])
    with pytest.raises(VersionError, match=message):
        merged_tensors([wrong, *rest])


def test_a_missing_rank_is_detected():
    with pytest.raises(VersionError, match="a: the ranks hold 42 of 60 elements"):
        merged_tensors(reports(VIEW)[:-1])
    with pytest.raises(VersionError, match="different numbers of tensors"):
        merged_tensors([*reports(VIEW), {}])


def test_a_rank_makes_at_least_one_shard():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        PublishSettings(shards=0)


@pytest.fixture
def base_model(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "float32"}))
    return base


def test_an_anchor_of_several_types_is_a_checkpoint(ranks, base_model, tmp_path):
    parts = {
        "norm": TensorPart("norm", "float32", (3,), 0, np.arange(3, dtype=np.uint32)),
        "odd": TensorPart("odd", "float8_e4m3fn", (5,), 0, np.arange(5, dtype=np.uint8)),
        "w": TensorPart("w", "bfloat16", (2, 2), 0, np.arange(4, dtype=np.uint16)),
    }
    write_anchor(str(tmp_path / "v1"), base_model, parts, ranks=ranks)
    with safe_open(tmp_path / "v1" / "model.safetensors", framework="pt") as opened:
        assert {name: str(opened.get_tensor(name).dtype) for name in parts} == {
            "norm": "torch.float32",
            "odd": "torch.float8_e4m3fn",
            "w": "torch.bfloat16",
        }


@pytest.mark.parametrize("file_bytes", [1 << 30, 1])
def test_an_anchor_of_one_rank_has_the_same_bytes_as_that_of_one_process(ranks, base_model, tmp_path, file_bytes):
    weights = {
        "w": Weight("bfloat16", np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "norm": Weight("float32", np.arange(3, dtype=np.uint32)),
        "embed": Weight("bfloat16", np.arange(4, dtype=np.uint16)),
    }
    parts = {n: TensorPart(n, w.dtype, w.bits.shape, 0, w.bits.reshape(-1)) for n, w in weights.items()}
    written = [tmp_path / "one process", tmp_path / "one rank"]
    write_anchor(str(written[0]), base_model, weights, file_bytes)
    write_anchor(str(written[1]), base_model, parts, file_bytes, ranks)
    held = [{file.name: file.read_bytes() for file in directory.iterdir()} for directory in written]
    assert held[0] == held[1]


def test_a_base_without_a_model_is_an_error_on_every_rank(ranks, tmp_path):
    (parts,) = cut(VIEW, ())
    with pytest.raises(WeightFilesError, match="rank 0: WeightFilesError") as raised:
        write_anchor(str(tmp_path / "v1"), tmp_path, parts, ranks=ranks)
    assert isinstance(raised.value.__cause__, WeightFilesError)
    assert not (tmp_path / "v1").exists()
