"""Encode a delta of tensors on a device, and print JSON lines: `python -m tests.gpu.delta_speed [--small]`.

The device is that of TIDEMILL_TEST_DEVICE. `publish_gb_s` is the publisher's part: the tensor is compared and encoded
on the device, and stored in the version that is kept there; `publish_host_gb_s` is the same with that version in the
CPU's memory. The bytes are compared with those of the compiled loops on the CPU. `gb_s` counts the bytes of the dense
bf16 tensor; `copy_gb_s` is a copy of the same tensor on the same device, which reads and writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tests.kernels.encoding import encode_delta
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.held import HeldVersion

DEVICE = os.environ.get("TIDEMILL_TEST_DEVICE", "cpu")
DENSITIES = (0.003, 0.01)
SPREAD, STEP = 0.02, 1e-6


def main() -> None:
    """Measure each density."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tensor of 4096 elements in place of 134 million")
    elements = 1 << 12 if parser.parse_args().small else 1 << 27
    for density in DENSITIES:
        old, new = change(elements, density)
        held, target = (torch.from_numpy(bits).view(torch.bfloat16).to(DEVICE) for bits in (old, new))

        def encoded(held: torch.Tensor = held, target: torch.Tensor = target) -> list[bytes]:
            return list(encode_delta(1, 0, [TensorChange("w", "bfloat16", held, target)]))

        os.environ["TIDEMILL_KERNELS"] = "cpu"
        expected = list(encode_delta(1, 0, [TensorChange("w", "bfloat16", old, new)]))
        os.environ["TIDEMILL_KERNELS"] = "triton"
        parts = encoded()
        assert parts == expected, "the delta differs from that of the compiled loops"
        copied = torch.empty_like(held)

        gigabytes = 2 * elements / 1e9
        encode_s, copy_s = seconds(encoded), seconds(lambda copied=copied, held=held: copied.copy_(held))
        published, shards = {}, []
        for name, on_device in {"publish_gb_s": True, "publish_host_gb_s": False}.items():
            os.environ["TIDEMILL_KERNELS"] = "triton" if on_device else "cpu"
            version = HeldVersion.copy_of(0, {"w": held}, on_device=on_device)
            begun = time.perf_counter()
            with DeltaShard(1, 0, version.take_over(1, {"w": target}, on_device=on_device)) as shard:
                published[name] = gigabytes / (time.perf_counter() - begun)
                shards.append((shard.n_bytes, shard.change, version.parts["w"].fingerprint()))
        assert shards[0] == shards[1], "the delta of a version on the device differs"
        line = {
            "figure": "delta",
            "device": DEVICE,
            "elements": elements,
            "density": float(np.mean(old != new)),
            "delta_bytes": sum(map(len, parts)),
            "encode_gb_s": gigabytes / encode_s,
            "copy_gb_s": 2 * gigabytes / copy_s,
            **published,
            "equal_to_cpu": True,
        }
        print(json.dumps(line), flush=True)


def change(elements: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """Return bf16 bit patterns of Gaussian weights, before and after a share of about `density` changes by one."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(elements, dtype=np.float32) * np.float32(SPREAD)
    old = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    chance = 1 / np.maximum(np.abs(values), np.float32(STEP))
    moved = generator.random(elements, dtype=np.float32) < chance * (density / chance.mean())
    return old, np.where(moved, old + np.uint16(1), old)


def seconds(work: Callable[[], object], runs: int = 3) -> float:
    """Return the median time of some runs, after one run to compile and warm up; waits for the device's work."""
    taken = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        work()
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
