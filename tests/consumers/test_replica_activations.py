"""Rounded activations in real engines: at the trainer's places, with its results, and what is refused."""

import pytest

from tests.consumers.activations_driver import ENGINES, FAMILIES, FORM
from tests.trainer.families import make_model
from tidemill.trainer.master import quantised_weights

INVARIANT = f"{FORM} invariant"


@pytest.fixture(scope="module")
def seen(driven):
    """The driver's results for a dense model and a mixture of experts."""
    return driven("activations_driver")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", [FORM, INVARIANT])
def test_logprobs_of_an_engine_that_rounds_are_those_of_a_trainer_that_rounds(seen, family, engine):
    apart = seen[family]["apart"]
    matched, unmatched, plain = apart[f"{engine}/{FORM}"][0], apart[f"{engine}/"][0], apart["/"][0]
    # A value between two codes gets another one after another order of a sum: then a logprob differs by more.
    assert plain < 1e-5 and matched < 0.1 * unmatched
    assert apart[f"/{FORM}"][0] > 10 * matched


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_rounds_the_inputs_of_the_layers_whose_weights_are_quantised(seen, family):
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
             "up_proj": "gate_up_proj"}  # fmt: skip
    names = [name.removesuffix(".weight").rpartition(".") for name in quantised_weights(make_model(family))]
    expected = {f"{prefix}.{fused.get(name, name)}" for prefix, _, name in names if not prefix.endswith("experts")}
    assert {name: set(layers) for name, layers in seen[family]["layers"].items()} == {
        "": set(), FORM: expected, INVARIANT: expected
    }  # fmt: skip
    assert seen[family]["proved"] == dict.fromkeys(ENGINES, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_with_batch_invariance_an_answer_does_not_depend_on_the_batch(seen, family):
    assert seen[family]["alone"] == seen[family]["beside"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_cannot_round_is_named(seen, family):
    told = "trainer.serving_activations: model.layers.1.self_attn.o_proj (RowParallelLinear) has no form with rounded"
    assert seen[family]["unfit"].startswith(told)


@pytest.mark.parametrize(
    ("form", "device", "why"),
    [
        ("int3", "cpu", "this replica knows fp8_rows, mxfp8, nvfp4"),
        (FORM, "cuda", "only a replica on a CPU can compute"),
    ],
)
def test_an_engine_that_cannot_round_does_not_start(seen, form, device, why):
    assert why in seen["refused"][f"{form} {device}"]


@pytest.fixture(scope="module")
def divided(driven):
    """The driver's results for engines of two ranks."""
    return driven("activations_ranks_driver")


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_ranks_with_parts_of_a_row_round_it_as_a_whole(divided, kind):
    assert divided[kind][FORM] < 0.1 * divided[kind][""] and divided[kind][""] > 0.01
