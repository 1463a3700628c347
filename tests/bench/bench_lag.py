"""Mismatch by part over a run at several policy lags; rewards by routing and by serving format: JSON lines.

    python tests/bench/bench_lag.py [--models dense experts] [--lags 0 1 4] [--routings own replayed shuffled]
                                    [--formats bf16 nvfp4] [--seeds 0 1 2] [--steps 16] [--noise 0 0.05]

The loop without a log: a vLLM engine samples answers to random prompts, the trainer takes a step on them, and the
engine gets the weights of `lag` steps ago. The reward is the share of an answer's tokens that are in the first eighth
of the vocabulary. With `noise`, the engine's routers differ from the trainer's: each weight gets added noise of `noise`
times the deviation of the weights, different for each version. `lag.step`: the mismatch of one step, by part (`all`,
`engines`, `staleness`, `lagged`: k3 and the largest difference of logprobs in nats), the shares of tokens and of layers
with another routing, tokens that the correction cut, the mean reward. `lag.run`: the reward of each step, the mean of
the last quarter, the mean k3. Routings are those of `trainer.routing`; a dense model has none. Formats are those of
`trainer.serving_format`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from measuring import in_own_process, say

PROMPT, VOCABULARY = 12, 160
View = dict[str, np.ndarray]


def noisy(view: View, share: float, seed: int) -> View:
    """Return the view with noise on the routers' weights, of `share` of the weights' deviation."""
    import torch

    if not share:
        return view
    changed, random = dict(view), np.random.default_rng(seed)
    for name in (name for name in view if name.endswith("mlp.gate.weight")):
        values = (view[name].astype(np.uint32) << 16).view(np.float32)
        moved = torch.from_numpy(values + share * values.std() * random.standard_normal(values.shape, np.float32))
        changed[name] = moved.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return changed


class Sampler:
    """A vLLM engine that samples groups of answers."""

    def __init__(self, directory: Path, view: View, options: argparse.Namespace) -> None:
        from tests.consumers import expert_driver
        from tidemill.kernels.weights.bits import TensorSpec

        kind = expert_driver.Routed if options.model == "experts" else expert_driver.engines.InProcess
        self.engine = kind(directory, options.dtype, max_num_batched_tokens=4096)
        self.engine.install([TensorSpec(name, bits.shape, "bfloat16") for name, bits in view.items()])
        self.options, self.held, self.random = options, view, np.random.default_rng(options.seed)

    def hold(self, view: View, version: int) -> None:
        """Serve these weights."""
        self.engine.apply(self.held, view, version)
        self.held = view

    def groups(self, step: int, version: int) -> list[Any]:
        """Sample groups of answers, with expert ids if the model has experts."""
        from vllm import SamplingParams

        options, prompts = self.options, {}
        for number in range(options.groups * options.rollouts):
            if number % options.rollouts == 0:
                prompt = self.random.integers(2, VOCABULARY, PROMPT).tolist()
            prompts[str(number)] = prompt
        asked = SamplingParams(temperature=1.0, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
        for name, prompt in prompts.items():
            self.engine.engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": f"{step}"}, asked)
        done = {}
        while self.engine.engine.has_unfinished_requests():
            done |= {int(output.request_id): output for output in self.engine.engine.step() if output.finished}
        outputs = [done[number] for number in sorted(done)]
        return [
            group_of(f"g{step}-{first}", outputs[first : first + options.rollouts], version)
            for first in range(0, len(outputs), options.rollouts)
        ]


def group_of(name: str, outputs: list[Any], version: int) -> Any:
    """Make a group that can be trained on."""
    from tests.trainer.conftest import make_trainable
    from tests.trainer.families import segment_of

    segments = []
    for output in outputs:
        (answer,) = output.outputs
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        # Scores are rounded: a certain token may have a logprob just above 0.
        logprobs = [min(entry[token].logprob, 0.0) for token, entry in chosen]
        made = segment_of(list(output.prompt_token_ids), list(answer.token_ids), logprobs)
        segments.append(replace(made, spans=[replace(made.spans[0], version=version)]))
    rewards = tuple(float((one.ids()[one.mask() == 1] < VOCABULARY // 8).mean()) for one in segments)
    group = make_trainable(name, rewards, version=version)
    pairs = zip(group.rollouts, segments, strict=True)
    ids = [output.outputs[0].routed_experts for output in outputs]
    return replace(
        group,
        rollouts=tuple(replace(rollout, segments=[segment]) for rollout, segment in pairs),
        expert_ids=() if ids[0] is None else tuple(ids),
    )


def run(options: argparse.Namespace, directory: Path) -> None:
    """Do one run; runs in its own process."""
    from tests.consumers import expert_driver

    expert_driver.engines.prepare_environment(1)
    from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
    from tidemill.trainer.mismatch import measure, routed_otherwise
    from tidemill.trainer.model import load_model
    from tidemill.trainer.serving_view import serving_view
    from tidemill.trainer.step import Learner

    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0), optimizer=OptimizerSettings(learning_rate=options.learning_rate),
        routing=options.routing if options.model == "experts" else "off", score_older_every=2, length_divisor=32.0,
        serving_format=options.format,
    )  # fmt: skip
    model = load_model(str(directory))
    # The engine starts with the checkpoint, the trainer with the checkpoint in its serving format.
    sampler = Sampler(directory, serving_view(model), options)
    learner = Learner(model, settings, None)
    views = [serving_view(learner.model)]
    facts = {name: getattr(options, name) for name in ("model", "lag", "routing", "format", "noise", "seed")}
    rewards, k3 = [], []
    for step in range(1, options.steps + 1):
        version = max(0, step - 1 - options.lag)
        sampler.hold(noisy(views[version], options.noise, version), version)
        outcome = learner.train(sampler.groups(step, version), step, step - 1, seed=1000 * options.seed + step)
        views.append(serving_view(learner.model))
        slices, _ = measure(outcome.trained, step - 1)
        parts = {each.part: each for each in slices if each.dimension == "all"}
        tokens, layers = routed_otherwise(outcome.trained)
        rewards.append(outcome.metrics["reward"])
        k3.append(parts["all"].k3)
        told = {f"{part}/{number}": getattr(each, number) for part, each in parts.items() for number in ("k3", "max")}
        say("lag.step", **facts, step=step, **told, tokens_otherwise=tokens, layers_otherwise=layers,
            cut=parts["all"].cut / parts["all"].tokens, reward=rewards[-1])  # fmt: skip
    last = float(np.mean(rewards[-max(1, options.steps // 4) :]))
    say("lag.run", **facts, rewards=[round(reward, 3) for reward in rewards], last_quarter=last, k3=float(np.mean(k3)))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["dense", "experts"], choices=["dense", "experts"])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4], help="policy lags, in steps")
    parser.add_argument("--routings", nargs="+", default=["own"], help="for experts: own, replayed, shuffled")
    parser.add_argument("--formats", nargs="+", default=["bf16"], help="of the weights that the engine serves")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0], help="on the engine's routers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of model, prompts and sampling")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--groups", type=int, default=6, help="of a step")
    parser.add_argument("--rollouts", type=int, default=6, help="of a group")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dtype", default="float32", help="that the engine computes in")
    options = parser.parse_args()
    from tests.trainer.families import make_model

    for seed, model in product(options.seeds, options.models):
        with tempfile.TemporaryDirectory() as directory:
            family, changes = ("Qwen3", {}) if model == "dense" else ("Qwen3Moe", {"num_experts": 8})
            made = make_model(family, seed, **changes, tie_word_embeddings=False)
            made.bfloat16().save_pretrained(directory)
            routings = options.routings if model == "experts" else ["off"]
            for lag, routing, form, noise in product(options.lags, routings, options.formats, options.noise):
                one = {"model": model, "lag": lag, "routing": routing, "format": form, "noise": noise, "seed": seed}
                in_own_process(run, argparse.Namespace(**{**vars(options), **one}), Path(directory))


if __name__ == "__main__":
    main()
