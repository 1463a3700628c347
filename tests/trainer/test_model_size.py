"""Parameters and FLOPs of a model, compared with numbers that are counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MptConfig, Qwen3Config, Qwen3MoeConfig

from tests.trainer.conftest import make_trainable, tiny_model
from tidemill.trainer import metrics
from tidemill.trainer.batch import pack
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.model import size_of_name
from tidemill.trainer.model_size import UnknownModelError, size_of
from tidemill.trainer.step import Learner

SHAPE = {"vocab_size": 100, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def dense(tied: bool):
    return on_meta(Qwen3Config(num_hidden_layers=3, intermediate_size=16, tie_word_embeddings=tied, **SHAPE))


def test_a_dense_model_is_counted_as_by_hand():
    size = size_of(dense(tied=False))
    # Queries and outputs 8x8 each, keys and values 8x4 each, three feed-forward matrices, norms of layer and heads.
    layer = 2 * 64 + 2 * 32 + 3 * 8 * 16 + 2 * 8 + 2 * 4
    assert (size.parameters, size.layer) == (3 * layer + 2 * 800 + 8, layer)
    assert (size.head, size.root, size.experts, size.tied) == (800, 1608, 0, False)
    assert (size.body, size.active) == (3 * layer + 8, 3 * layer + 8 + 800)
    assert size.pair == 4 * 3 * 2 * 4


def test_a_tied_head_is_counted_once_in_parameters_and_in_flops():
    tied, whole = size_of(dense(tied=True)), size_of(dense(tied=False))
    assert tied.parameters == whole.parameters - 800
    assert (tied.body, tied.head) == (whole.body, whole.head)


def test_only_the_routed_experts_that_a_token_uses_are_active():
    config = Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1,
        tie_word_embeddings=True, **SHAPE,
    )  # fmt: skip
    size = size_of(on_meta(config))
    assert size.experts == 2 * 8 * 3 * 8 * 16
    assert size.parameters - size.active == size.experts * 6 // 8
    assert (size.feed_forward, size.used_experts) == (32, 2)


def test_a_forward_pass_is_two_flops_per_parameter_and_four_per_pair_and_head_width():
    size = size_of(dense(tied=True))
    assert size.forward(10, 55, 4) == 2 * size.body * 10 + 2 * 800 * 4 + 4 * 3 * 2 * 4 * 55


def test_sizes_equal_those_published_for_known_models(tmp_path):
    shape = {"vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": False}
    models = {
        8.19: Qwen3Config(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
                          num_key_value_heads=8, **shape),
        30.53: Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128,
                              num_attention_heads=32, num_key_value_heads=4, num_experts_per_tok=8, **shape),
    }  # fmt: skip
    for billions, config in models.items():
        config.save_pretrained(tmp_path)
        size = size_of_name(str(tmp_path))
        assert round(size.parameters / 1e9, 2) == billions
    assert round(size.experts / 1e9, 1) == 29.0
    assert round(size.active / 1e9, 1) == 3.0  # its name says "A3B"


def test_a_model_of_unknown_size_is_refused(tmp_path):
    with pytest.raises(UnknownModelError, match="compressed keys"):
        size_of(on_meta(DeepseekV3Config(num_hidden_layers=1, n_routed_experts=8, n_group=1, topk_group=1)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        size_of_name(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "mamba"}, "attention heads"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "attention heads"),
        ({"model_type": "llama", "num_attention_heads": 0}, "division"),
        ({"model_type": "llama", "hidden_size": "64"}, "hidden_size"),
        ({"model_type": "dbrx"}, "rope_theta"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 16}, "8 routed experts"),
    ],
)
def test_a_configuration_that_no_model_can_be_made_of_is_refused(tmp_path, fields, told):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnknownModelError, match=told):
        size_of_name(str(tmp_path))


def test_layers_are_counted_whatever_their_module_is_named():
    size = size_of(on_meta(MptConfig(n_layers=3, n_heads=2, d_model=8, vocab_size=100, expansion_ratio=4)))
    assert size.layer == 4 * 64 + 2 * 4 * 64 + 2 * 8


def test_a_step_records_its_flops():
    groups = [make_trainable("a"), make_trainable("b")]
    settings = TrainerSettings(kl=KlSettings(coefficient=0.1), share_prefixes=False)
    learner = Learner(tiny_model(), settings, tiny_model())
    found = learner.train(groups, 1, 0, seed=0).metrics
    size, forward = size_of(tiny_model()), 0.0
    for row in pack([r for group in groups for r in group.rollouts], settings.row_tokens, 64, share_prefixes=False):
        depths = row.position_ids[0].tolist()
        forward += 2 * size.body * len(depths) + 2 * size.head * len(row.predicting)
        forward += size.pair * sum(depth + 1 for depth in depths)
    assert found["flops/forward"] == pytest.approx(forward, rel=1e-12)
    # The policy before the step and the reference each computed one forward pass.
    assert (found["flops/backward"], found["flops/frozen"]) == pytest.approx((2 * forward, 2 * forward))
    assert found["flops/recomputed"] == 0
    assert (found["flops/body"], found["flops/pair"]) == (size.body, size.pair)


def test_scores_that_were_not_stored_count_as_recomputed(monkeypatch):
    size, group = size_of(tiny_model()), make_trainable("a")
    (row,) = pack(group.rollouts, 1024, 64)
    scored = len(row.predicting)
    monkeypatch.setattr("tidemill.trainer.policy.KEPT_SCORES", scored * 64 - 1)
    assert metrics.flop_metrics(size, [(row, 0)])["flops/recomputed"] == 2 * size.head * scored
    small = replace(size, vocabulary=1)
    assert metrics.flop_metrics(small, [(row, 0)])["flops/recomputed"] == 0
