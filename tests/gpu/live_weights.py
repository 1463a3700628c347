"""Live weights of a replica's rank on a device, one JSON line: `python -m tests.gpu.live_weights [--small]`.

The model has the shape of Qwen3-0.6B and the parameters of a serving engine: query, key and value in one, gate and up
in another. The rank's own code (`RankWeights`) loads a checkpoint, stages a change of one element in a hundred, commits
it, takes it back and proves the result, as it does inside vLLM; no vLLM is needed. `commit_ms` is the pause between two
steps. `read_ms` is the time to read all weights once at the speed of a copy: no decoding step is shorter.

Each proof is compared with fingerprints that the CPU computes from the checkpoint's patterns. At the end one bit on the
device is changed, and the proof must find it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu.delta_speed import DEVICE, seconds
from tidemill.consumers.replica.live_weights import LiveWeights, RankWeights
from tidemill.consumers.replica.ranks import RankCoverage, handed_over
from tidemill.consumers.replica.weight_map import record_map
from tidemill.kernels.fingerprint import Fingerprint, TensorKey, fingerprint
from tidemill.kernels.weights.bits import TensorSpec, Weight
from tidemill.kernels.weights.checkpoint import save_checkpoint
from tidemill.kernels.weights.mirror import ElementChange

DENSITY = 0.01
RUNS = 5
VOCABULARY, HIDDEN, INNER, QUERY, KEY = 151_936, 1024, 3072, 2048, 1024
PARTS = {
    "q": ("qkv", (QUERY, HIDDEN), 0),
    "k": ("qkv", (KEY, HIDDEN), QUERY),
    "v": ("qkv", (KEY, HIDDEN), QUERY + KEY),
    "o": ("o", (HIDDEN, QUERY), 0),
    "gate": ("gate_up", (INNER, HIDDEN), 0),
    "up": ("gate_up", (INNER, HIDDEN), INNER),
    "down": ("down", (HIDDEN, INNER), 0),
}
"""For each tensor of a layer: the engine's parameter, the tensor's shape, and its first row in the parameter."""


class FusedModel(torch.nn.Module):
    """Parameters in bf16 as a serving engine fuses them, and its loader."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        rows = {"qkv": QUERY + 2 * KEY, "o": HIDDEN, "gate_up": 2 * INNER, "down": HIDDEN}
        columns = {"qkv": HIDDEN, "o": QUERY, "gate_up": HIDDEN, "down": INNER}
        shapes = {f"{name}{layer}": (rows[name], columns[name]) for layer in range(layers) for name in rows}
        for name, shape in {"embed": (vocabulary, HIDDEN), **shapes}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)))
        self.tensors = [TensorSpec("embed", (vocabulary, HIDDEN), "bfloat16")] + [
            TensorSpec(f"{name}.{layer}", shape, "bfloat16")
            for layer in range(layers)
            for name, (_, shape, _) in PARTS.items()
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor of a checkpoint into its rows of a parameter."""
        for name, tensor in weights:
            part, _, layer = name.partition(".")
            parameter, _, row = PARTS.get(part, (part, (), 0))
            self.get_parameter(parameter + layer).data.narrow(0, row, len(tensor)).copy_(tensor)


def main() -> None:
    """Load, stage, commit, take back and prove; print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one layer and a small vocabulary")
    layers, vocabulary = (1, 64) if parser.parse_args().small else (28, VOCABULARY)
    model, generator = FusedModel(layers, vocabulary), np.random.default_rng(0)
    weights, changes = {}, []
    for spec in model.tensors:
        bits = generator.integers(0, 1 << 16, spec.n_elements, dtype=np.uint16)
        places = np.flatnonzero(generator.random(bits.size, dtype=np.float32) < DENSITY)
        weights[spec.name] = Weight(spec.dtype, bits.reshape(spec.shape))
        changes.append(ElementChange(spec.name, places, bits[places] ^ np.uint16(1)))
    live = LiveWeights(model, record_map(model, model.tensors, {}), model.tensors)
    live.warm()
    rank, times = RankWeights(live), dict[str, list[float]]()
    coverage = RankCoverage(model.tensors, [rank.boxes()])

    def timed(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        begun = time.perf_counter()
        answer = run()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return answer

    def proved() -> dict[str, Fingerprint]:
        return coverage.add_up([timed("prove_ms", rank.prove)["prints"]])

    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(Path(directory), weights)
        rank.load(directory)
        timed("whole_ms", rank.commit)
    old = prints_of(weights)
    assert proved() == old, "the loaded weights differ from the checkpoint"
    for change in changes:
        weights[change.name].bits.reshape(-1)[change.indices] = change.bits
    new = prints_of(weights)
    with handed_over(changes) as (path, digest):
        for _ in range(RUNS):
            timed("stage_ms", lambda: rank.stage(path, digest))
            timed("commit_ms", rank.commit)
            assert proved() == new, "the committed weights differ from the new version"
            timed("take_back_ms", rank.take_back)
            assert proved() == old, "the weights that were taken back differ from the old version"
    model.get_parameter("o0").data.view(torch.int16)[3, 5] ^= 1
    assert {name for name, found in proved().items() if found != old[name]} == {"o.0"}, "a changed bit was not found"
    whole = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    target = torch.empty_like(whole)
    told = {name: statistics.median(taken) for name, taken in times.items()}
    n_bytes = whole.numel() * whole.element_size()
    line = {
        "figure": "live_weights",
        "device": DEVICE,
        "parameters": whole.numel(),
        "changed": sum(change.indices.size for change in changes),
        **told,
        "prove_gb_s": n_bytes / told["prove_ms"] / 1e6,
        "read_ms": 1e3 * seconds(lambda: target.copy_(whole)) / 2,
        "equal_to_cpu": True,
    }
    print(json.dumps(line), flush=True)


def prints_of(weights: Mapping[str, Weight]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each tensor, computed on the CPU."""
    return {name: fingerprint(weight.bits.reshape(-1), TensorKey.of(name)) for name, weight in weights.items()}


if __name__ == "__main__":
    main()
