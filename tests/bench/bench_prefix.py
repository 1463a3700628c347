"""A training step with and without sharing the common tokens of a group's rollouts, JSON lines.

    python tests/bench/bench_prefix.py [--model DIR] [--shapes 8x54+20 16x1000+100] [--groups 1] [--threads 2]

Rollouts of a group have one prompt and random answers, so that only the prompt can be shared. A step is forward,
backward and optimizer. Each variant has its own process, and the two take their steps alternately, so that other load
on the machine affects both. `seconds` and `cpu_s` are those of the fastest step; `held_mb` is resident before the first
step, `peak_mb` the maximum. `prefix.ratio` has the ratios of these values; its `paired` is the median ratio of the
processor times of consecutive steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from measuring import peak_bytes, say

from tests.trainer.conftest import make_trainable

SMOLLM2_135M = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = ("8x54+20", "16x1000+100")
take_next: Callable[[int], dict[str, float]]
"""Takes a step of the variant that `start` prepared in this process."""


def sizes(shape: str) -> tuple[int, int, int]:
    """Parse "8x54+20": rollouts, tokens of the prompt, tokens of an answer."""
    rollouts, rest = shape.split("x")
    prompt, answer = rest.split("+")
    return int(rollouts), int(prompt), int(answer)


def start(options: argparse.Namespace, shape: str, variant: str) -> None:
    """Prepare this process for the steps of a variant."""
    from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
    from tidemill.trainer.step import Learner

    global take_next
    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0),
        optimizer=OptimizerSettings(learning_rate=1e-6),
        row_tokens=options.row_tokens,
        threads=options.threads,
        share_prefixes=variant == "shared",
    )
    learner = Learner(model_of(options.model), settings, None)
    groups = groups_of(options.groups, *sizes(shape), vocab=int(learner.model.config.vocab_size))
    held = peak_bytes()

    def take(step: int) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = learner.train(groups, step, 0, seed=step)
        return {
            "seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "held_mb": held / 2**20,
            "peak_mb": peak_bytes() / 2**20,
            "tokens": outcome.metrics["packing/tokens"], "computed": outcome.metrics["packing/computed"],
        }  # fmt: skip

    take_next = take


def step_of(step: int) -> dict[str, float]:
    """Take a step of this process's variant and return its cost."""
    return take_next(step)


def model_of(directory: Path | None) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tidemill.trainer.model import load_model

    if directory is not None:
        return load_model(str(directory))
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M))


def groups_of(count: int, rollouts: int, prompt: int, answer: int, vocab: int) -> list[Any]:
    from tidemill.schemas.records import Segment, VersionSpan

    rng = np.random.default_rng(0)
    mask = np.repeat(np.array([0, 1], np.uint8), [prompt, answer])
    logprobs, spans = np.where(mask, -np.log(vocab), 0).astype("<f4"), [VersionSpan(0, prompt, prompt + answer)]

    def group(name: str) -> Any:
        made, asked = (
            make_trainable(name, tuple(float(n % 2) for n in range(rollouts))),
            rng.integers(0, vocab, prompt),
        )
        ids = (np.concatenate([asked, rng.integers(0, vocab, answer)]).astype("<u4") for _ in made.rollouts)
        segments = (Segment(len(one), one.tobytes(), mask.tobytes(), logprobs.tobytes(), spans) for one in ids)
        pairs = zip(made.rollouts, segments, strict=True)
        return replace(made, rollouts=tuple(replace(rollout, segments=[segment]) for rollout, segment in pairs))

    return [group(f"g{n}") for n in range(count)]


def compare(options: argparse.Namespace, shape: str) -> None:
    """Print one line for each variant of a shape, and one with their ratios."""
    seen: dict[str, list[dict[str, float]]] = {"plain": [], "shared": []}
    with ExitStack() as stack:
        processes = {
            variant: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), start, (options, shape, variant)))
            for variant in seen
        }
        for step in range(1, options.steps + 2):
            for variant, process in processes.items():
                seen[variant].append(process.submit(step_of, step).result())
    told = {"shape": shape, "groups": options.groups, "threads": options.threads}
    best = {}
    for variant, found in seen.items():
        timed = {name: min(one[name] for one in found[1:]) for name in ("seconds", "cpu_s")}
        best[variant] = {**found[-1], **timed}
        say("prefix.step", **told, variant=variant, **best[variant])
    names = ("seconds", "cpu_s", "computed", "peak_mb")
    ratios = {name: best["plain"][name] / best["shared"][name] for name in names}
    paired = (a["cpu_s"] / b["cpu_s"] for a, b in zip(seen["plain"][1:], seen["shared"][1:], strict=True))
    say("prefix.ratio", **told, **ratios, paired=statistics.median(paired))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; else a random model of SmolLM2-135M's shape")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rollouts x prompt + answer, in tokens")
    parser.add_argument("--threads", type=int, default=2, help="threads of the tensor library")
    parser.add_argument("--groups", type=int, default=1, help="groups of a step")
    parser.add_argument("--steps", type=int, default=5, help="steps of each variant that are timed, after a first one")
    parser.add_argument("--row-tokens", type=int, default=4096, help="trainer.row_tokens")
    options = parser.parse_args()
    for shape in options.shapes:
        compare(options, shape)


if __name__ == "__main__":
    main()
