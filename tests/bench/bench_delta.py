"""Figures of the delta codec and the fingerprints, one JSON line each: `python tests/bench/bench_delta.py`.

Speeds are GB of dense bf16 weights for each second of processor time of one core, so that a busy machine changes them
little: the median of some runs, beside numpy's memcpy of the same bytes in the same process. Sizes are wire bytes for
each changed element, beside raw int32 index + bf16 value (6 bytes). The weights are synthetic: Gaussian with
log-normal row scales, fp32 masters that an Adam-like step of `lr` moves, so that a bf16 weight changes the more often
the smaller it is. The density that comes out stands beside the lr that made it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tidemill.kernels.delta import TensorChange, apply_change, decode_delta, encode_delta, resolve
from tidemill.kernels.fingerprint import Bits, TensorKey, fingerprint

RAW_BYTES = 6
LEARNING_RATES = (1e-6, 3e-6, 1e-5, 1e-4)


def bf16(values: np.ndarray) -> Bits:
    """Round fp32 to bf16 patterns, to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def synthetic_pair(rows: int, columns: int, lr: float, seed: int) -> tuple[Bits, Bits]:
    """bf16 patterns of a matrix before and after one Adam-like step on its fp32 master."""
    generator = np.random.default_rng(seed)
    scale = 0.02 * np.exp(0.5 * generator.standard_normal((rows, 1), dtype=np.float32))
    master = scale * generator.standard_normal((rows, columns), dtype=np.float32)
    step = np.float32(0.25 * lr) * generator.standard_normal((rows, columns), dtype=np.float32)
    return bf16(master), bf16(master + step)


def gb_per_second(n_bytes: int, work: Callable[[], object], runs: int) -> float:
    """Median throughput of single-threaded `work` over `n_bytes`, by processor time, after one run to warm up."""
    work()
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return n_bytes / statistics.median(seconds) / 1e9


def report(figure: str, **values: object) -> None:
    """Print one JSON line; numbers with four significant digits."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"figure": figure, **rounded}), flush=True)


def replay(chunks: list[bytes], bits: Bits) -> None:
    """Read, check, decode and apply a delta."""
    for block in decode_delta(chunks, 1, 0):
        change = resolve(block, bits)
        if change is not None:
            apply_change(change, bits)


def measure_delta(lr: float, rows: int, columns: int, seed: int, runs: int) -> None:
    """Encode, and read + resolve + apply of one step, with its size."""
    old, new = synthetic_pair(rows, columns, lr, seed)
    changes = [TensorChange("w", "bfloat16", old, new)]
    chunks = list(encode_delta(1, 0, changes))
    changed, wire = int((old != new).sum()), sum(map(len, chunks))
    held = old.copy()

    def apply_from_base() -> None:
        np.copyto(held, old)
        replay(chunks, held)

    apply_speed = gb_per_second(old.nbytes, apply_from_base, runs)
    if not np.array_equal(held, new):
        raise AssertionError("the round trip is not bit-equal")
    report(
        "delta",
        lr=lr,
        density=changed / old.size,
        changed=changed,
        wire_bytes=wire,
        bytes_per_changed=wire / max(1, changed),
        raw_bytes_per_changed=RAW_BYTES,
        encode_gb_s=gb_per_second(old.nbytes, lambda: list(encode_delta(1, 0, changes)), runs),
        copy_resolve_apply_gb_s=apply_speed,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="rows of the matrix")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the matrix")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    chosen = parser.parse_args()
    bits, _ = synthetic_pair(chosen.rows, chosen.columns, 0.0, chosen.seed)
    target, key = np.empty_like(bits), TensorKey.of("w")
    memcpy = gb_per_second(bits.nbytes, lambda: np.copyto(target, bits), chosen.runs)
    report("memcpy", gb_s=memcpy, n_bytes=bits.nbytes)
    report("fingerprint", gb_s=gb_per_second(bits.nbytes, lambda: fingerprint(bits, key), chosen.runs))
    for lr in LEARNING_RATES:
        measure_delta(lr, chosen.rows, chosen.columns, chosen.seed, chosen.runs)


if __name__ == "__main__":
    main()
