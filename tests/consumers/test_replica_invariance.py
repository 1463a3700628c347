"""Many answers to one prompt among different other requests: all equal with `batch_invariant`, several without it."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tidemill.consumers.replica import linear
from tidemill.consumers.replica.environment import prepare_environment
from tidemill.consumers.replica.linear import tiled_linear, unpacked_linear


@pytest.fixture(scope="module")
def seen(driven):
    """The driver's results for engines with and without `batch_invariant`."""
    return driven("invariance_driver")


@pytest.mark.parametrize(("model", "runs"), [("dense", 40), ("experts", 20)])
def test_one_prompt_has_one_answer_among_any_other_requests(seen, model, runs):
    assert seen[model]["with"]["runs"] == runs
    assert seen[model]["with"]["distinct"] == 1


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_one_prompt_has_several_answers_without_the_setting(seen, model):
    assert seen[model]["without"]["distinct"] > 1
    assert 0 < seen[model]["without"]["max"] < 1e-4


def test_a_replica_whose_engine_is_not_invariant_does_not_start(seen):
    assert seen["refusal"]["with"] == ""
    assert "numerics.batch_invariant: this engine gives a prompt other logprobs" in seen["refusal"]["without"]


def test_a_layer_without_an_invariant_form_is_named(seen):
    told = "numerics.batch_invariant: layer model.layers.0.self_attn.attn (Attention) has no form on a CPU"
    assert seen["dense"]["without"]["unfit"].startswith(told)
    assert seen["dense"]["with"]["unfit"] == seen["experts"]["with"]["unfit"] == ""


@pytest.mark.parametrize(
    ("device", "switch"), [("cpu", None), ("cuda", "1"), ("tpu", "numerics.batch_invariant: vLLM has no such engine")]
)
def test_vllms_own_switch_is_set_on_a_gpu_and_other_devices_are_refused(monkeypatch, device, switch):
    platform = SimpleNamespace(
        is_cpu=lambda: device == "cpu", is_cuda_alike=lambda: device == "cuda", device_name=device
    )
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(os, "environ", {"VLLM_BATCH_INVARIANT": "1"})
    if device == "tpu":
        with pytest.raises(RuntimeError, match=f"{switch} for tpu"):
            prepare_environment(1, batch_invariant=True)
        return
    prepare_environment(1, batch_invariant=True)
    assert (os.environ.get("VLLM_BATCH_INVARIANT"), os.environ["TIDEMILL_BATCH_INVARIANT"]) == (switch, "1")
    prepare_environment(1)
    assert "VLLM_BATCH_INVARIANT" not in os.environ and os.environ["TIDEMILL_BATCH_INVARIANT"] == "0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_tiled_product_does_not_depend_on_the_others(dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(700, 96).to(dtype), torch.randn(40, 96).to(dtype), torch.randn(40).to(dtype)
    whole = tiled_linear(x, weight, bias)
    for rows in (1, 2, 7, 16, 17, 33, 100, 530):
        assert torch.equal(tiled_linear(x[700 - rows :], weight, bias), whole[700 - rows :])
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))
    assert tiled_linear(x.view(7, 100, 96), weight).shape == (7, 100, 40)


def test_tiles_are_multiplied_together_only_if_that_changes_no_bit(monkeypatch):
    """The library sums products of more than 64 rows in another order."""
    plain, seen = linear.unpacked_linear, []

    def product(x, weight, bias=None):
        seen.append(len(x))
        return plain(x, weight, bias) if len(x) <= 64 else plain(x, weight, bias) * (1 + 2**-20)

    monkeypatch.setattr(linear, "unpacked_linear", product)
    monkeypatch.setattr(linear, "_TOGETHER", {})
    x, weight = torch.randn(250, 32), torch.randn(24, 32)
    whole = tiled_linear(x, weight)
    seen.clear()
    assert torch.equal(tiled_linear(x, weight), whole) and seen == [64, 64, 64, 64]
    assert torch.equal(tiled_linear(x[:50], weight), whole[:50])


def test_a_row_of_a_plain_product_depends_on_the_others():
    torch.manual_seed(0)
    x, weight = torch.randn(50, 576), torch.randn(512, 576)
    whole = unpacked_linear(x, weight)
    assert not torch.equal(unpacked_linear(x[:1], weight), whole[:1])
