"""Expert ids of a real engine, driven in this process, compared with those of transformers. `drivers.py` runs it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.consumers import engine_driver as engines

LONG, SHORT = 100, 12
"""Number of tokens of the prompt that is prefilled in pieces, and of sampled tokens of each answer."""


class Routed(engines.InProcess):
    """An engine whose answers contain expert ids."""

    def install(self, specs: list[Any]) -> None:
        """Map these tensors, and keep expert ids."""
        self.names = [spec.name for spec in specs]
        self.core.tidemill_install([(spec.name, list(spec.shape), spec.dtype) for spec in specs], 0, True)

    def answers(self, prompts: dict[str, list[int]], **sampling: Any) -> dict[str, Any]:
        """Return answers to prompts that are sent at once."""
        for name, prompt in prompts.items():
            self.begin(name, prompt, "a", ignore_eos=True, **{"max_tokens": SHORT, **sampling})
        return self.end()


def tokens_of(output: Any) -> list[int]:
    """Return the tokens of prompt and answer."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def chosen(directory: Path, tokens: list[int]) -> np.ndarray:
    """Return the sorted experts that transformers uses for all tokens but the last: i8[tokens - 1, layers, top_k]."""
    found: list[torch.Tensor] = []
    model = _model(directory)
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, answer: found.append(answer[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


@cache
def _model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def agreement(directory: Path, outputs: dict[str, Any]) -> dict[str, Any]:
    """Return for each answer the shape of its ids, and the share of (token, layer) with the experts of transformers."""
    found = {}
    for name, output in outputs.items():
        ids, expected = output.outputs[0].routed_experts, chosen(directory, tokens_of(output))
        same = ids.shape == expected.shape and (np.sort(ids, -1) == expected).all(-1).mean()
        found[name] = {"shape": ids.shape, "expected": expected.shape, "same": float(same), "type": ids.dtype.name}
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether all answers have the same ids."""
    return all(np.array_equal(one[n].outputs[0].routed_experts, other[n].outputs[0].routed_experts) for n in one)


def changed_under_way(engine: Routed, a: Path, prompt: list[int]) -> dict[str, Any]:
    """Change the version during an answer: tokens computed before the change have the experts of the first version."""
    old = engines.driver.view_of(a)
    engine.begin("moved", prompt, "c", ignore_eos=True, max_tokens=2 * SHORT)
    for _ in range(SHORT):
        engine.engine.step()
    engine.apply(old, engines.driver.nudged(old, seed=1, fraction=0.5), 1)
    output = engine.end()["moved"]
    ids, expected = output.outputs[0].routed_experts, chosen(a, tokens_of(output))
    spans = [[int(span.version), span.start, span.end] for span in output.outputs[0].weight_versions]
    # The new version computes the last token that the old version sampled.
    before = len(prompt) + spans[0][2] - 1
    alike = (np.sort(ids, -1) == expected).all(-1)
    return {"spans": spans, "rows": len(ids), "before": float(alike[:before].mean()),
            "after": float(alike[before:].mean())}  # fmt: skip


def drive(root: Path) -> dict[str, Any]:
    """Return the ids of prompts of different lengths, of cached prefixes, and of an answer over two versions."""
    kind = engines.Kind("float32", intermediate=64)
    a = engines.make_model(kind, root / "a")
    # The longest prompt takes several steps, in which the other requests decode.
    engine = Routed(a, kind.dtype, max_num_batched_tokens=32, enable_chunked_prefill=True, max_num_seqs=4)
    prompts = {str(number): prompt for number, prompt in enumerate(engines.prompts())}
    prompts["long"] = [(11 * i) % 190 + 5 for i in range(LONG)]
    first = engine.answers(prompts)
    again = engine.answers(prompts)
    tail = engine.answers({"long": prompts["long"]}, routed_experts_prompt_start=LONG - 1)["long"].outputs[0]
    fork = engine.answers({"fork": [*prompts["long"][:70], *range(20, 40)]})
    (capture,) = [engine.core.model_executor.driver_worker.worker._tidemill_capture]
    found = {
        "first": agreement(a, first), "again": agreement(a, again), "same": same(first, again),
        "cached": {name: output.num_cached_tokens for name, output in (again | fork).items()},
        "fork": agreement(a, fork),
        "tail": bool(np.array_equal(tail.routed_experts, first["long"].outputs[0].routed_experts[LONG - 1 :])),
        "moved": changed_under_way(engine, a, prompts["long"]),
        "bytes a token": int(capture._ids[0].nbytes),
    }  # fmt: skip
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    dense = engines.make_model(engines.Kind("float32"), root / "dense")
    try:
        Routed(dense, "float32")
    except UnsupportedModelError as error:
        found["dense"] = str(error)
    return found
