"""Anchors are whole Hugging Face checkpoints, lossless, and complete or absent, on any fsspec file system."""

import json
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.kernels.weights.conftest import read_anchor
from tests.trainer.conftest import tiny_model
from tidemill.kernels.weights.anchor import MARKER, anchor_uri, anchor_weights, fetch_anchor, write_anchor
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import INDEX, WEIGHTS, WeightFilesError
from tidemill.schemas.stored_object import StoreUnavailableError
from tidemill.trainer.serving_view import serving_view

VIEW = {"w": np.arange(40, dtype=np.uint16).reshape(5, 8), "b": np.ones(3, np.uint16)}
TOKENIZER = {"tokenizer.json": '{"model": {}}', "tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    return tiny_model(tied=request.param)


@pytest.fixture
def base_model(tmp_path, model):
    return with_tokenizer(tmp_path / "base", model)


@pytest.fixture
def base(tmp_path):
    """A directory with a configuration and a tokenizer, without weights."""
    return with_tokenizer(tmp_path / "base")


def with_tokenizer(directory, model=None):
    if model is not None:
        model.save_pretrained(directory)
    else:
        directory.mkdir()
        (directory / "config.json").write_text('{"model_type": "qwen3"}')
    for name, text in TOKENIZER.items():
        (directory / name).write_text(text)
    (directory / "optimizer.bin").write_bytes(b"left behind")
    return directory


@pytest.fixture(params=["directory", "object store"])
def uri(request, tmp_path):
    if request.param == "directory":
        yield anchor_uri(str(tmp_path / "store"), "run", "main", 20)
        return
    root = f"memory://{tmp_path.name}"
    yield anchor_uri(root, "run", "main", 20)
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


def assert_equal_views(left, right):
    assert left.keys() == right.keys()
    for name, bits in left.items():
        np.testing.assert_array_equal(bits, right[name], err_msg=name)


def test_a_view_has_the_names_of_the_checkpoint(model, base_model):
    with safe_open(base_model / "model.safetensors", framework="pt") as opened:
        assert sorted(serving_view(model)) == sorted(opened.keys())


def test_a_view_is_a_snapshot_of_rounded_weights(model):
    before = serving_view(model)
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = model.state_dict()[name].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(before[name], rounded)
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)
    np.testing.assert_array_equal(before[name], rounded)
    assert not np.array_equal(serving_view(model)[name], rounded)


def test_a_view_of_bf16_weights_is_a_copy():
    linear = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    before = serving_view(linear)["weight"].copy()
    view = serving_view(linear)
    with torch.no_grad():
        linear.weight.add_(1.0)
    np.testing.assert_array_equal(view["weight"], before)


def test_integers_cannot_be_served():
    module = torch.nn.Module()
    module.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="only floating-point weights"):
        serving_view(module)


def mixed_weights(seed=0):
    """Return one tensor of each type that a version can contain, with every pattern of the narrow types."""
    random = np.random.default_rng(seed)
    u1, u2 = np.arange(256, dtype=np.uint8), np.arange(1 << 16, dtype=np.uint16)
    return {
        "b.fp8": Weight("float8_e4m3fn", u1.reshape(16, 16)),
        "a.fp8": Weight("float8_e5m2", u1),
        "int8": Weight("int8", u1),
        "int4": Weight("int4", u1.reshape(2, 128)),
        "fp16": Weight("float16", u2.reshape(256, 256)),
        "bf16": Weight("bfloat16", u2[:3]),
        "norm": Weight("float32", random.integers(0, 1 << 32, 7, dtype=np.uint32)),
        "scale": Weight("float32", np.array(0x7FC00001, np.uint32)),
        "empty": Weight("bfloat16", np.zeros((0, 4), np.uint16)),
    }


@pytest.mark.parametrize("file_bytes", [1 << 30, 70_000, 1])
def test_every_type_keeps_its_bits_and_its_name_in_one_file_or_many(base, uri, file_bytes):
    weights = mixed_weights()
    anchor = write_anchor(uri, base, weights, file_bytes)
    read = dict(anchor_weights(anchor.uri))
    assert_equal_views(read_anchor(uri), {name: weight.bits for name, weight in weights.items()})
    assert {n: w.dtype for n, w in read.items()} == {n: w.dtype for n, w in weights.items()} | {"int4": "uint8"}
    assert all(weight.bits.shape == weights[name].bits.shape for name, weight in read.items())


def test_a_directory_beside_the_tokenizer_s_files_is_not_copied(base, tmp_path):
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "vocab.json").write_text("{}")
    anchor = write_anchor(anchor_uri(str(tmp_path), "run", "main", 0), base, VIEW)
    names = {path.name for path in Path(anchor.uri.removeprefix("file://")).iterdir()}
    assert names == {"config.json", WEIGHTS, MARKER, *TOKENIZER}


def test_weights_of_several_files_load_through_their_index(model, base_model, tmp_path):
    view = serving_view(model)
    anchor = write_anchor(anchor_uri(str(tmp_path), "run", "main", 0), base_model, view, file_bytes=20_000)
    directory = Path(anchor.uri.removeprefix("file://"))
    index = json.loads((directory / INDEX).read_text())
    assert index["weight_map"].keys() == view.keys() and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(bits.nbytes for bits in view.values())
    assert_equal_views(serving_view(AutoModelForCausalLM.from_pretrained(directory)), view)


def test_writing_again_replaces_all_older_files(base, uri):
    write_anchor(uri, base, {"a": np.zeros(4, np.uint16), "b": np.ones(4, np.uint16)}, file_bytes=8)
    write_anchor(uri, base, {"a": np.ones(3, np.uint16)})
    assert_equal_views(read_anchor(uri), {"a": np.ones(3, np.uint16)})
    filesystem, path = fsspec.core.url_to_fs(uri)
    assert sum(file.endswith(".safetensors") for file in filesystem.ls(path, detail=False)) == 1


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        (
            {"w": Weight("float16", np.zeros(9, np.uint16)), "norm": Weight("float32", np.zeros(3, np.uint32))},
            "float16",
        ),
        ({"w": np.zeros(9, np.uint16), "norm": Weight("float32", np.zeros(3, np.uint32))}, "bfloat16"),
        ({"w": Weight("float8_e4m3fn", np.zeros(9, np.uint8)), "norm": np.zeros(3, np.uint16)}, "the base's"),
    ],
)
def test_the_configuration_has_the_weights_dtype(base, tmp_path, weights, dtype):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "the base's"}))
    write_anchor(str(tmp_path / "anchor"), base, weights)
    assert json.loads((tmp_path / "anchor" / "config.json").read_text())["dtype"] == dtype


def test_writing_needs_no_memory_in_addition_to_the_weights(base, tmp_path):
    weights = {f"w{i}": np.zeros(4 << 20, np.uint16) for i in range(8)}
    tracemalloc.start()
    try:
        write_anchor(str(tmp_path / "anchor"), base, weights)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, "64 MiB of weights"


def test_transformers_loads_an_anchor(model, base_model, tmp_path):
    view = serving_view(model)
    anchor = write_anchor(anchor_uri(str(tmp_path), "run", "main", 0), base_model, view)
    directory = anchor.uri.removeprefix("file://")
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    assert_equal_views(serving_view(loaded), view)
    files = {file.name: file for file in Path(directory).iterdir()}
    assert files.keys() >= TOKENIZER.keys() | {"config.json", "model.safetensors"}
    assert "optimizer.bin" not in files
    assert anchor.n_bytes == sum(file.stat().st_size for name, file in files.items() if name != MARKER)


@pytest.mark.parametrize("operation", ["open", "pipe_file", "rm_file"])
def test_a_store_that_fails_during_an_overwrite_leaves_no_anchor(base, uri, monkeypatch, operation):
    write_anchor(uri, base, VIEW)
    filesystem, path = fsspec.core.url_to_fs(uri)

    def full(*_arguments, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(filesystem, operation, full)
    with pytest.raises(StoreUnavailableError, match="no space"):
        write_anchor(uri, base, VIEW)
    monkeypatch.undo()
    if operation == "rm_file":  # nothing was changed
        assert filesystem.exists(f"{path}/{MARKER}")
        return
    with pytest.raises(WeightFilesError, match="no finished anchor"):
        read_anchor(uri)


@pytest.mark.parametrize(
    ("reader", "name"), [("weights", WEIGHTS), *(("copy", name) for name in (WEIGHTS, "config.json", *TOKENIZER))]
)
def test_an_anchor_that_is_damaged_unfinished_or_missing_is_refused(base, uri, tmp_path, reader, name):
    """Each file of an engine's copy is checked: configuration and tokenizer determine the meaning of its tokens."""

    def read(at):
        return read_anchor(at) if reader == "weights" else fetch_anchor(at, tmp_path / "staging")

    write_anchor(uri, base, VIEW)
    filesystem, path = fsspec.core.url_to_fs(uri)
    whole = read(uri)
    if reader == "copy":
        assert {"config.json", WEIGHTS, *TOKENIZER} <= {file.name for file in whole.iterdir()}
        assert (whole == Path(path)) == (not uri.startswith("memory:"))
    damaged = bytearray(filesystem.cat_file(f"{path}/{name}"))
    damaged[-1] ^= 1
    filesystem.pipe_file(f"{path}/{name}", bytes(damaged))
    with pytest.raises(WeightFilesError, match=f"{name} of anchor .* was changed after it was written"):
        read(uri)
    filesystem.rm_file(f"{path}/{name}")
    with pytest.raises(WeightFilesError, match=f"has no file {name}"):
        read(uri)
    filesystem.rm_file(f"{path}/{MARKER}")
    with pytest.raises(WeightFilesError, match=f"no finished anchor .* it has no {MARKER}, which is written last"):
        read(uri)
    with pytest.raises(WeightFilesError, match=r"no finished anchor .* does not exist; is the store's root the one"):
        read(f"{uri}-other")


@pytest.mark.parametrize(
    "marker",
    [
        b"",
        b"[]",
        b'{"format": 1}',
        b'{"format": 2, "files": {}}',
        json.dumps({"format": 1, "files": {"../../escape": {"n_bytes": 1, "digest": ""}}}).encode(),
    ],
)
def test_a_damaged_marker_is_refused(base, uri, marker):
    write_anchor(uri, base, VIEW)
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.pipe_file(f"{path}/{MARKER}", marker)
    with pytest.raises(WeightFilesError, match="marker"):
        read_anchor(uri)


def test_a_base_without_a_model_is_refused(tmp_path, uri):
    with pytest.raises(WeightFilesError, match="not a Hugging Face model directory"):
        write_anchor(uri, tmp_path, {"w": np.zeros(4, np.uint16)})
