"""Engines whose version names a format of activations, and the trainer's logprobs of the tokens that they sample.
`drivers.py` runs it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.consumers import engine_driver as engines

FAMILIES = ("Qwen3Moe", "Qwen3")
"""The one with experts is first, as in `engine_driver.KINDS`."""
FORM = "nvfp4"
"""Format of the weights, and of activations where they are rounded."""
ENGINES = {"": False, FORM: False, f"{FORM} invariant": True}
"""Engines by the format of their activations; whether they are batch-invariant."""


def answers(engine: engines.InProcess, prompts: list[list[int]], **sampling: Any) -> list[list[tuple[int, float]]]:
    """Return answers to prompts that are sent at once: tokens with their logprobs."""
    for number, prompt in enumerate(prompts):
        engine.begin(str(number), prompt, logprobs=0, ignore_eos=True, **sampling)
    done = engine.end()
    engine.engine.reset_prefix_cache()
    return [engines.chosen(done[str(number)]) for number in range(len(prompts))]


def rounded_layers(engine: engines.InProcess) -> list[str]:
    """Return the names of the engine's linear layers with rounded inputs, without its layers of experts."""
    named = engine.model.named_modules()
    return [name for name, layer in named if "rounded" in str(getattr(layer, "cpu_linear", ""))]


def logprobs(directory: Path, activations: str, row: Any) -> np.ndarray:
    """Return the trainer's logprobs of the sampled tokens of a row."""
    from tidemill.kernels.quantise import ROW_FORMATS
    from tidemill.trainer.activations import quantise_activations
    from tidemill.trainer.master import quantised_weights
    from tidemill.trainer.model import load_model, use_packed_attention
    from tidemill.trainer.policy import frozen_logprobs

    model = load_model(str(directory)).eval()
    use_packed_attention(model)
    if activations:
        quantise_activations(model, quantised_weights(model), ROW_FORMATS[activations])
    return frozen_logprobs(model, row).double().numpy()


def unfit(engine: engines.InProcess) -> str:
    """Return the error for an engine one of whose layers computes by a product of its own."""
    from tidemill.consumers.replica.activations import require_rounding_layers
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    layer = engine.model.get_submodule("model.layers.1.self_attn.o_proj")
    rounded, layer.cpu_linear = layer.cpu_linear, torch.nn.functional.linear
    try:
        require_rounding_layers(engine.model)
    except UnsupportedModelError as error:
        return str(error)
    finally:
        layer.cpu_linear = rounded
    return ""


def refused() -> dict[str, str]:
    """Return the errors for engines that cannot round to a format, on a device of a kind."""
    from pytest import MonkeyPatch

    from tidemill.consumers.replica import engine
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    found = {}
    for form, device in (("int3", "cpu"), (FORM, "cuda"), (FORM, "cpu")):
        with MonkeyPatch.context() as patched:
            patched.setattr(engine, "current_platform", SimpleNamespace(is_cpu=lambda device=device: device == "cpu"))
            try:
                engine.require_rounding(form)
            except UnsupportedModelError as error:
                found[f"{form} {device}"] = str(error)
    return found


def compare(family: str, root: Path) -> dict[str, Any]:
    """Compare engines with the trainer, each with and without rounded activations: the mean absolute difference."""
    from tests.consumers.invariance_driver import switch
    from tests.trainer import families
    from tidemill.consumers.replica.environment import ACTIVATIONS_VARIABLE
    from tidemill.trainer.batch import pack
    from tidemill.trainer.choices import ServingFormat
    from tidemill.trainer.config import OptimizerSettings
    from tidemill.trainer.master import MasterWeights

    model = families.make_model(family)
    MasterWeights(model, OptimizerSettings(), ServingFormat(FORM))
    model.bfloat16().save_pretrained(root / family)
    found: dict[str, Any] = {"apart": {}, "layers": {}, "proved": {}}
    for name, invariant in ENGINES.items():
        activations = name.partition(" ")[0]
        os.environ[ACTIVATIONS_VARIABLE] = activations
        switch(invariant)
        engine = engines.InProcess(root / family, "float32", skip_tokenizer_init=True)
        prompts = 4 * families.prompts()
        given = answers(engine, prompts, temperature=1.0, max_tokens=16)
        found["layers"][name] = rounded_layers(engine)
        found["proved"][name] = engine.prove()["damage"]
        rollouts = [
            families.OneSegment(families.segment_of(prompt, [t for t, _ in answer], [p for _, p in answer]))
            for prompt, answer in zip(prompts, given, strict=True)
        ]
        (row,) = pack(rollouts, 10_000, families.VOCAB)
        for trainer in ("", FORM):
            apart = np.abs(logprobs(root / family, trainer, row) - row.sampler_logprobs.double().numpy())
            found["apart"][f"{name}/{trainer}"] = [float(apart.mean()), float(apart.max())]
        if invariant:
            found["unfit"] = unfit(engine)
            for which, sent in {"alone": prompts[:1], "beside": prompts}.items():
                found[which] = answers(engine, sent, max_tokens=8)[0]
    return found


def drive(root: Path) -> dict[str, Any]:
    """Return the results for each family, and the errors of engines that cannot round."""
    return {**{family: compare(family, root) for family in FAMILIES}, "refused": refused()}
