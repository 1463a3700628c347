"""Rounded activations in the trainer: which inputs, the gradient, and what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import linear

from tests.trainer.conftest import make_trainable, settings_of, tiny_model
from tests.trainer.families import make_model
from tidemill.kernels.quantise import NVFP4, ROW_FORMATS, round_rows
from tidemill.trainer.activations import InputRounding, quantise_activations
from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.choices import StepMachine
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.master import quantised_weights
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner

ROUNDED = {"serving_format": "nvfp4", "serving_activations": "nvfp4"}
GROUPS = ("a", "b")


def trained(**changes: object) -> tuple[Learner, dict[str, float]]:
    """Return a learner after two steps, and the metrics of the second."""
    learner = Learner(tiny_model(), settings_of(**changes), None)
    for step in (1, 2):
        metrics = learner.train([make_trainable(name) for name in GROUPS], step, 0, seed=step).metrics
    return learner, metrics


def same_weights(one: Learner, other: Learner) -> bool:
    views = serving_view(one.model), serving_view(other.model)
    return all((views[0][name] == views[1][name]).all() for name in views[0])


@pytest.mark.parametrize("form", ROW_FORMATS)
def test_the_inputs_of_quantised_linear_weights_are_rounded_and_no_others(form):
    model, seen = tiny_model(), {}
    quantise_activations(model, quantised_weights(model), ROW_FORMATS[form])
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            # After the hook that rounds: it gets what the layer gets.
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    model(torch.arange(20)[None])
    rounded = {name for name, rows in seen.items() if torch.equal(rows, round_rows(rows, ROW_FORMATS[form]))}
    assert rounded == {name.removesuffix(".weight") for name in quantised_weights(model)}
    assert seen.keys() - rounded == {"lm_head"}
    attention = "model.layers.1.self_attn."
    assert seen[f"{attention}q_proj"] is seen[f"{attention}k_proj"] is seen[f"{attention}v_proj"]


def test_the_gradient_passes_the_rounding_and_weights_get_that_of_the_rounded_inputs():
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(48, 8, bias=False), torch.randn(5, 48, requires_grad=True)
    layer.register_forward_pre_hook(InputRounding(NVFP4).before)
    made = layer(rows)
    given = torch.randn_like(made)
    made.backward(given)
    rounded = round_rows(rows, NVFP4)
    assert torch.equal(made, linear(rounded, layer.weight)) and not torch.equal(rounded, rows)
    assert torch.equal(rows.grad, given @ layer.weight)
    torch.testing.assert_close(layer.weight.grad, given.T @ rounded)


def test_an_input_that_changed_in_place_is_rounded_again():
    rounding, rows = InputRounding(NVFP4), torch.randn(3, 32)
    (first,) = rounding.before(torch.nn.Identity(), (rows,))
    assert rounding.before(torch.nn.Identity(), (rows,))[0] is first
    rows.mul_(3)
    assert torch.equal(rounding.before(torch.nn.Identity(), (rows,))[0], round_rows(rows, NVFP4))


def test_layers_that_are_computed_again_give_the_same_weights():
    kept, plain = trained(**ROUNDED), trained(serving_format="nvfp4")
    assert same_weights(kept[0], trained(**ROUNDED, checkpoint_activations=True)[0])
    assert not same_weights(kept[0], plain[0])
    assert kept[1]["loss"] != plain[1]["loss"]


def test_shared_prefixes_change_a_logprob_by_no_more_than_codes_do():
    """Another order of a sum changes last bits, and a value between two codes then gets the other one."""
    apart = [trained(**ROUNDED, share_prefixes=shared)[1]["loss"] for shared in (True, False)]
    plain = trained(serving_format="nvfp4")[1]["loss"]
    assert abs(apart[0] - apart[1]) < 0.2 * abs(apart[0] - plain)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_both_inputs_of_experts_are_rounded(experts):
    model = make_model("Qwen3Moe", experts_implementation=experts)
    quantise_activations(model, quantised_weights(model), NVFP4)
    layer = model.model.layers[0].mlp.experts
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    ids, scores = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [1, 3], [0, 2]]), torch.full((6, 2), 0.5)
    expected = torch.zeros_like(rows)
    for token, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            product = linear(round_rows(rows[token], NVFP4), layer.gate_up_proj[expert])
            gate, up = product.chunk(2)
            inner = round_rows(torch.nn.functional.silu(gate) * up, NVFP4)
            expected[token] += 0.5 * linear(inner, layer.down_proj[expert])
    made = layer(rows, ids, scores)
    assert float((made - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_experts_that_do_not_show_their_second_input_are_refused():
    with pytest.raises(UntrainableModelError, match=r"serving_activations: the experts .*experts \(Qwen3MoeExperts, "):
        Learner(make_model("Qwen3Moe", experts_implementation="eager"), settings_of(**ROUNDED), None)


def test_a_trainer_of_the_masters_rounds_no_activations():
    masters = trained(serving_format="nvfp4", forward="masters")
    assert same_weights(masters[0], trained(**ROUNDED, forward="masters")[0])


def test_a_policy_begins_at_its_reference():
    settings = settings_of(**ROUNDED, kl=KlSettings(coefficient=0.1))
    learner = Learner(tiny_model(), settings, tiny_model())
    assert learner.train([make_trainable("a")], 1, 0, seed=1).metrics["reference/k1"] == 0.0


def test_weights_in_bf16_have_no_layers_with_rounded_inputs():
    with pytest.raises(ValidationError, match="set serving_format, or serving_activations to none"):
        TrainerSettings(serving_activations="mxfp8")


def test_the_format_is_part_of_the_configuration_hash():
    plain = {"serving_format": "mxfp8"}
    made = [TrainerSettings(**plain, serving_activations=form) for form in ("none", *ROW_FORMATS)]
    assert len({settings.arithmetic_hash() for settings in made}) == 4
    assert made[0].arithmetic_hash() == TrainerSettings(**plain).arithmetic_hash(StepMachine())
