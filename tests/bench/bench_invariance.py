"""Different answers to one prompt in a changing batch, and logprobs of one group, with and without: JSON lines.

    python tests/bench/bench_invariance.py [--runs 80] [--length 128] [--tokens 32] [--rounds 3] [--shapes 8x54+20]

`invariance.answers`: a vLLM engine, in float32 and in bfloat16, answers one prompt `runs` times, greedily, among other
prompts that change in number, length and position. `distinct` counts different answers with logprobs compared bit for
bit, `distinct_tokens` answers with different tokens, `max` is the largest difference of logprobs in nats;
`tokens_per_cpu_second` are sampled tokens of all requests per second of processor time (one compute thread).
`invariance.logprobs`: the trainer takes a step on one group among others that change in number and fork from it;
`distinct` counts the different logprobs of the group. `invariance.step`: sampled tokens of a step per second of
processor time, for rollouts with a shared prompt; the best of `rounds`. Each line with `batch_invariant` false is the
control of the next one, measured alternately with it; `speed` is the median ratio to it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_prefix import groups_of, model_of, sizes
from measuring import in_own_process, say

WAYS = (False, True)


def make_model(directory: Path, options: argparse.Namespace) -> int:
    """Make a random Qwen3 and return the size of its vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=options.hidden, intermediate_size=3 * options.hidden, bos_token_id=None,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, eos_token_id=1, pad_token_id=0,
        num_key_value_heads=options.hidden // 128, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    return 4096


def engine(directory: Path, dtype: str, words: int, options: argparse.Namespace) -> None:
    """Print the lines about an engine; runs in its own process."""
    from tests.consumers import invariance_driver as driver

    driver.engines.prepare_environment(1)
    made = driver.compare(
        directory, dtype, words=words, length=options.length, tokens=options.tokens, runs=options.runs,
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    for way, found in made.items():
        found.pop("unfit")
        say("invariance.answers", engine=dtype, length=options.length, batch_invariant=driver.WAYS[way], **found)


def learner_of(on: bool, options: argparse.Namespace, row_tokens: int = 1024) -> Any:
    from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
    from tidemill.trainer.step import Learner

    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0), optimizer=OptimizerSettings(learning_rate=1e-6), row_tokens=row_tokens,
        batch_invariant=on,
    )  # fmt: skip
    return Learner(model_of(options.model), settings, None)


def forks(group: Any, places: Iterable[int]) -> list[Any]:
    """Make groups whose rollouts equal those of `group` up to a position."""

    def forked(rollout: Any, at: int) -> Any:
        (segment,) = rollout.segments
        ids = segment.ids().copy()
        ids[at:] = ids[at:][::-1]
        return replace(rollout, segments=[replace(segment, token_ids=ids.tobytes())])

    return [replace(group, rollouts=tuple(forked(each, at) for each in group.rollouts)) for at in places]


def logprobs(options: argparse.Namespace) -> None:
    """Print the lines about the logprobs of a group in a changing batch."""
    rollouts, prompt, answer = sizes(options.shapes[0])
    for on in WAYS:
        seen = set()
        for beside in ((), (prompt // 2,), (prompt // 3, prompt - 5, 10)):
            learner = learner_of(on, options)
            (group,) = groups_of(1, rollouts, prompt, answer, vocab=int(learner.model.config.vocab_size))
            trained = learner.train([*forks(group, beside), group], 1, 0, seed=1).trained
            seen.add(tuple(trained.trainer_logprobs[-rollouts * answer :].tolist()))
        say("invariance.logprobs", shape=options.shapes[0], batch_invariant=on, companies=3, distinct=len(seen))


def steps(shape: str, options: argparse.Namespace) -> None:
    """Print the lines about the speed of a step."""
    learners = {on: learner_of(on, options) for on in WAYS}
    spent: dict[bool, list[float]] = {on: [] for on in WAYS}
    tokens = 0
    for number in range(1, options.rounds + 2):
        for on, learner in learners.items():
            groups = groups_of(1, *sizes(shape), vocab=int(learner.model.config.vocab_size))
            begun = time.process_time()
            tokens = learner.train(groups, number, 0, seed=number).tokens
            spent[on].append(time.process_time() - begun)
    for on, seconds in spent.items():
        ratios = [plain / own for plain, own in zip(spent[False][1:], seconds[1:], strict=True)]
        say("invariance.step", shape=shape, batch_invariant=on, tokens_per_cpu_second=tokens / min(seconds[1:]),
            speed=statistics.median(ratios))  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=80, help="answers to the one prompt")
    parser.add_argument("--length", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="steps of the trainer that are measured")
    parser.add_argument("--hidden", type=int, default=256, help="width of the engine's model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the engine's model")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="types that engines compute in")
    parser.add_argument("--shapes", nargs="*", default=["8x54+20", "8x200+100"], help="rollouts of a step's group")
    parser.add_argument("--model", type=Path, help="checkpoint of the trainer; without it one of SmolLM2-135M's shape")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        words = make_model(Path(root), options)
        for dtype in options.dtypes:
            in_own_process(engine, Path(root), dtype, words, options)
    if options.shapes:
        logprobs(options)
    for shape in options.shapes:
        steps(shape, options)


if __name__ == "__main__":
    main()
