"""Training steps on a GPU beside the same steps on the CPU, a JSON line each: `python -m tests.gpu.step_agreement`.

Two steps of small random models, from the same weights and rollouts: model families, formats of served weights with
activations in the same format, recorded experts, minibatches with a reference, recomputed activations. In float32 on
both devices, losses, norms of the gradient and logprobs must agree up to rounding. `relative` is the largest relative
difference of losses and norms, `logprobs` the largest difference of logprobs. In the second step these also depend on
the first update. The bounds of a format are wider, because a value near a tie can get another code on another device.
In bfloat16 on the GPU, two runs must give the same weights bit for bit; `bf16_logprobs` is the largest difference of
their logprobs from float32. The last line compares attention along a tree in bfloat16, by torch's call and by matrix
products, with float32.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.gpu.delta_speed import DEVICE
from tests.trainer.conftest import VOCAB, drawn_experts, fingerprint_of, make_trainable, settings_of
from tests.trainer.families import make_model
from tidemill.trainer import attention
from tidemill.trainer.attention import TreeAttention, tree_calls
from tidemill.trainer.choices import Compute, Estimator, Routing, ServingActivations, ServingFormat
from tidemill.trainer.config import KlSettings, OptimizerSettings
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "Phi3", "Mistral", "Qwen3Moe")
FORMATS = {
    ServingFormat.FP8_BLOCKS: ServingActivations.FP8_ROWS,
    ServingFormat.MXFP8: ServingActivations.MXFP8,
    ServingFormat.NVFP4: ServingActivations.NVFP4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{form: ("Qwen3", {"serving_format": form, "serving_activations": own}) for form, own in FORMATS.items()},
    "recorded experts": ("Qwen3Moe", {"routing": Routing.REPLAYED}),
    "minibatches": (
        "Llama",
        {"minibatches": 2, "kl": KlSettings(coefficient=0.1, in_loss=True, estimator=Estimator.K3)},
    ),
    "recomputed": ("Llama", {"checkpoint_activations": True, "share_prefixes": False}),
}
LEAST = 1e-2
"""Smaller losses and norms are compared as if they were this large."""
BOUNDS, BOUNDS_OF_FORMATS = (1e-3, 1e-2), (0.1, 1.0)
"""Largest `relative` and `logprobs`; logprobs of these models are far below -1."""


def main() -> None:
    """Compare each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two cases")
    cases = ["Qwen3", "recorded experts"] if parser.parse_args().small else list(CASES)
    for case in cases:
        family, changes = CASES[case]
        cpu, gpu = (steps(family, changes, device, Compute.FLOAT32) for device in ("cpu", DEVICE))
        half = [steps(family, changes, DEVICE, Compute.BFLOAT16) for _ in range(2)]
        line = {
            "figure": "step_agreement",
            "case": case,
            "device": DEVICE,
            "relative": max(abs(a - b) / max(abs(b), LEAST) for a, b in zip(gpu["values"], cpu["values"], strict=True)),
            "logprobs": apart(gpu, cpu),
            "bf16_logprobs": apart(half[0], gpu),
            "bf16_twice_equal": half[0]["fingerprint"] == half[1]["fingerprint"],
        }
        print(json.dumps(line), flush=True)
        relative, logprobs = BOUNDS_OF_FORMATS if case in FORMATS else BOUNDS
        assert line["relative"] < relative and line["logprobs"] < logprobs, f"{case}: the devices differ: {line}"
        assert line["bf16_twice_equal"], f"{case}: two runs gave different weights"
    print(json.dumps(attention_line()), flush=True)


def steps(family: str, changes: dict[str, Any], device: str, compute: Compute) -> dict[str, Any]:
    """Take two steps; return losses and norms of the gradient, logprobs of the trained tokens, and the fingerprint."""
    slow = OptimizerSettings(learning_rate=1e-4)
    settings = settings_of(optimizer=slow, row_tokens=256, device=device, compute=compute, **changes)
    model, reference = make_model(family, vocab_size=VOCAB), make_model(family, vocab_size=VOCAB)
    learner = Learner(model, settings, reference if settings.kl.coefficient else None)
    groups, values, logprobs = [make_trainable(name) for name in "abc"], list[float](), list[torch.Tensor]()
    if settings.routing is Routing.REPLAYED:
        layers, experts = model.config.num_hidden_layers, range(model.config.num_experts)
        groups = [replace(group, expert_ids=drawn_experts(group, experts, layers)) for group in groups]
    for step in (1, 2):
        outcome = learner.train(groups, step, step - 1, seed=step)
        assert outcome.trained is not None
        values += [outcome.metrics["loss"], outcome.metrics["grad_norm"]]
        logprobs.append(outcome.trained.trainer_logprobs)
    return {"values": values, "logprobs": logprobs, "fingerprint": fingerprint_of(serving_view(learner.model))}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two runs' logprobs."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def attention_line() -> dict[str, Any]:
    """Compare attention along a tree, its value and gradients, in two ways in bfloat16 with float32."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 2048, 64, generator=generator).to(DEVICE) for heads in (8, 2, 2)]
    slope, parents = torch.randn(1, 8, 2048, 64, generator=generator).to(DEVICE), np.arange(-1, 2047)
    parents[[900, 1300, 1340]] = 700, 700, 1000
    calls, results = tree_calls(parents).to(torch.device(DEVICE)), {}
    for name, dtype in {"float32": torch.float32, "by_call": torch.bfloat16, "by_products": torch.bfloat16}.items():
        own = [state.detach().to(dtype).requires_grad_() for state in states]
        plain = mock.patch.object(attention, "_has_kernel", lambda *_: False)
        with plain if name == "by_products" else nullcontext():
            out = TreeAttention.apply(*own, calls, 0.125)  # type: ignore[no-untyped-call]
            out.backward(slope.to(dtype))
        results[name] = [out.detach().float(), *(state.grad.float() for state in own if state.grad is not None)]
    errors = {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(results[name], results["float32"], strict=True))
        for name in ("by_call", "by_products")
    }
    assert max(errors.values()) < 0.02, f"attention in bfloat16 differs from float32: {errors}"
    return {"figure": "attention", "device": DEVICE, **errors}


if __name__ == "__main__":
    main()
