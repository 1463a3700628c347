"""Engines of two ranks that round activations, and the trainer's logprobs of the tokens that they sample. `drivers.py`
runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from tests.consumers import engine_driver as engines
from tests.consumers.activations_driver import FORM, logprobs
from tests.consumers.drivers import forked

KINDS = {"dense": engines.Kind("float32"), "experts": engines.Kind("float32", intermediate=64)}
"""Each rank has a part of each row that the second product of a layer, or of an expert, gets."""


def write(directory: Path, kind: engines.Kind) -> None:
    """Write a checkpoint whose weights have the format."""
    from tidemill.trainer.choices import ServingFormat
    from tidemill.trainer.config import OptimizerSettings
    from tidemill.trainer.master import MasterWeights
    from tidemill.trainer.model import load_model

    engines.make_model(kind, directory)
    model = load_model(str(directory))
    MasterWeights(model, OptimizerSettings(), ServingFormat(FORM))
    model.bfloat16().save_pretrained(directory)


async def sampled(directory: Path) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Return prompts, each with tokens and logprobs of an answer of an engine of two ranks."""
    from vllm import SamplingParams

    from tidemill.consumers.replica.config import KvPolicy, ReplicaSettings
    from tidemill.consumers.replica.engine import ReplicaEngine
    from tidemill.consumers.replica.server import server_arguments
    from tidemill.kernels.weights.checkpoint import map_checkpoint, specs_of

    settings = ReplicaSettings(tensor_parallel=2, kv_cache_mb=16, max_model_len=128)
    specs = specs_of(map_checkpoint(directory))
    arguments = server_arguments(str(directory), settings)
    engine = await ReplicaEngine.start(arguments, specs, 0, KvPolicy.STALE, activations=FORM)
    asked = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, ignore_eos=True)

    async def answer(number: int, prompt: list[int]) -> Any:
        async for output in engine.generate({"prompt_token_ids": prompt}, asked, str(number)):
            last = output
        return prompt, engines.chosen(last)

    try:
        return await asyncio.gather(*(answer(*one) for one in enumerate(3 * engines.prompts())))
    finally:
        engine.shutdown()


def compare(root: Path) -> dict[str, dict[str, float]]:
    """Compare the engines with trainers that round, and do not round, their activations."""
    answers = {kind: asyncio.run(sampled(root / kind)) for kind in KINDS}
    from tests.trainer.families import OneSegment, segment_of
    from tidemill.trainer.batch import pack

    found: dict[str, dict[str, float]] = {}
    for kind, given in answers.items():
        rollouts = [OneSegment(segment_of(prompt, *map(list, zip(*answer, strict=True)))) for prompt, answer in given]
        (row,) = pack(rollouts, 10_000, 200)
        recorded = row.sampler_logprobs.double().numpy()
        apart = {form: np.abs(logprobs(root / kind, form, row) - recorded) for form in ("", FORM)}
        found[kind] = {form: float(each.mean()) for form, each in apart.items()}
    return found


def drive(root: Path) -> dict[str, dict[str, float]]:
    """Return the mean absolute differences for each kind of model. Forks write the checkpoints: an engine of several
    ranks forks, which is safe only before this process computes."""
    for name, kind in KINDS.items():
        assert forked(write, root / f"{name}.json", root / name, kind) == 0
    return compare(root)
