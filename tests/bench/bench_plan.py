"""The planner's memory beside trainers that take two steps, one JSON line a model.

    python tests/bench/bench_plan.py [--model small DIR] [--row-tokens 256] [--rows 2] [--ranks 2] [--checkpointed]

Each rank is a process that holds what a trainer on a CPU holds: model, masters, moments, reference, the serving view,
and a copy of the newest version as the publisher keeps it. `measured_mb` is the most that was resident, `imported_mb`
before the model was there; `planned_mb` is the sum of `compose/plan/memory.py` for rows of so many tokens, and
`of_measured` the ratio of the two. `small` is a random model of 21 million parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "trainer"), str(Path(__file__).parents[2])]

from conftest import trainable_group  # noqa: E402

SMALL = {
    "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
MIB = 2**20


def take_steps(directory: str, chosen: argparse.Namespace) -> None:
    """Take two steps on rollouts that fill rows, and print the most MiB that this rank had resident."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tidemill.kernels.weights.held import HeldVersion
    from tidemill.trainer.config import KlSettings, TrainerSettings
    from tidemill.trainer.job import open_job
    from tidemill.trainer.sharded_view import local_parts
    from tidemill.trainer.step import Learner

    imported = resident_mb()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory)
    model, reference = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.001),
        row_tokens=chosen.row_tokens,
        device="cpu",
        checkpoint_activations=chosen.checkpointed,
    )
    group = long_group(chosen.rows, chosen.row_tokens, config.vocab_size)
    with open_job(600.0) as job:
        learner = Learner(model, settings, reference, job.ranks, job.place)
        view = local_parts(learner.model, first=job.ranks.is_first)
        held = HeldVersion.copy_of(0, view)
        for step in (1, 2):
            learner.train([group], step, 0, seed=step)
        assert held.version == 0 and view
    print(json.dumps({"imported_mb": imported, "measured_mb": resident_mb()}))


def resident_mb() -> float:
    """The most MiB that this process has had resident. Its `ru_maxrss` begins with those of the process before it."""
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024 / MIB


def long_group(rollouts: int, tokens: int, vocabulary: int) -> Any:
    """A group of rollouts that share nothing and fill a row of so many tokens each, half of them sampled."""
    from tidemill.schemas.records import Segment, VersionSpan

    group = trainable_group("g", tuple(float(n % 2) for n in range(rollouts)))
    generator = np.random.default_rng(0)
    mask = np.zeros(tokens + 1, np.uint8)
    mask[tokens // 2 :] = 1
    made = []
    for record in group.rollouts:
        segment = Segment(
            n_tokens=tokens + 1,
            token_ids=generator.integers(0, vocabulary, tokens + 1).astype("<u4").tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=np.where(mask, -np.log(vocabulary), 0).astype("<f4").tobytes(),
            spans=[VersionSpan(0, tokens // 2, tokens + 1)],
        )
        made.append(replace(record, segments=[segment], sampled_tokens=int(mask.sum())))
    return replace(group, rollouts=tuple(made))


def compare(directory: str, chosen: argparse.Namespace) -> None:
    """Run a process of its own, and print its peak beside the plan."""
    from tidemill.compose.plan.memory import TrainerCase, trainer_bytes
    from tidemill.trainer.model_size import size_of_name

    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(chosen.ranks)] if chosen.ranks > 1 else []
    command = [sys.executable, *several, __file__, "--take-steps", directory, "--row-tokens", str(chosen.row_tokens)]
    command += ["--rows", str(chosen.rows), *(["--checkpointed"] if chosen.checkpointed else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = size_of_name(directory)
    case = TrainerCase(
        chosen.ranks, chosen.row_tokens, reference=True, compute_bytes=4, checkpointed=chosen.checkpointed, gpu=False
    )
    parts = trainer_bytes(size, case)
    planned, lines = sum(parts.values()) / MIB, [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = max(map(json.loads, lines), key=lambda rank: rank["measured_mb"])
    line = {
        "figure": "plan.trainer_memory",
        "parameters": size.parameters,
        "row_tokens": chosen.row_tokens,
        "ranks": chosen.ranks,
        "checkpointed": chosen.checkpointed,
        "planned_mb": round(planned, 1),
        "measured_mb": round(found["measured_mb"], 1),
        "imported_mb": round(found["imported_mb"], 1),
        "of_measured": round(planned / found["measured_mb"], 4),
        "parts_mb": {name: round(value / MIB, 1) for name, value in parts.items() if value},
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    """Compare each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["small"], help="directories of models, or small")
    parser.add_argument("--row-tokens", type=int, default=256, help="tokens of each row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step")
    parser.add_argument("--ranks", type=int, default=1, help="ranks; the greatest one's memory is told")
    parser.add_argument("--checkpointed", action="store_true", help="with trainer.checkpoint_activations")
    parser.add_argument("--take-steps", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.take_steps:
        take_steps(chosen.take_steps, chosen)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.model:
            if name == "small":
                from transformers import Qwen3Config

                name = folder
                Qwen3Config(**SMALL).save_pretrained(name)
            compare(name, chosen)


if __name__ == "__main__":
    main()
