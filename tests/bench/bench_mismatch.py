"""Cost of measuring the mismatch: share of a training step, and seconds by tokens, JSON lines.

    python tests/bench/bench_mismatch.py [--model DIR] [--shape 8x54+20] [--groups 4] [--steps 5] [--threads 1]

`mismatch.step`: processor seconds of a step, of the record about it, and of a step that also scores the first row at
older weights. `share` is the record's part of a step, `older_share` the part of the scoring, spread over the steps
between (`trainer.score_older_every`). `mismatch.measure`: the record alone, by tokens. The minimum of `--steps`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_prefix import groups_of, model_of, sizes
from measuring import say


def step(options: argparse.Namespace) -> Any:
    """Print one line about a step, and return the tokens that it trained."""
    from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
    from tidemill.trainer.mismatch import measure
    from tidemill.trainer.step import Learner

    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0), optimizer=OptimizerSettings(learning_rate=1e-6), threads=options.threads
    )
    every = settings.score_older_every
    plain, recorded, scoring = [], [], []
    for found, changes in ((plain, {"score_older_every": 0}), (scoring, {"score_older_every": 1})):
        learner = Learner(model_of(options.model), settings.model_copy(update=changes), None)
        groups = groups_of(options.groups, *sizes(options.shape), vocab=int(learner.model.config.vocab_size))
        for number in range(1, options.steps + 2):
            version = 0 if number <= 2 else number - 2
            asked = [_of_version(group, version) for group in groups]
            begun = time.process_time()
            trained = learner.train(asked, number, number - 1, seed=number).trained
            found.append(time.process_time() - begun)
            assert trained is not None and (trained.older_version >= 0) == (found is scoring and number > 1)
            begun = time.process_time()
            measure(trained, number - 1)
            recorded.append(time.process_time() - begun)
    seconds = {
        name: min(of[1:]) for name, of in (("step_s", plain), ("record_s", recorded), ("scoring_step_s", scoring))
    }
    added = max(seconds["scoring_step_s"] - seconds["step_s"], 0.0)
    say("mismatch.step", shape=options.shape, groups=options.groups, tokens=len(trained.weights), **seconds,
        share=seconds["record_s"] / seconds["step_s"], older_share=added / every / seconds["step_s"])  # fmt: skip
    return trained


def _of_version(group: Any, version: int) -> Any:
    def of(rollout: Any) -> Any:
        (segment,) = rollout.segments
        spans = [replace(span, version=version) for span in segment.spans]
        return replace(rollout, segments=[replace(segment, spans=spans)])

    return replace(group, rollouts=tuple(map(of, group.rollouts)))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Directory of a checkpoint; without it one of SmolLM2-135M's shape.")
    parser.add_argument(
        "--shape", default="8x54+20", help="Rollouts of a group, tokens of its prompt and of an answer."
    )
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--copies", type=int, nargs="*", default=[1, 10, 100, 1000], help="Of the step's records.")
    options = parser.parse_args()
    trained = step(options)
    from tidemill.trainer.mismatch import measure

    for copies in options.copies:
        many = replace(
            trained,
            trajectories=[*trained.trajectories] * copies,
            **{name: torch.cat([getattr(trained, name)] * copies)
               for name in ("trainer_logprobs", "sampler_logprobs", "weights", "cut", "advantages", "older_logprobs")},
        )  # fmt: skip
        spent = []
        for _ in range(options.steps):
            begun = time.process_time()
            measure(many, options.steps)
            spent.append(time.process_time() - begun)
        say("mismatch.measure", tokens=len(many.weights), records=len(many.trajectories), seconds=min(spent))


if __name__ == "__main__":
    main()
