"""Models of several families: the trainer's logprobs equal those of transformers and of an engine, or it refuses."""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.trainer import families
from tests.trainer.families import FAMILIES, ROOT, SERVED, VOCAB, OneSegment, make_config, make_model, segment_of
from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.batch import pack
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.model import PACKED_ATTENTION, size_of_name, use_packed_attention
from tidemill.trainer.policy import frozen_logprobs
from tidemill.trainer.step import Learner

ROUNDING = 2e-5
"""Greatest rounding error of a logprob of these models in float32, in nats."""


def answers() -> list[OneSegment]:
    """Return answers to prompts with a common prefix; two answers to the first prompt share a prefix too."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(2, VOCAB, (16,), generator=generator).tolist() for _ in range(6)]
    drawn[3][:5] = drawn[0][:5]
    asked = 2 * families.prompts()
    return [OneSegment(segment_of(prompt, ids, [-1.0] * 16)) for prompt, ids in zip(asked, drawn, strict=True)]


def one_by_one(model: PreTrainedModel, rollouts: list[OneSegment]) -> torch.Tensor:
    """Compute logprobs of the sampled tokens by the model's own forward pass over whole sequences."""
    found = []
    for rollout in rollouts:
        (segment,) = rollout.segments
        ids = torch.tensor(segment.ids().tolist())
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, ids[1:, None])[torch.tensor(segment.mask()[1:] == 1), 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_whole_sequences(family: str) -> None:
    model, rollouts = make_model(family), answers()
    expected = one_by_one(model, rollouts)
    assert expected.std() > 0.3, "of even predictions nothing would be seen"
    use_packed_attention(model)
    (row,) = pack(rollouts, 10_000, VOCAB)
    assert row.tree.length < 0.7 * row.tokens
    torch.testing.assert_close(frozen_logprobs(model, row), expected, rtol=0, atol=ROUNDING)


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm):
    """The output of `families` for each family."""
    command = [sys.executable, "-m", families.__name__, str(tmp_path_factory.mktemp("families"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["family"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("family", SERVED)
def test_logprobs_equal_those_of_the_engine_that_sampled(served, family: str) -> None:
    seen = served[family]
    assert (seen["tokens"], seen["max"] < ROUNDING) == (12 * 16, True), seen
    assert seen["spread"] > 0.3
    assert seen["shared"] > 0.5


def test_transformers_and_vllm_find_the_installed_package_kernels_and_not_this_repositorys_folder(served) -> None:
    """Both look for it, here with the root of the repository as the current directory."""
    installed = any(found.metadata["Name"] == "kernels" for found in distributions())
    assert served["kernels"] == {"family": "kernels", "available": installed, "taken": []}


FULL = {"layer_types": ["full_attention"] * 2}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
REFUSED = {
    "Mistral, a window": ("Mistral", {"sliding_window": 100}, r"a sliding window \(`sliding_window` 100\)"),
    "Phi3, a window": ("Phi3", {"sliding_window": 2047}, r"a sliding window \(`sliding_window` 2047\)"),
    "Qwen2, a window in one layer": ("Qwen2", WINDOW, "`sliding_attention` in layers 1"),
    "Gemma2": ("Gemma2", NO_CAPS, "`sliding_attention` in layers 0"),
    "Gemma2, caps": ("Gemma2", FULL, "soft cap on the attention scores .*soft cap on the logits"),
    "GptOss, sinks": ("GptOss", {**FULL, "num_local_experts": 4, "num_experts_per_tok": 2}, "attention sinks"),
    "Qwen3Next": ("Qwen3Next", {**families.EXPERTS, "shared_expert_intermediate_size": 32}, "`linear_attention` in"),
    "Granite, scaled logits": ("Granite", {"logits_scaling": 8.0}, r"it scales its logits \(`logits_scaling` 8.0\)"),
    "Bloom, attention of its own": ("Bloom", {"n_layer": 2, "n_head": 2}, "2 of its 2 layers do not use"),
    "ALiBi": ("Llama", {"alibi": True}, "it has ALiBi"),
    "Mamba": ("Mamba", {}, "`linear_attention` in layers 0, 1"),
    "Rwkv": ("Rwkv", {}, "2 of its 2 layers do not use"),
    "Lfm2, convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "`conv` in layers 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_packed_rows_compute_wrongly_are_refused_by_name(case: str) -> None:
    family, changes, named = REFUSED[case]
    with pytest.raises(UntrainableModelError, match=f"{family}.* cannot be trained: .*{named}.* Choose another model"):
        use_packed_attention(make_model(family, **changes))


def test_logits_that_a_model_scales_without_a_setting_are_refused() -> None:
    model = make_model("Llama")
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.forward = scaled
    with pytest.raises(UntrainableModelError, match="its logits are not the output of its head, but scaled or capped"):
        use_packed_attention(model)


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_refuses_the_same_models(case: str, tmp_path: Path) -> None:
    family, changes, named = REFUSED[case]
    make_config(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{family}.*({named}.* Choose another model|layers with attention heads)"):
        size_of_name(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_takes_what_the_trainer_takes(family: str, tmp_path: Path) -> None:
    make_config(family).save_pretrained(tmp_path)
    assert size_of_name(str(tmp_path)).layers == 2


def test_a_family_is_trained_if_the_refused_feature_is_off() -> None:
    use_packed_attention(make_model("Gemma2", **FULL, **NO_CAPS))


def test_a_cap_that_the_configuration_does_not_name_is_detected_in_the_layer() -> None:
    model = make_model("Gemma2", **FULL, final_logit_softcapping=None)
    model.config.attn_logit_softcapping = None
    with pytest.raises(UntrainableModelError, match=r"layer 0 has a soft cap on the attention scores \(`softcap` 50.0"):
        use_packed_attention(model)


def shift_tokens(_module, args):
    return (args[0] + 0.1 * args[0].roll(1, dims=1),)


def test_tokens_mixed_outside_attention_are_detected_in_the_logprobs() -> None:
    model = make_model("Llama")
    model.model.layers[1].mlp.register_forward_pre_hook(shift_tokens)
    with pytest.raises(UntrainableModelError, match=r"logprobs in a packed row are up to .* nats from"):
        use_packed_attention(model)


def test_weights_that_are_not_finite_are_named() -> None:
    model = make_model("Llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UntrainableModelError, match="its logits are not finite numbers"):
        use_packed_attention(model)


def test_logits_that_are_capped_without_a_setting_are_detected() -> None:
    model = make_model("Llama")
    model.lm_head.register_forward_hook(lambda _module, _args, logits: 5 * torch.tanh(logits / 5))
    with pytest.raises(UntrainableModelError, match="its logits are not the output of its head"):
        use_packed_attention(model)


def test_a_learner_refuses_at_once_and_leaves_a_trainable_model_as_it_was() -> None:
    settings = TrainerSettings(kl=KlSettings(coefficient=0.0))
    with pytest.raises(UntrainableModelError, match="sliding window"):
        Learner(make_model("Mistral", sliding_window=64), settings, None)
    model, state = make_model("Llama").train(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_packed_attention(model)
    assert model.training and model.config._attn_implementation == PACKED_ATTENTION
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
