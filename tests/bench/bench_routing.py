"""The trainer's distance from the engine on a mixture of experts, by routing: JSON lines.

    python tests/bench/bench_routing.py [--figures mismatch capture] [--seeds 0 1 2] [--sequences 16] [--tokens 96]
                                        [--layers 4] [--experts 8]

A vLLM engine samples from a random Qwen3-MoE, in bfloat16 and in float32, and reports the experts of each token; the
trainer computes the logprobs of the same tokens. `routing.mismatch` is the distance between the two: `own`, with the
choice of the trainer's routers; `replayed`, with the sampler's experts; `shuffled`, as a control, with those of other
tokens. `engine twice` is the engine compared with itself, when it computes the sampled sequences again as prompts.
`k3` is the mean of r - log r - 1 with r the ratio of probabilities, `max` and `p99` are of |difference of logprobs| in
nats; `otherwise` is the share of (token, layer) pairs for which the routers' own choice differs from the sampler's.
`routing.bytes` are the bytes of expert ids per token, next to those of the rollout's own arrays. `routing.capture`:
tokens that an engine samples per second of processor time, without and with recording of expert ids, alternately; the
best of `--rounds`, and the median ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import distance, in_own_process, say

PROMPT = 32


def sample(directory: Path, dtype: str, options: argparse.Namespace, seed: int) -> dict[str, np.ndarray]:
    """Sample from an engine, and compute the same sequences again with it; runs in its own process."""
    from tests.consumers import expert_driver

    expert_driver.engines.prepare_environment(1)
    from vllm import SamplingParams

    length = PROMPT + options.tokens
    engine = expert_driver.Routed(directory, dtype, max_model_len=length + 1, max_num_batched_tokens=4096)
    random = np.random.default_rng(seed)
    prompts = {str(n): random.integers(2, 150, PROMPT).tolist() for n in range(options.sequences)}
    outputs = engine.answers(prompts, temperature=1.0, max_tokens=options.tokens, logprobs=0)
    for name, output in outputs.items():
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompt = {"prompt_token_ids": expert_driver.tokens_of(output), "cache_salt": "again"}
        engine.engine.add_request(name, prompt, asked)
    again = engine.end()
    made: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "ids": [], "logprobs again": [], "ids again": []}
    for name, output in outputs.items():
        tokens, answer = expert_driver.tokens_of(output), output.outputs[0]
        made["tokens"].append(tokens)
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        made["logprobs"].append([entry[token].logprob for token, entry in chosen])
        made["ids"].append(answer.routed_experts)
        scored = zip(tokens[PROMPT:], again[name].prompt_logprobs[PROMPT:], strict=True)
        made["logprobs again"].append([entry[token].logprob for token, entry in scored])
        made["ids again"].append(again[name].outputs[0].routed_experts[: length - 1])
    return {name: np.array(values) for name, values in made.items()}


def capture(directory: Path, dtype: str, options: argparse.Namespace, seed: int) -> None:
    """Print lines about the speed of an engine with and without expert ids; runs in its own process."""
    from tests.consumers import expert_driver

    expert_driver.engines.prepare_environment(1)
    from vllm import SamplingParams

    kinds = {False: expert_driver.engines.InProcess, True: expert_driver.Routed}
    length = PROMPT + options.tokens
    engines = {on: kind(directory, dtype, max_model_len=length + 1, max_num_batched_tokens=4096)
               for on, kind in kinds.items()}  # fmt: skip
    random, spent = np.random.default_rng(seed), np.zeros((options.rounds + 1, len(kinds)))
    for number in range(options.rounds + 1):
        prompts = [random.integers(2, 150, PROMPT).tolist() for _ in range(options.sequences)]
        for on, made in engines.items():
            asked = SamplingParams(temperature=1.0, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
            begun = time.process_time()
            for place, prompt in enumerate(prompts):
                made.engine.add_request(str(place), {"prompt_token_ids": prompt}, asked)
            while made.engine.has_unfinished_requests():
                made.engine.step()
            spent[number, int(on)] = time.process_time() - begun
    # The first round is a warm-up.
    for on, seconds in zip(kinds, spent[1:].T, strict=True):
        say("routing.capture", seed=seed, engine=dtype, expert_ids=on,
            tokens_per_cpu_second=options.sequences * options.tokens / float(seconds.min()),
            speed=float(np.median(spent[1:, 0] / seconds)))  # fmt: skip


def trained(directory: Path, dtype: str, routing: str, sampled: Any) -> dict[str, float]:
    """Compute the trainer's distance from the samples."""
    import torch

    from tests.trainer.families import OneSegment, segment_of
    from tidemill.trainer.batch import pack
    from tidemill.trainer.choices import Routing
    from tidemill.trainer.model import load_model, use_packed_attention
    from tidemill.trainer.policy import frozen_logprobs
    from tidemill.trainer.routing import RoutingReplay

    model = load_model(str(directory))
    use_packed_attention(model)
    replay = RoutingReplay(model, Routing(routing), 0.0)
    model.to(getattr(torch, dtype))
    parts = zip(sampled["tokens"].tolist(), sampled["logprobs"].tolist(), strict=True)
    rollouts = [OneSegment(segment_of(tokens[:PROMPT], tokens[PROMPT:], logprobs)) for tokens, logprobs in parts]
    rows = pack(rollouts, 1024, model.config.vocab_size, routing=Routing(routing), expert_ids=list(sampled["ids"]))
    apart, seen = [], torch.zeros(5, dtype=torch.int64)
    for row in rows:
        apart.append((frozen_logprobs(model, row) - row.sampler_logprobs).double().numpy())
        seen += replay.seen()
    return {**distance(np.concatenate(apart)), "otherwise": float(seen[0] / seen[2])}


def compare(options: argparse.Namespace, seed: int, root: Path) -> None:
    """Compare all routings of one model."""
    from tests.trainer.families import make_model

    model = make_model(
        "Qwen3Moe", seed, num_hidden_layers=options.layers, num_experts=options.experts, hidden_size=128,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=128, max_position_embeddings=1024,
    )  # fmt: skip
    model.bfloat16().save_pretrained(root / "model")
    for engine in ("bfloat16", "float32"):
        if "capture" in options.figures:
            in_own_process(capture, root / "model", engine, options, seed)
        if "mismatch" in options.figures:
            sampled = in_own_process(sample, root / "model", engine, options, seed)
            mismatch(root / "model", engine, seed, sampled)
    if "mismatch" in options.figures:
        ids = int(sampled["ids"][0, 0].nbytes)
        say("routing.bytes", ids=ids, rollout=9, layers=options.layers, experts=options.experts)


def mismatch(directory: Path, engine: str, seed: int, sampled: dict[str, np.ndarray]) -> None:
    """Compare all routings with the samples of an engine."""
    twice = (sampled["logprobs again"] - sampled["logprobs"]).reshape(-1)
    sets = [np.sort(sampled[name], -1) for name in ("ids", "ids again")]
    otherwise = float((sets[0] != sets[1]).any(-1).mean())
    say("routing.mismatch", seed=seed, engine=engine, trainer=None, routing="engine twice",
        **distance(twice), otherwise=otherwise)  # fmt: skip
    for trainer in ("float32", "bfloat16") if engine == "bfloat16" else ("float32",):
        for routing in ("own", "replayed", "shuffled"):
            found = trained(directory, trainer, routing, sampled)
            say("routing.mismatch", seed=seed, engine=engine, trainer=trainer, routing=routing, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", default=["mismatch", "capture"], choices=["mismatch", "capture"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="models to make, and what they say")
    parser.add_argument("--sequences", type=int, default=16, help="answers sampled from each engine")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer, of which a token goes to two")
    parser.add_argument("--rounds", type=int, default=8, help="times that the speed of each engine is measured")
    options = parser.parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as root:
            compare(options, seed, Path(root))


if __name__ == "__main__":
    main()
