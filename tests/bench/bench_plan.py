"""The planner's memory and that of trainers that take two steps and publish them, one JSON line per trainer.

    python tests/bench/bench_plan.py [--model small DIR] [--ranks 1 2 4] [--row-tokens 256] [--rows 4] [--checkpointed]
                                     [--expert-parallel 1]

Each rank is a process that torchrun started. It holds and does the same as a trainer on a CPU: model, masters, moments,
reference and older weights; steps, during each of which the version before is published to a broker that is started
for it; a checkpoint. `measured_mb` is the peak resident memory of the rank with the highest one, `imported_mb` its peak
before the model was loaded, `started_mb` after model and reference were loaded; `planned_mb` is the sum of
`compose/plan/memory.py` (`parts_mb`) for rows of that many tokens, nearly all sampled, and `of_measured` their ratio.
`small` and `experts` are random models, dense and with experts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.measuring import log_at, peak_bytes
from tests.trainer.conftest import make_trainable

SMALL = {
    "vocab_size": 16_000, "hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
MADE = {
    "small": {"intermediate_size": 1536},
    "experts": {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 2},
}
MIB = 2**20
STEPS = 2


def take_steps(directory: str, chosen: argparse.Namespace) -> None:
    """Take steps on rollouts that fill rows, publish and save them, and print this rank's peak memory in MiB."""
    import tidemill.trainer.run  # noqa: F401 - what the role imports is resident too
    from tidemill.kernels.weights.publish import WeightPublisher
    from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
    from tidemill.schemas.log.admin import create_topics
    from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
    from tidemill.trainer.job import open_job
    from tidemill.trainer.trainable import TopicProgress
    from tidemill.trainer.trained_weights import TrainedWeights, make_learner

    imported, settings = peak_bytes() / MIB, trainer_settings(directory, chosen)
    kafka = KafkaSettings(bootstrap=chosen.bootstrap, topic_prefix=chosen.prefix)
    run, store = RunSettings(), StoreSettings(root=chosen.store)
    with open_job(600.0) as job:
        job.ranks.on_first(lambda: create_topics(kafka))
        with (
            WeightPublisher.open(
                kafka, run, store, settings.publish, base_model=directory, ranks=job.ranks.sibling()
            ) as publisher,
            ThreadPoolExecutor(1) as beside,
        ):
            checkpoints = CheckpointStore(store.root, run.run_id, run.branch, 1)
            weights = TrainedWeights(
                settings, make_learner(settings, job), checkpoints, publisher.publish, job=job, beside=beside
            )
            started = peak_bytes() / MIB
            if not job.ranks.is_first:
                weights.follow()
            else:
                group = long_group(chosen.rows, chosen.row_tokens, weights.vocab_size, prompt=1)
                made = weights.snapshot()
                weights.publish(0)
                for step in range(1, STEPS + 1):
                    weights.train([group], step, step - 1, step, None)
                    weights.published()
                    made = weights.snapshot()
                    weights.publish(step)
                weights.published()
                weights.save(CheckpointState(run.run_id, run.branch, STEPS, STEPS, made, "", TopicProgress()), ())
                weights.let_go()
    print(json.dumps({"imported_mb": imported, "started_mb": started, "measured_mb": peak_bytes() / MIB}))


def trainer_settings(directory: str, chosen: argparse.Namespace) -> Any:
    """Return settings of a trainer that keeps and publishes as much as possible, with older weights in both steps."""
    from tidemill.trainer.config import KlSettings, TrainerSettings

    return TrainerSettings(
        model=directory,
        kl=KlSettings(coefficient=0.001),
        row_tokens=chosen.row_tokens,
        device="cpu",
        checkpoint_activations=chosen.checkpointed,
        score_older_every=STEPS,
        expert_parallel=chosen.expert_parallel,
    )


def long_group(rollouts: int, tokens: int, vocabulary: int, prompt: int) -> Any:
    """Make a group of rollouts without common tokens, each of which fills a row and is sampled after its prompt."""
    from tidemill.schemas.records import Segment, VersionSpan

    group = make_trainable("g", tuple(float(n % 2) for n in range(rollouts)))
    generator = np.random.default_rng(0)
    mask = np.zeros(tokens + 1, np.uint8)
    mask[prompt:] = 1
    made = []
    for record in group.rollouts:
        segment = Segment(
            n_tokens=tokens + 1,
            token_ids=generator.integers(0, vocabulary, tokens + 1).astype("<u4").tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=np.where(mask, -np.log(vocabulary), 0).astype("<f4").tobytes(),
            spans=[VersionSpan(0, prompt, tokens + 1)],
        )
        made.append(replace(record, segments=[segment], sampled_tokens=int(mask.sum())))
    return replace(group, rollouts=tuple(made))


def compare(directory: str, ranks: int, chosen: argparse.Namespace, bootstrap: str, root: Path) -> None:
    """Run a trainer of this many ranks, and print the highest peak of a rank and the plan."""
    from tidemill.compose.plan.estimates import delta_estimates
    from tidemill.compose.plan.memory import TrainerCase, trainer_bytes
    from tidemill.trainer.model import size_of_name

    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *several, __file__, "--take-steps", directory, "--row-tokens", str(chosen.row_tokens)]
    command += ["--rows", str(chosen.rows), "--expert-parallel", str(chosen.expert_parallel)]
    command += ["--checkpointed"] if chosen.checkpointed else []
    prefix = f"plan-{uuid.uuid4().hex[:8]}."
    command += ["--bootstrap", bootstrap, "--prefix", prefix, "--store", str(root / prefix)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    size, settings = size_of_name(directory), trainer_settings(directory, chosen)
    adam = settings.optimizer
    delta = {each.name: each.value for each in delta_estimates(size, adam.learning_rate, adam.betas[0], None)}
    parts = trainer_bytes(
        size,
        TrainerCase(
            ranks, chosen.row_tokens, reference=True, compute_bytes=4, checkpointed=chosen.checkpointed, gpu=False,
            density=delta["density"], delta_bytes=delta["delta_bytes"], beside=True, on_device=False, older=True,
            expert_parallel=chosen.expert_parallel,
        ),
    )  # fmt: skip
    planned, lines = sum(parts.values()) / MIB, [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == ranks, done.stdout
    found = max(map(json.loads, lines), key=lambda rank: rank["measured_mb"])
    line = {
        "figure": "plan.trainer_memory",
        "parameters": size.parameters,
        "experts": size.experts,
        "row_tokens": chosen.row_tokens,
        "ranks": ranks,
        "expert_parallel": chosen.expert_parallel,
        "checkpointed": chosen.checkpointed,
        "planned_mb": round(planned, 1),
        "measured_mb": round(found["measured_mb"], 1),
        "imported_mb": round(found["imported_mb"], 1),
        "started_mb": round(found["started_mb"], 1),
        "of_measured": round(planned / found["measured_mb"], 4),
        "parts_mb": {name: round(value / MIB, 1) for name, value in parts.items() if value},
    }
    print(json.dumps(line), flush=True)


def compare_all(chosen: argparse.Namespace, bootstrap: str, root: Path) -> None:
    """Compare each model on each number of ranks."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    for name in chosen.model:
        directory = name
        if name in MADE:
            directory = str(root / name)
            kind = Qwen3MoeConfig if "num_experts" in MADE[name] else Qwen3Config
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(kind(**SMALL, **MADE[name]))
            model.to(torch.bfloat16).save_pretrained(directory)
            del model
        for ranks in chosen.ranks:
            compare(directory, ranks, chosen, bootstrap, root)


def main() -> None:
    """Compare, with a new broker if none is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MADE), help="directories of models, small or experts")
    parser.add_argument("--row-tokens", type=int, default=256, help="tokens of each row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="numbers of ranks; the fullest rank is told")
    parser.add_argument("--checkpointed", action="store_true", help="with trainer.checkpoint_activations")
    parser.add_argument("--expert-parallel", type=int, default=1, help="trainer.expert_parallel")
    parser.add_argument("--bootstrap", help="a broker; without it one is started")
    for inner in ("--take-steps", "--prefix", "--store"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.take_steps:
        take_steps(chosen.take_steps, chosen)
        return
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        root = Path(folder)
        with log_at(chosen.bootstrap, root / "stack") as bootstrap:
            compare_all(chosen, bootstrap, root)


if __name__ == "__main__":
    main()
