"""Models that cannot be read by rows and are loaded whole; `test_ranks` compares those that each rank reads by rows."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.families import make_model
from tidemill.trainer import stored_model
from tidemill.trainer.choices import Routing
from tidemill.trainer.model import load_model
from tidemill.trainer.routing import RoutingReplay
from tidemill.trainer.stored_model import NotByRowsError, StoredModel

WEIGHTS = "model.safetensors"


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
