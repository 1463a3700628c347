"""Real engines: a delta written in place equals a new load of the new weights, in every byte and every token.

Dense models and mixtures of experts, tied and untied, padded, in fp32 and bf16 engines; transformers is the reference
for the computed logprobs.
"""

import pytest

from tests.consumers.engine_driver import KINDS

EXPERTS = [name for name, kind in KINDS.items() if kind.intermediate]
NO_PADDING = [name for name in EXPERTS if KINDS[name].intermediate % 32 == 0]


@pytest.fixture(scope="module")
def compared(driven):
    """The driver's results for each kind of engine."""
    return driven("engine_driver")


@pytest.mark.parametrize("kind", KINDS)
def test_an_applied_delta_is_a_fresh_load_byte_for_byte(compared, kind):
    seen = compared[kind]
    assert seen["moved"]["total"] == seen["fresh"]["total"] == seen["expected"]
    assert seen["moved"]["tensors"] == seen["fresh"]["tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_applied_delta_computes_what_a_fresh_load_computes(compared, kind):
    seen = compared[kind]
    assert seen["moved_greedy"] == seen["fresh_greedy"]
    assert seen["before"] != seen["moved_greedy"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_computes_what_transformers_computes(compared, kind):
    seen = compared[kind]
    assert seen["distance"] < (1e-5 if KINDS[kind].dtype == "float32" else 0.1)
    assert seen["distance_to_old"] > 4 * seen["distance"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_can_be_undone_and_a_whole_version_written(compared, kind):
    seen = compared[kind]
    assert (seen["undone"], seen["undone_greedy"]) == (seen["original"], seen["before"])
    assert (seen["whole"], seen["whole_greedy"]) == (seen["expected"], seen["moved_greedy"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_in_a_served_tensor_fails_the_proof(compared, kind):
    damaged = compared[kind]["damage"]
    assert damaged["damage"] or damaged["total"] != compared[kind]["expected"]
    assert bool(damaged["damage"]) == (KINDS[kind].dtype == "float32")


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_also_known_by_the_names_that_transformers_has_in_memory(compared, kind):
    seen = compared[kind]
    assert "model.layers.0.mlp.experts.gate_up_proj" in seen["fused_names"]
    assert seen["fused"] == seen["fused_expected"]


@pytest.mark.parametrize("kind", NO_PADDING)
def test_the_proof_detects_that_vllms_reload_damages_experts_and_a_whole_write_heals_it(compared, kind):
    seen = compared[kind]
    assert seen["reloaded"] != seen["expected"] and seen["reloaded_greedy"] != seen["moved_greedy"]
    assert (seen["healed"], seen["healed_greedy"]) == (seen["expected"], seen["moved_greedy"])


def test_a_type_that_the_engine_cannot_hold_is_refused_with_the_reason(compared):
    assert "layernorm.weight is float32, the engine holds it as bfloat16" in compared["refusal"]
    assert "serve bfloat16 tensors in a float32 engine" in compared["refusal"]


def test_experts_in_an_order_that_is_not_known_are_refused_by_name(compared):
    assert compared["kernels"]["TritonExperts"] == ""
    assert compared["kernels"]["FlashInferExperts"].startswith(
        "mlp keeps its experts in the order of FlashInferExperts"
    )
    assert 'set `moe-backend = "triton"`' in compared["kernels"]["FlashInferExperts"]
