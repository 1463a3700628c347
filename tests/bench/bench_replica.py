"""Cost of a weight update for a replica, in one run on one machine: one JSON line per figure.

    python tests/bench/bench_replica.py [--parameters 100e6] [--density 0.01] [--versions 20] [--requests 8]

A replica's engine (AsyncLLM in fp32, with its core in a separate process) decodes requests continuously. Meanwhile
versions of a random bf16 Qwen3 arrive as encoded deltas and are processed as in a replica: decoded and checked against
a mirror, staged in the engine core, written between two steps, proved. The same weights are then written in full, and
reloaded from safetensors by vLLM's own `reload_weights`. No Kafka is needed. Compare the wall times only to each other.

    python tests/bench/bench_replica.py --topology dense:tensor_parallel=2 [DIR:tensor_parallel=3 ...] [--versions 50]

This takes the versions on engines of several ranks instead: `versions` of them while requests run, and one more; one
JSON line per engine. A model is `dense` or `experts` (random, tiny), `fused` (the same experts under the in-memory
names of transformers) or a directory. `unproved` counts versions whose live weights have another fingerprint than the
version; `wrong_tokens` counts tokens that a rank computed with another version than their span says. Both must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.consumers import replica_driver
from tests.kernels.encoding import encode_delta
from tidemill.consumers.replica.config import KvPolicy, ReplicaSettings
from tidemill.consumers.replica.environment import prepare_environment
from tidemill.kernels.delta import apply_change, decode_delta, resolve_all
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.weights.bits import TensorSpec, Weight
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint, save_checkpoint, specs_of
from tidemill.kernels.weights.mirror import ElementChange

LAYERS, VOCABULARY = 12, 8192
MADE = ("dense", "experts", "fused")


@dataclass
class Figures:
    """Milliseconds by figure, printed at the end."""

    shape: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figure: str, milliseconds: float) -> None:
        """Add one value."""
        self.values.setdefault(figure, []).append(milliseconds)

    def timed(self, figure: str, call: Callable[[], Any]) -> Any:
        """Make a call and add its time."""
        begun = time.perf_counter()
        result = call()
        self.add(figure, 1e3 * (time.perf_counter() - begun))
        return result

    def say(self) -> None:
        """Print p50 and p95 of each figure, and the ratios."""
        for figure, values in self.values.items():
            p50, p95 = np.percentile(values, [50, 95])
            line = {"figure": figure, "unit": "ms", "p50": round(p50, 3), "p95": round(p95, 3), "n": len(values)}
            print(json.dumps({**line, **self.shape}), flush=True)
        pause = np.median(self.values["pause of a delta"])
        for other in ("engine step", "pause of a full write", "vLLM's reload_weights from safetensors"):
            ratio = round(float(pause / np.median(self.values[other])), 4)
            print(json.dumps({"figure": f"pause of a delta / {other}", "p50": ratio, **self.shape}), flush=True)


class Load:
    """Keeps a number of requests running and measures the longest time that one of them waited for a token."""

    def __init__(self, engine: Any, requests: int) -> None:
        self._engine = engine
        self._tasks = [asyncio.create_task(self._request(n)) for n in range(requests)]
        self.tokens, self.longest_ms = 0, 0.0

    async def _request(self, number: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=128, logprobs=0, ignore_eos=True)
        for turn in range(1 << 30):
            prompt = {"prompt_token_ids": [(7 * number + 3 * i + turn) % 190 + 5 for i in range(16)]}
            last = time.perf_counter()
            async for _ in self._engine.generate(prompt, sampling, f"{number}-{turn}"):
                now = time.perf_counter()
                self.longest_ms = max(self.longest_ms, 1e3 * (now - last))
                self.tokens, last = self.tokens + 1, now

    async def until(self, tokens: int) -> None:
        """Wait until this many more tokens have been sampled."""
        wanted = self.tokens + tokens
        while self.tokens < wanted:
            await asyncio.wait(self._tasks, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                if task.done():
                    task.result()

    def close(self) -> None:
        """End the requests."""
        for task in self._tasks:
            task.cancel()


class Chain:
    """Versions of a checkpoint: the trainer's deltas, and the mirror against which a replica checks them."""

    def __init__(self, base: Path, density: float) -> None:
        self._specs, self._density = specs_of(map_checkpoint(base)), density
        self._mirror = {spec.name: bits_in_memory(map_checkpoint(base), spec.name) for spec in self._specs}
        self._random = np.random.default_rng(0)
        self.fingerprint = self.computed()
        self.version = 0

    @property
    def n_elements(self) -> int:
        """Number of elements of a version."""
        return sum(bits.size for bits in self._mirror.values())

    def computed(self) -> Any:
        """Compute the mirror's fingerprint from its elements."""
        found = (fingerprint(bits, TensorKey.of(name)) for name, bits in self._mirror.items())
        return sum(found, start=ZERO)

    def encode(self) -> list[bytes]:
        """Encode the next version as a delta: a share of the elements changes in the last bit."""
        self.version += 1
        changes = (TensorChange(s.name, s.dtype, *self._step(self._mirror[s.name])) for s in self._specs)
        return list(encode_delta(self.version, self.version - 1, changes))

    def _step(self, bits: Any) -> tuple[Any, Any]:
        return bits, bits ^ (self._random.random(bits.size, dtype=np.float32) < self._density).astype(np.uint16)

    def decode(self, pieces: list[bytes]) -> list[Any]:
        """Decode and check the changes of a delta."""
        blocks = decode_delta(pieces, self.version, self.version - 1)
        return [change for block in blocks for change in resolve_all(block, self._mirror)]

    def commit(self, changes: list[Any]) -> None:
        """Apply the changes to the mirror."""
        for change in changes:
            apply_change(change, self._mirror[change.name])
            self.fingerprint += change.target - change.base

    def save(self, directory: Path) -> Path:
        """Save the version as safetensors."""
        weights = {s.name: Weight(s.dtype, self._mirror[s.name].reshape(s.shape)) for s in self._specs}
        save_checkpoint(directory, weights)
        return directory


async def follow(engine: Any, chain: Chain, load: Load, figures: Figures, measured: bool) -> None:
    """Bring one version to the engine, as a replica does."""
    notes = figures if measured else Figures({})
    pieces = await asyncio.to_thread(notes.timed, "encode, in the trainer", chain.encode)
    load.longest_ms = 0.0
    begun = time.perf_counter()
    changes = await asyncio.to_thread(notes.timed, "decode and check, while tokens flow", lambda: chain.decode(pieces))
    called = time.perf_counter()
    applied = await engine.apply(
        [ElementChange(change.name, change.indices, change.new_bits) for change in changes], chain.version
    )
    ended = time.perf_counter()
    notes.add("transfer and staging, while tokens flow", 1e3 * (ended - called) - applied.pause_ms)
    notes.add("staging in the engine core", applied.stage_ms)
    notes.add("pause of a delta", applied.pause_ms)
    notes.add("apply", applied.apply_ms)
    notes.add("engine step", applied.decode_step_ms)
    notes.add("step to served, without a network", notes.values["encode, in the trainer"][-1] + 1e3 * (ended - begun))
    await load.until(2 * applied.requests_in_flight)
    notes.add("longest wait for a token, the update within", load.longest_ms)
    proof = await engine.prove()
    await asyncio.to_thread(chain.commit, changes)
    assert proof.total == chain.fingerprint.hex(), proof.damage
    notes.add("proof, while tokens flow", proof.proof_ms)
    sizes = {"delta_bytes": sum(map(len, pieces)), "changed": sum(change.indices.size for change in changes)}
    figures.shape.update(sizes)


async def measure(arguments: argparse.Namespace, root: Path) -> None:
    """Print every figure."""
    from tidemill.consumers.replica.engine import ReplicaEngine
    from tidemill.consumers.replica.server import server_arguments

    base = make_model(int(arguments.parameters), root / "base")
    settings = ReplicaSettings(kv_cache_mb=256, max_model_len=256, max_num_seqs=arguments.requests)
    specs = specs_of(map_checkpoint(base))
    engine = await ReplicaEngine.start(server_arguments(str(base), settings), specs, 0, KvPolicy.STALE)
    try:
        chain = Chain(base, arguments.density)
        figures = Figures({"elements": chain.n_elements, "requests": arguments.requests})
        load = Load(engine, arguments.requests)
        await load.until(4 * arguments.requests)
        for number in range(arguments.versions + 1):
            await follow(engine, chain, load, figures, measured=number > 0)
        assert chain.fingerprint == chain.computed()
        await rewrite(engine, chain, load, figures, chain.save(root / "whole"), arguments.rewrites)
        load.close()
        figures.shape["rss_mb"] = _rss_mb()
        figures.say()
    finally:
        engine.shutdown()


async def rewrite(engine: Any, chain: Chain, load: Load, figures: Figures, whole: Path, times: int) -> None:
    """Write the last version in full, with Tidemill and with vLLM."""
    for _ in range(times):
        applied = await engine.load(whole, chain.version)
        figures.add("pause of a full write", applied.pause_ms)
        figures.add("reading for a full write, while tokens flow", applied.stage_ms)
        await load.until(2 * applied.requests_in_flight)
        begun = time.perf_counter()
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(whole)})
        figures.add("vLLM's reload_weights from safetensors", 1e3 * (time.perf_counter() - begun))
        await load.until(2 * applied.requests_in_flight)
    proof = await engine.prove()
    assert proof.total == chain.fingerprint.hex(), proof.damage


async def on_ranks(ranks: Any, arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Take versions on one engine of several ranks and return the values of its line."""
    topology, versions = arguments.topology[0], arguments.versions
    model, _, given = topology.partition(":")
    chosen = {key: int(value) for key, _, value in (each.partition("=") for each in given.split(","))}
    settings = ReplicaSettings(kv_cache_mb=16, max_model_len=256, max_num_seqs=16, **chosen)
    engines, base = ranks.engines, Path(model)
    if model in MADE:
        kind = engines.Kind("float32", tied=True, intermediate=0 if model == "dense" else 64)
        base = engines.make_model(kind, root / "a")
    views = [engines.driver.view_of(base)]
    views.append(engines.driver.nudged(views[0], seed=1, fraction=arguments.density))
    last, specs = engines.save_view(views[1], base, root / "b"), None
    if model == "fused":
        views = [engines.fused_view(base), engines.fused_view(last)]
        specs = [TensorSpec(name, bits.shape, "bfloat16") for name, bits in views[0].items()]
    ranks.install()
    engine = await ranks.start(base, settings, specs)
    chain, rounds = ranks.Versions(engine, views), []
    for first in range(0, versions, ranks.MOVES):
        # Each round starts its own requests, which are shorter than the models' context.
        moves = min(ranks.MOVES, versions - first)
        rounds.append(await ranks.under_load(engine, chain, moves, first=ranks.REQUESTS * len(rounds)))
    objections = [each for found in rounds for each in found["objections"]]
    while chain.number % 2 == 0:
        await chain.move()
        objections.append(await chain.proved())
    greedy = await ranks.greedy(engine)
    engine.shutdown()
    fresh = await ranks.start(last, settings)
    equal = greedy == await ranks.greedy(fresh)
    fresh.shutdown()
    pauses, steps = (np.array([one for found in rounds for one in found[what]]) for what in ("pauses", "steps"))
    return {
        "figure": "versions on ranks", "topology": topology, "elements": sum(bits.size for bits in views[0].values()),
        "versions": chain.number, "unproved": sum(map(bool, objections)),
        "least_requests_running": min(found["running"] for found in rounds),
        "spans": sum(found["spans"] for found in rounds), "wrong_tokens": sum(found["wrong"] for found in rounds),
        "greedy_equal_to_a_fresh_engine": equal,
        "pause_ms": [round(float(np.percentile(pauses, share)), 3) for share in (50, 95)],
        "engine_step_ms": [round(float(np.percentile(steps, share)), 3) for share in (50, 95)],
    }  # fmt: skip


def make_model(parameters: int, directory: Path) -> Path:
    """Make a random Qwen3 with at least this many parameters, tied, its hidden size a multiple of 64."""
    hidden = next(h for h in range(64, 1 << 14, 64) if 13 * LAYERS * h * h + VOCABULARY * h >= parameters)
    size = {"hidden_size": hidden, "num_hidden_layers": LAYERS, "intermediate_size": 3 * hidden}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
    path: Path = replica_driver.make_checkpoint(directory, vocabulary=VOCABULARY, **size, **heads)
    return path


def _rss_mb() -> dict[str, int]:
    """Return the resident memory of the server and of its engine core."""
    server = psutil.Process()
    (core,) = server.children()
    return {"server": server.memory_info().rss >> 20, "core": core.memory_info().rss >> 20}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Pause of a weight update beside the engine's step and a full reload.")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--versions", type=int, default=20, help="that are measured, or taken while requests run")
    parser.add_argument("--rewrites", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--topology", nargs="+", help="MODEL:tensor_parallel=2[,expert_parallel=1], MODEL:data_parallel=2"
    )
    arguments = parser.parse_args()
    if len(arguments.topology or ()) > 1:
        # vLLM reads its environment once, and the process ends with its engines.
        command = [sys.executable, __file__, "--versions", str(arguments.versions)]
        command += ["--density", str(arguments.density), "--topology"]
        sys.exit(max(subprocess.run([*command, one]).returncode for one in arguments.topology))
    prepare_environment(1)
    # The engine core is a fork of this process. A fork would wait for the compute threads that it does not have.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        if not arguments.topology:
            asyncio.run(measure(arguments, Path(name)))
            return
        from tests.consumers import ranks_driver

        found = asyncio.run(on_ranks(ranks_driver, arguments, Path(name)))
    print(json.dumps(found), flush=True)
    os._exit(bool(found["unproved"] or found["wrong_tokens"] or not found["greedy_equal_to_a_fresh_engine"]))


if __name__ == "__main__":
    main()
