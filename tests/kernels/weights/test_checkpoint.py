"""Checkpoints are mapped without conversion, from one file or several; damaged or different ones are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tidemill.kernels.weights.checkpoint import INDEX, WEIGHTS, WeightFilesError, map_checkpoint, tensor_changes

TYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]


def tensor(dtype="bfloat16", shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = getattr(torch, dtype).itemsize
    whole = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator)
    return whole.view(getattr(torch, dtype))


def patterns(weights):
    return weights.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", TYPES)
def test_patterns_equal_those_of_the_file(tmp_path, dtype):
    weights = tensor(dtype)
    save_file({"a.b": weights, "scalar": weights[0, 0].clone(), "empty": weights[:0].clone()}, tmp_path / WEIGHTS)
    mapped = map_checkpoint(tmp_path / WEIGHTS)
    assert {name: t.dtype for name, t in mapped.items()} == dict.fromkeys(["a.b", "scalar", "empty"], dtype)
    assert (mapped["a.b"].bits.shape, mapped["scalar"].bits.shape, mapped["empty"].bits.shape) == ((3, 5), (), (0, 5))
    np.testing.assert_array_equal(mapped["a.b"].bits.view(np.uint8), patterns(weights))
    assert not mapped["a.b"].bits.flags.writeable


def test_a_directory_of_one_file_or_of_several(tmp_path):
    one, two = tensor(seed=1), tensor(seed=2)
    save_file({"one": one}, tmp_path / WEIGHTS)
    assert list(map_checkpoint(tmp_path)) == ["one"]
    save_file({"two": two}, tmp_path / "second.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"one": WEIGHTS, "two": "second.safetensors"}}))
    mapped = map_checkpoint(tmp_path)
    np.testing.assert_array_equal(mapped["two"].bits.view(np.uint8), patterns(two))
    assert mapped.keys() == {"one", "two"}


def test_the_changes_between_two_checkpoints_are_in_the_order_of_names(tmp_path):
    base, target = tmp_path / "base.safetensors", tmp_path / "target.safetensors"
    save_file({"b": tensor(seed=1), "a": tensor(seed=2)}, base)
    save_file({"a": tensor(seed=3), "b": tensor(seed=1)}, target)
    first, second = tensor_changes(map_checkpoint(base), map_checkpoint(target))
    assert (first.name, second.name, first.dtype) == ("a", "b", "bfloat16")
    np.testing.assert_array_equal(second.old_bits, second.new_bits)
    np.testing.assert_array_equal(first.new_bits.view(np.uint8), patterns(tensor(seed=3)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": tensor()}, "in one checkpoint only, such as 'b'"),
        ({"a": tensor(), "b": tensor(shape=(5, 3))}, r"b: bfloat16 \(3, 5\) became bfloat16 \(5, 3\)"),
        ({"a": tensor(), "b": tensor("float16")}, "became float16"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(tmp_path, other, message):
    save_file({"a": tensor(), "b": tensor()}, tmp_path / "base.safetensors")
    save_file(other, tmp_path / "target.safetensors")
    with pytest.raises(WeightFilesError, match=message):
        tensor_changes(map_checkpoint(tmp_path / "base.safetensors"), map_checkpoint(tmp_path / "target.safetensors"))


def test_damage_is_refused(tmp_path):
    save_file({"a": tensor()}, tmp_path / WEIGHTS)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(WeightFilesError, match="not a safetensors file"):
            map_checkpoint(tmp_path / "cut.safetensors")
    with pytest.raises(WeightFilesError, match="not a safetensors file"):
        map_checkpoint(tmp_path / "none")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_a_damaged_index_is_refused(tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(WeightFilesError, match="not the index"):
        map_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_with_a_file_outside_its_directory_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightFilesError, match="outside its directory"):
        map_checkpoint(tmp_path)


def test_types_that_a_delta_cannot_carry_are_refused(tmp_path):
    save_file({"position_ids": torch.arange(3)}, tmp_path / WEIGHTS)
    with pytest.raises(WeightFilesError, match="position_ids has dtype I64"):
        map_checkpoint(tmp_path)
