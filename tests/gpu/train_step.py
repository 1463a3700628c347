"""Two optimizer steps on a device, twice, one JSON line per model: `python -m tests.gpu.train_step [--small]`.

Models are random: SmolLM2's shape, and Qwen3's of 0.6 and 4 billion parameters; `--small` is one of 2 million. Both
runs start from the same weights, and the weights after them are compared bit for bit. `seconds` is the time of the
second step of the first run. `of_peak` is its share of the device's peak in bf16, if that is known: forward and
backward, without recomputation. `planned_gb` is the sum of `tidemill plan`, to compare with the peak memory of the
device. `delta_bytes` is the size of the delta of the second step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.bench.bench_plan import long_group
from tests.kernels.encoding import encode_delta
from tests.trainer.conftest import fingerprint_of
from tidemill.compose.plan.memory import TrainerCase, trainer_bytes
from tidemill.kernels.elements import TensorChange
from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.model_size import size_of
from tidemill.trainer.serving_view import ServingView, serving_view
from tidemill.trainer.step import Learner

DEVICE = os.environ.get("TIDEMILL_TEST_DEVICE", "cpu")
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "B200": 2250}
"""Peak rates in dense bf16, by a part of the device's name; from the manufacturers' data sheets."""
QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
MODELS: dict[str, PretrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, **QWEN3
    ),
    "qwen3-4b": Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, **QWEN3
    ),
}  # fmt: skip
SMALL = Qwen3Config(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    """Train each model twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small model, short rows")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    chosen = parser.parse_args()
    models, row_tokens = ({"small": SMALL}, 64) if chosen.small else (MODELS, 2048)
    for name, config in models.items():
        first, again = (train(config, chosen.rows, row_tokens) for _ in range(2))
        print(json.dumps({"figure": "train_step", "model": name, "device": DEVICE, **first,
                          "twice_equal": first["fingerprint"] == again["fingerprint"]}), flush=True)  # fmt: skip
        assert first["fingerprint"] == again["fingerprint"], f"{name}: two runs gave different weights"


def train(config: PretrainedConfig, rows: int, row_tokens: int) -> dict[str, Any]:
    """Take two steps from seeded weights and return the figures of the second one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0),
        optimizer=OptimizerSettings(learning_rate=1e-6),
        row_tokens=row_tokens,
        device=DEVICE,
        checkpoint_activations=True,
    )
    learner = Learner(model, settings, None)
    group = long_group(rows, row_tokens, config.vocab_size, row_tokens // 2)
    learner.train([group], 1, 0, seed=1)
    before = serving_view(learner.model)
    begun = time.perf_counter()
    found = learner.train([group], 2, 1, seed=2).metrics
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    after, size = serving_view(learner.model), size_of(model)
    case = TrainerCase(
        1, row_tokens, reference=False, compute_bytes=4 if DEVICE == "cpu" else 2, checkpointed=True,
        gpu=DEVICE != "cpu", density=0.0, delta_bytes=0.0, beside=False, on_device=False, older=False,
    )  # fmt: skip
    work = found["flops/forward"] + found["flops/backward"]
    told = {
        "parameters": size.parameters,
        "row_tokens": row_tokens,
        "seconds": seconds,
        "tokens_per_s": found["packing/computed"] / seconds,
        "tflops": work / seconds / 1e12,
        "of_peak": share_of_peak(work / seconds / 1e12),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if DEVICE != "cpu" else None,
        "planned_gb": sum(trainer_bytes(size, case).values()) / 1e9,
        "delta_bytes": delta_bytes(before, after),
        "changed": sum(int((before[name] != after[name]).sum()) for name in after) / size.parameters,
        "fingerprint": fingerprint_of(after),
    }
    del learner, model
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return told


def delta_bytes(before: ServingView, after: ServingView) -> int:
    """Return the number of bytes of the delta between two versions."""
    changes = (TensorChange(name, "bfloat16", before[name], after[name]) for name in after)
    return sum(map(len, encode_delta(2, 1, changes)))


def share_of_peak(tflops: float) -> float | None:
    """Return the share of the device's peak; None if the peak is not known."""
    if DEVICE == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((tflops / peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


if __name__ == "__main__":
    main()
