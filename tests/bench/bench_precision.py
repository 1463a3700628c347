"""Serving formats: the trainer's distance from the engine, matched or not, their cost, and the bytes of a version. JSON
lines.

    python tests/bench/bench_precision.py [--model data/models/smollm2] [--seeds 0] [--engines bfloat16] [--steps 3]
                                         [--formats bf16 fp8_blocks mxfp8 nvfp4]

`precision.mismatch`: a vLLM engine serves the model in the format `served` and samples; the trainer computes the
logprobs of the same tokens in float32 with the weights of `trainer`, for each format; `matched` if both formats are
equal. `k3` is the mean of r - log r - 1 with r the ratio of probabilities; `max` and `p99` are of |difference of
logprobs| in nats.

`precision.activations`: the same with weights of one `format` on both sides, where the engine rounds its activations to
`served` and the trainer to `trainer` (`none`: it does not).

`precision.cost`: tokens that the engine samples per second of processor time, and processor seconds of a trainer's
step, with and without rounded activations.

`precision.bytes`: the delta of a version, from optimizer steps on the samples of the first engine, with the same
masters in each format. `changed` is the share of bf16 values that differ; `bytes` is their delta, which is sent;
`bound` is its bound by exponent class (`kernels.bounds`). `code_bytes` is the size of the codes and scales in the same
codec, with the bound `code_bound`. The first step is left out: in it AdamW changes every weight by a whole learning
rate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import cpu_seconds, distance, in_own_process, say

SMOLLM2 = Path(__file__).parents[2] / "data/models/smollm2"
FORMATS = ("bf16", "fp8_blocks", "mxfp8", "nvfp4")
ACTIVATIONS = {"fp8_blocks": "fp8_rows", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Formats of activations, by the format of the weights."""
PROMPTS = 4
"""Number of questions, each answered equally often: a group of rollouts."""


def held_in(directory: Path, form: str) -> Any:
    """Load the model of a checkpoint as the trainer holds it in a format."""
    from tidemill.trainer.choices import ServingFormat
    from tidemill.trainer.config import OptimizerSettings
    from tidemill.trainer.master import MasterWeights
    from tidemill.trainer.model import load_model

    model = load_model(str(directory)).eval()
    MasterWeights(model, OptimizerSettings(), ServingFormat(form))
    return model


def prompts_of(directory: Path, seed: int) -> list[list[int]]:
    """Make questions of two numbers, as token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    numbers = np.random.default_rng(seed).integers(100, 1000, (PROMPTS, 2)).tolist()
    asked = (f"A shop sold {a} apples on Monday and {b} on Tuesday. Tell the story of" for a, b in numbers)
    return [tokenizer.encode(text).ids for text in asked]


def sample(
    directory: Path, dtype: str, options: argparse.Namespace, seed: int, activations: str = ""
) -> tuple[list[Any], float]:
    """Return prompt, answer and logprobs of each sequence of an engine, and the tokens per second of processor time;
    runs in its own process.
    """
    from tests.consumers import engine_driver
    from tidemill.consumers.replica.environment import ACTIVATIONS_VARIABLE

    os.environ[ACTIVATIONS_VARIABLE] = activations
    engine_driver.prepare_environment(1)
    from vllm import SamplingParams

    room = {"max_model_len": 512, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 128 << 20}
    driven = engine_driver.InProcess(directory, dtype, skip_tokenizer_init=True, **room)
    asked = SamplingParams(temperature=1.0, max_tokens=options.tokens, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = prompts_of(options.model, seed)
    for number in range(options.sequences):
        driven.engine.add_request(str(number), {"prompt_token_ids": prompts[number % PROMPTS]}, asked)
    made, begun = {}, time.process_time()
    while driven.engine.has_unfinished_requests():
        for output in (output for output in driven.engine.step() if output.finished):
            (answer,) = output.outputs
            ids = list(answer.token_ids)
            found = [entry[token].logprob for token, entry in zip(ids, answer.logprobs, strict=True)]
            made[int(output.request_id)] = [list(output.prompt_token_ids), ids, found]
    speed = options.sequences * options.tokens / (time.process_time() - begun)
    return [made[number] for number in range(options.sequences)], speed


def apart_from(sequences: list[Any], model: Any) -> np.ndarray:
    """Return the trainer's logprobs less the engine's, of the sampled tokens."""
    import torch

    from tests.trainer.families import OneSegment, segment_of
    from tidemill.trainer.batch import pack
    from tidemill.trainer.policy import frozen_logprobs

    rows = pack([OneSegment(segment_of(*sequence)) for sequence in sequences], 1024, model.config.vocab_size)
    return torch.cat([frozen_logprobs(model, row) - row.sampler_logprobs for row in rows]).double().numpy()


def mismatch(options: argparse.Namespace, seed: int, root: Path) -> dict[tuple[str, str], tuple[list[Any], float]]:
    """Compare every served format with every format of the trainer; return the samples by format and engine."""
    from tidemill.trainer.model import use_packed_attention

    found: dict[tuple[str, str], tuple[list[Any], float]] = {}
    for served in options.formats:
        held_in(options.model, served).bfloat16().save_pretrained(root / served)
        for engine in options.engines:
            found[served, engine] = in_own_process(sample, root / served, engine, options, seed)
    for trainer in options.formats:
        model = held_in(options.model, trainer)
        use_packed_attention(model)
        for (served, engine), (sequences, _) in found.items():
            apart = apart_from(sequences, model)
            say("precision.mismatch", seed=seed, served=served, engine=engine, trainer=trainer,
                matched=served == trainer, **distance(apart), tokens=len(apart))  # fmt: skip
    return found


def rounded_activations(
    options: argparse.Namespace, seed: int, root: Path, plain: dict[tuple[str, str], tuple[list[Any], float]]
) -> None:
    """Compare engines and trainers with and without rounded activations, and measure what these cost.

    `plain` contains the samples of the engines without them, whose checkpoints are in `root`.
    """
    from tidemill.kernels.quantise import ROW_FORMATS
    from tidemill.trainer.activations import quantise_activations
    from tidemill.trainer.master import quantised_weights
    from tidemill.trainer.model import use_packed_attention

    for form in (form for form in options.formats if form in ACTIVATIONS):
        for engine in options.engines:
            activations = ACTIVATIONS[form]
            seen = {"none": plain[form, engine]}
            seen[activations] = in_own_process(sample, root / form, engine, options, seed, activations)
            for trainer in seen:
                model = held_in(options.model, form)
                use_packed_attention(model)
                if trainer != "none":
                    quantise_activations(model, quantised_weights(model), ROW_FORMATS[trainer])
                for served, (sequences, _) in seen.items():
                    apart = apart_from(sequences, model)
                    say("precision.activations", seed=seed, format=form, served=served, engine=engine, trainer=trainer,
                        matched=served == trainer, **distance(apart), tokens=len(apart))  # fmt: skip
            for served, (sequences, speed) in seen.items():
                learner, groups = learner_on(options, seed, sequences, serving_format=form, serving_activations=served)
                step = cpu_seconds(lambda learner=learner, groups=groups: learner.train(groups, 1, 0, seed=1), 1)
                say("precision.cost", seed=seed, format=form, engine=engine, activations=served,
                    tokens_per_cpu_second=speed, step_cpu_seconds=step)  # fmt: skip


def versions(learner: Any) -> Iterator[tuple[str, str, str, np.ndarray, str]]:
    """Yield for every format and weight: format, weight, type of the patterns, patterns, and `values` or `codes`."""
    import torch

    from tidemill.kernels.quantise import BLOCK_FORMATS, E2M1, dequantise, quantise
    from tidemill.trainer.master import quantised_weights

    chosen = quantised_weights(learner.model)
    for key, master in learner.masters.state().items():
        kind, name = key.split("/", 1)
        if kind != "master":
            continue
        plain = master.bfloat16().view(torch.uint16).numpy()
        yield "bf16", name, "bfloat16", plain.copy(), "values"
        for form in BLOCK_FORMATS.values():
            if name not in chosen:
                yield form.name, name, "bfloat16", plain.copy(), "values"
                yield form.name, name, "bfloat16", plain.copy(), "codes"
                continue
            held = quantise(master, form)
            yield form.name, name, "bfloat16", dequantise(held).bfloat16().view(torch.uint16).numpy(), "values"
            codes = held.codes.flatten()
            if form.codes is E2M1:
                yield form.name, name, "int4", (codes[::2] | codes[1::2] << 4).numpy(), "codes"
            else:
                yield form.name, name, "float8_e4m3fn", codes.numpy(), "codes"
            yield form.name, f"{name}_scale", "uint8", held.scales.flatten().numpy(), "codes"
            if held.outer is not None:
                yield form.name, f"{name}_outer", "float32", held.outer.flatten().view(torch.uint32).numpy(), "codes"


def learner_on(options: argparse.Namespace, seed: int, sequences: list[Any], **changes: Any) -> tuple[Any, list[Any]]:
    """Return a learner, and groups of the sequences with random rewards."""
    from tests.trainer.conftest import make_trainable
    from tests.trainer.families import segment_of
    from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
    from tidemill.trainer.model import load_model
    from tidemill.trainer.step import Learner

    settings = TrainerSettings(
        kl=KlSettings(coefficient=0.0), optimizer=OptimizerSettings(learning_rate=options.rate), **changes
    )
    random = np.random.default_rng(seed)
    groups = []
    for prompt in range(PROMPTS):
        own = sequences[prompt::PROMPTS]
        made = make_trainable(f"g{prompt}", (1.0, *random.integers(0, 2, len(own) - 2).astype(float), 0.0))
        pairs = zip(made.rollouts, own, strict=True)
        groups.append(replace(made, rollouts=tuple(replace(r, segments=[segment_of(*one)]) for r, one in pairs)))
    return Learner(load_model(str(options.model)), settings, None), groups


def version_bytes(options: argparse.Namespace, seed: int, sequences: list[Any]) -> None:
    """Measure the deltas of several steps in every format."""
    from tidemill.kernels.comparison import compare
    from tidemill.kernels.elements import TensorChange

    learner, groups = learner_on(options, seed, sequences)
    before: dict[tuple[str, str, str], tuple[str, np.ndarray]] = {}
    for step in range(1, options.steps + 2):
        learner.train(groups, step, step - 1, seed=step)
        changes: dict[tuple[str, str], list[TensorChange]] = {}
        for form, name, dtype, bits, what in versions(learner):
            old = before.get((form, name, what))
            if old is not None:
                changes.setdefault((form, what), []).append(TensorChange(name, dtype, old[1], bits))
            before[form, name, what] = dtype, bits
        if step == 1:
            continue
        for form in FORMATS:
            values = compare(changes[form, "values"]).total
            line = {"changed": values.changed / values.elements, "bytes": values.wire_bytes,
                    "bound": values.exponent_class_bound_bytes,
                    "bytes_per_changed": values.wire_bytes / max(values.changed, 1)}  # fmt: skip
            if (form, "codes") in changes:
                codes = compare(changes[form, "codes"]).total
                line |= {"code_bytes": codes.wire_bytes, "code_bound": codes.exponent_class_bound_bytes}
            say("precision.bytes", seed=seed, step=step, rate=options.rate, format=form,
                parameters=values.elements, **line)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="checkpoint directory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the questions")
    parser.add_argument("--engines", nargs="+", default=["bfloat16"], help="types that engines compute in")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="of the weights")
    parser.add_argument("--sequences", type=int, default=16, help="answers sampled from each engine")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=3, help="versions whose bytes are counted; 0: none")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate of the steps")
    options = parser.parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as root:
            found = mismatch(options, seed, Path(root))
            rounded_activations(options, seed, Path(root), found)
        if options.steps:
            version_bytes(options, seed, found[options.formats[0], options.engines[0]][0])


if __name__ == "__main__":
    main()
