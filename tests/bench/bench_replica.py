"""What a weight update costs a replica, in one run on one machine: one JSON line a figure.

    python tests/bench/bench_replica.py [--versions 60] [--hidden 256] [--layers 4] [--requests 32]

A real vLLM engine core decodes many requests; between its steps versions are applied in place as deltas of 1 % of the
elements, then the same versions as full writes, then by vLLM's own `reload_weights`. No Kafka is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_PATH = Path(__file__).parents[1] / "consumers" / "replica_driver.py"
_SPEC = importlib.util.spec_from_file_location("replica_driver", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
driver: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = driver
_SPEC.loader.exec_module(driver)


def say(figure: str, values: list[float], **more: Any) -> None:
    """Print one figure's p50 and p95 in milliseconds."""
    p50, p95 = np.percentile(values, [50, 95])
    print(json.dumps({"figure": figure, "unit": "ms", "p50": round(p50, 3), "p95": round(p95, 3), **more}), flush=True)


class Load:
    """Keeps a number of requests running in an engine."""

    def __init__(self, engine: Any, requests: int) -> None:
        from vllm import SamplingParams

        self.engine, self.requests, self.started = engine, requests, 0
        self.parameters = SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True)

    def step(self) -> float:
        """One engine step; its milliseconds."""
        while self.engine.engine.get_num_unfinished_requests() < self.requests:
            self.started += 1
            prompt = [(7 * self.started + 3 * i) % 190 + 5 for i in range(40)]
            self.engine.engine.add_request(str(self.started), {"prompt_token_ids": prompt}, self.parameters)
        begun = time.perf_counter()
        self.engine.engine.step()
        return 1e3 * (time.perf_counter() - begun)


def measure(arguments: argparse.Namespace, root: Path) -> None:
    """Print every figure."""
    size = {"hidden_size": arguments.hidden, "num_hidden_layers": arguments.layers}
    base = driver.make_checkpoint(root / "base", **size)
    engine = driver.InProcess(base, "float32")
    load = Load(engine, arguments.requests)
    old = driver.view_of(base)
    n_elements = sum(bits.size for bits in old.values())
    shape = {"elements": n_elements, "requests": arguments.requests, "versions": arguments.versions}
    decode = [load.step() for _ in range(arguments.versions * 4)][arguments.versions :]
    say("engine step", decode, **shape)
    pauses, proofs, fulls, reloads = [], [], [], []
    for version in range(1, arguments.versions + 1):
        new = driver.nudged(old, version)
        load.step()
        pauses.append(engine.apply(old, new, version)["pause_ms"])
        proofs.append(engine.prove()["proof_ms"])
        old = new
    say("pause of a delta of 1 %", pauses, **shape)
    say("proof, while tokens flow", proofs, **shape)
    whole = driver.save_view(old, base, root / "whole")
    for version in range(arguments.versions):
        load.step()
        fulls.append(engine.core.tidemill_load(str(whole), version, False)["pause_ms"])
        load.step()
        begun = time.perf_counter()
        engine.core.collective_rpc("reload_weights", kwargs={"weights_path": str(whole)})
        reloads.append(1e3 * (time.perf_counter() - begun))
    say("full write of the same weights", fulls, **shape)
    say("vLLM's reload_weights of the same weights", reloads, **shape)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Pause of a weight update beside the engine's step and a full reload.")
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    driver.prepare_environment(1)
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        measure(parser.parse_args(), Path(name))


if __name__ == "__main__":
    main()
