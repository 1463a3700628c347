"""Models of which each rank reads only its own rows: they equal a whole load bit for bit, or are loaded whole."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.trainer import rank_driver
from tests.trainer.families import make_model
from tidemill.trainer import stored_model
from tidemill.trainer.choices import Routing
from tidemill.trainer.model import load_model
from tidemill.trainer.routing import RoutingReplay
from tidemill.trainer.stored_model import NotByRowsError, StoredModel

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"
ODD = {"vocab_size": 161, "head_dim": 10, "intermediate_size": 97}
HALF = {"compute": "bfloat16"}
JOBS = {
    "experts": (2, "Qwen3Moe", {"experts": "grouped_mm"}),
    "one in half": (1, "Qwen3", HALF),
    "experts in half": (1, "Qwen3Moe", HALF),
    "untied in half": (2, "Llama", HALF),
    "odd": (3, "Odd", {}),
    "divided experts": (2, "Qwen3Moe", {"expert_parallel": 2, **HALF}),
    "unevenly divided experts": (4, "Six", {"expert_parallel": 2}),
    "more ranks than experts": (3, "Qwen3Moe", {}),
    "stacked in several files": (2, "Stacked", {}),
    "tied, with scales over ranks": (2, "Qwen3", {"serving_format": "fp8_blocks"}),
}

UNTRAINABLE = {
    "scaled": ("Granite", {"logits_scaling": 8.0}, "Granite.* cannot be trained: its logits are not the output of its"),
    "windowed": ("Mistral", {"sliding_window": 100}, "Mistral.* cannot be trained: layer 0 has a sliding window"),
}


def stacked(directory: Path, model: PreTrainedModel) -> None:
    """Write a checkpoint as an anchor contains it: with the model's own names, here in two files."""
    model.config.save_pretrained(directory)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    names, places = list(tensors), {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, directory / file)
        places |= dict.fromkeys(own, file)
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture(scope="module")
def laid(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("laid")
    for family in ("Qwen3", "Llama", "Qwen3Moe"):
        make_model(family).bfloat16().save_pretrained(root / family)
    make_model("Llama", **ODD).save_pretrained(root / "Odd")
    make_model("Qwen3Moe", num_experts=6).bfloat16().save_pretrained(root / "Six")
    stacked(root / "Stacked", make_model("Qwen3Moe"))
    jobs = [
        {"name": name, "ranks": n, "scenario": "laid", "options": {"model": str(root / model), "settings": settings}}
        for name, (n, model, settings) in JOBS.items()
    ]
    for name, (family, changes, _) in UNTRAINABLE.items():
        make_model(family, **changes).bfloat16().save_pretrained(root / family)
        jobs.append({"name": name, "ranks": 2, "scenario": "refused", "options": {"model": str(root / family)}})
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", rank_driver.__name__, str(root / "jobs.json")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    return root


@pytest.mark.parametrize("name", JOBS)
def test_rows_that_ranks_read_equal_a_whole_load_bit_for_bit(laid, name):
    ranks, model, _ = JOBS[name]
    ended = json.loads((laid / f"{name}.json").read_text())
    assert not any(ended), "".join((laid / f"{name}-{rank}.log").read_text() for rank in range(ranks))
    found = [json.loads((laid / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    for rank in found:
        assert (rank["differing"], rank["differing after a step"]) == ([], [])
        assert "buffer/model.rotary_emb.inv_freq" in rank["names"]
    assert ("master/lm_head.weight" in found[0]["names"]) == (model != "Qwen3"), "tied weights are one"


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_all_ranks_refuse_a_model_that_packed_rows_compute_wrongly(laid, name):
    assert json.loads((laid / f"{name}.json").read_text()) == [0, 0]
    for rank in (0, 1):
        assert re.match(UNTRAINABLE[name][2], json.loads((laid / f"{name}-{rank}.json").read_text())["error"])


def changed(directory: Path, change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


UNTIED = {"lm_head.weight": torch.ones(160, 64)}
NAME = "model.layers.1.mlp.up_proj.weight"
REFUSED = {
    "it does not store model.layers.1.mlp.up_proj.weight": lambda tensors: tensors.pop(NAME),
    "up_proj.weight is stored in another shape than": lambda tensors: tensors.update({NAME: torch.ones(96, 63)}),
    "embed_tokens.weight and lm_head.weight are tied and stored with different": lambda tensors: tensors.update(UNTIED),
    "up_proj.weight is stored as int8": lambda tensors: tensors.update({NAME: torch.ones(96, 64, dtype=torch.int8)}),
    "more than once, also as model.layers.1": lambda tensors: tensors.update({NAME[6:]: torch.ones(96, 64)}),
    "which a delta does not support": lambda tensors: tensors.update({NAME: torch.ones(96, 64, dtype=torch.int64)}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_weights_stored_in_another_form_are_loaded_whole(tmp_path, why):
    make_model("Qwen3").bfloat16().save_pretrained(tmp_path)
    StoredModel(str(tmp_path))
    changed(tmp_path, REFUSED[why])
    with pytest.raises(NotByRowsError, match=why):
        StoredModel(str(tmp_path))


def test_tied_weights_that_are_stored_twice_equally_are_read(tmp_path):
    make_model("Qwen3").bfloat16().save_pretrained(tmp_path)
    name = "model.embed_tokens.weight"
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[name].clone()}))
    assert StoredModel(str(tmp_path))._sources[name] == name


def test_conversions_other_than_stacking_experts_need_a_whole_load(tmp_path, monkeypatch):
    make_model("Qwen3Moe").bfloat16().save_pretrained(tmp_path)
    table = copy.deepcopy(stored_model.get_model_conversion_mapping(load_model(str(tmp_path))))
    for converter in (entry for entry in table if isinstance(entry, stored_model.WeightConverter)):
        converter.operations[0].dim = 1
    monkeypatch.setattr(stored_model, "get_model_conversion_mapping", lambda _model: table)
    with pytest.raises(NotByRowsError, match="is converted by"):
        StoredModel(str(tmp_path))


def test_routers_are_known_before_their_weights_are_read(tmp_path):
    make_model("Qwen3Moe").bfloat16().save_pretrained(tmp_path)
    routed, whole = (
        RoutingReplay(model, Routing.REPLAYED, 0.0).shape
        for model in (StoredModel(str(tmp_path)).outline(), load_model(str(tmp_path)))
    )
    assert routed == whole


@pytest.mark.parametrize(
    ("change", "why"), [({}, "no config.json"), ({"quantization_config": {"quant_method": "fp8"}}, "quantised")]
)
def test_a_directory_without_a_usable_config_is_left_to_the_whole_load(tmp_path, change, why):
    if change:
        make_model("Qwen3").bfloat16().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotByRowsError, match=why):
        StoredModel(str(tmp_path))
