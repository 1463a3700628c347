"""Three optimizer steps on a device, twice, one JSON line per model: `python -m tests.gpu.train_step [--small]`.

Models are random: SmolLM2's shape, and Qwen3's of 0.6 and 4 billion parameters; `--small` is one of 0.4 million. Both
runs start from the same weights, and the weights after them are compared bit for bit. `seconds` is the time of the
last step of the second run. `of_peak` is its share of the device's peak in bf16, if that is known: forward and
backward, without recomputation. `planned_gb` is the sum of `tidemill plan`, to compare with the peak memory of the
steps. `publish_s` is the time to compare and encode the last version on the device, `delta_bytes` the size of its
delta, and `changed` the share of changed bf16 weights at this learning rate.
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
from tidemill.compose.plan.memory import TrainerCase, trainer_bytes
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.held import HeldVersion
from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.model_size import size_of
from tidemill.trainer.serving_view import local_parts
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
    parser.add_argument("--small", action="store_true", help="one small model, short rollouts")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of a step")
    parser.add_argument("--in-row", type=int, default=8, help="rollouts of a row")
    chosen = parser.parse_args()
    models, tokens = ({"small": SMALL}, 64) if chosen.small else (MODELS, 2048)
    for name, config in models.items():
        first, again = (train(config, chosen, tokens, publish=publish) for publish in (False, True))
        print(json.dumps({"figure": "train_step", "model": name, "device": DEVICE, **again,
                          "twice_equal": first["fingerprint"] == again["fingerprint"]}), flush=True)  # fmt: skip
        assert first["fingerprint"] == again["fingerprint"], f"{name}: two runs gave different weights"


def train(config: PretrainedConfig, chosen: argparse.Namespace, tokens: int, *, publish: bool) -> dict[str, Any]:
    """Take three steps from seeded weights and return the figures of the last one; `publish` the last two versions."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0),
        optimizer=OptimizerSettings(learning_rate=1e-6),
        row_tokens=chosen.in_row * tokens,
        device=DEVICE,
        checkpoint_activations=True,
    )
    learner = Learner(model, settings, None)
    size, group = size_of(model), long_group(chosen.rollouts, tokens, config.vocab_size, tokens // 2)
    learner.train([group], 1, 0, seed=1)
    version = HeldVersion.copy_of(1, local_parts(learner.model, first=True)) if publish else None
    told: dict[str, Any] = {}
    for step in (2, 3):
        if DEVICE != "cpu":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        found = learner.train([group], step, step - 1, seed=step).metrics
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - begun, torch.cuda.max_memory_allocated() if DEVICE != "cpu" else 0
        new = local_parts(learner.model, first=True, on_device=True)
        fingerprint = sum((part.fingerprint() for part in new.values()), start=ZERO).hex()
        if version is not None:
            begun = time.perf_counter()
            with DeltaShard(step, step - 1, version.take_over(step, new, on_device=True)) as shard:
                told |= {"publish_s": time.perf_counter() - begun, "delta_bytes": shard.n_bytes}
                told["changed"] = shard.n_changed / size.parameters
                version.becomes(step, [shard.covered])
            # In the CPU's memory, as before, so that the peak is that of the step.
            version = version.snapshot()
        del new
    work, case = found["flops/forward"] + found["flops/backward"], TrainerCase(
        1, settings.row_tokens, reference=False, compute_bytes=4 if DEVICE == "cpu" else 2, checkpointed=True,
        gpu=DEVICE != "cpu", density=0.0, delta_bytes=0.0, beside=False, on_device=False, older=False,
    )  # fmt: skip
    told |= {
        "parameters": size.parameters,
        "tokens": found["packing/computed"],
        "row_tokens": settings.row_tokens,
        "learning_rate": settings.optimizer.learning_rate,
        "seconds": seconds,
        "tokens_per_s": found["packing/computed"] / seconds,
        "tflops": work / seconds / 1e12,
        "of_peak": share_of_peak(work / seconds / 1e12),
        "peak_gb": peak / 1e9 or None,
        "planned_gb": sum(trainer_bytes(size, case).values()) / 1e9,
        "fingerprint": fingerprint,
    }
    del learner, model, version
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()
    return told


def share_of_peak(tflops: float) -> float | None:
    """Return the share of the device's peak; None if the peak is not known."""
    if DEVICE == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((tflops / peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


if __name__ == "__main__":
    main()
