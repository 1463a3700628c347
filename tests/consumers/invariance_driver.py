"""One prompt together with different other requests, with and without `batch_invariant`: its answers and their speed.
`drivers.py` runs it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tests.consumers import engine_driver as engines

RUNS = 40
"""Number of answers to the one prompt."""
AT_ONCE, OTHERS = (1, 3, 5, 11), (0, 1, 2, 16, 7, 30, 3)
"""How many of them are requested at once, in turn, and with how many other requests."""
WAYS = {"without": False, "with": True}
Answer = tuple[tuple[int, float], ...]
"""Tokens and their logprobs."""


def switch(on: bool) -> None:
    """Make the engines that are started later batch-invariant, or not."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from tidemill.consumers.replica.environment import INVARIANT_VARIABLE
    from tidemill.consumers.replica.plugin import register

    os.environ[INVARIANT_VARIABLE] = str(int(on))
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    register()


def waves(words: int, length: int, runs: int, tokens: int) -> Iterator[dict[str, tuple[list[int], int, str]]]:
    """Yield requests that are sent at once: by name, a prompt, the length of its answer and a salt.

    Some have the one prompt, named with the number of their run. The others differ in number, length and position.
    In the second half, a run has the salt of an earlier run, so that a part of the prompt is found in the cache.
    """
    random = np.random.default_rng(1)
    prompt = random.integers(2, words, length).tolist()
    first = 0
    for wave in count():
        if first == runs:
            return
        last = min(first + AT_ONCE[wave % len(AT_ONCE)], runs)
        asked = {f"run {n}": (prompt, tokens, f"salt {n % (runs // 2)}") for n in range(first, last)}
        first = last
        for place in range(OTHERS[wave % len(OTHERS)]):
            other = random.integers(2, words, int(random.integers(2, 2 * length))).tolist()
            asked[f"other {place}"] = (other, int(random.integers(1, 2 * tokens)), f"salt {wave}")
        names = random.permutation(list(asked))
        yield {name: asked[name] for name in names}


def answers(engine: Any, wanted: dict[str, tuple[list[int], int, str]]) -> dict[str, Answer]:
    """Return greedy answers to requests that are sent at once."""
    for name, (prompt, tokens, salt) in wanted.items():
        engine.begin(name, prompt, salt, max_tokens=tokens, logprobs=0, ignore_eos=True)
    return {name: tuple(engines.chosen(output)) for name, output in engine.end().items()}


def unfit(engine: Any) -> str:
    """Return the error for an engine whose layers are not batch-invariant; empty if they are."""
    from tidemill.consumers.replica.cpu_layers import require_tokenwise
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    try:
        require_tokenwise(engine.model)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def compare(
    directory: Path, dtype: str, *, words: int, length: int, tokens: int, runs: int = RUNS, **options: Any
) -> dict[str, dict[str, Any]]:
    """Compare `runs` answers to the one prompt, by way, and measure tokens sampled per second of processor time.

    The engines answer in turn, so that other load on the machine affects both: `speed` is the median over waves.
    """
    made = {}
    for way, on in WAYS.items():
        switch(on)
        # Prompts are computed in pieces whose borders depend on the other requests.
        made[way] = engines.InProcess(
            directory, dtype, max_model_len=4 * length, max_num_batched_tokens=4 * length, max_num_seqs=48,
            enable_chunked_prefill=True, **options,
        )  # fmt: skip
        answers(made[way], next(waves(words, length, 2, tokens)))
        made[way].engine.reset_prefix_cache()
    seen: dict[str, list[Answer]] = {way: [] for way in WAYS}
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    total = 0
    for wanted in waves(words, length, runs, tokens):
        for way, engine in made.items():
            begun = time.process_time()
            done = answers(engine, wanted)
            spent[way].append(time.process_time() - begun)
            seen[way] += [answer for name, answer in done.items() if name.startswith("run")]
        total += sum(map(len, done.values()))
    assert [len(found) for found in seen.values()] == [runs] * len(WAYS)
    return {
        way: {
            "runs": runs,
            "distinct": len(set(found)),
            "distinct_tokens": len({tuple(token for token, _ in one) for one in found}),
            "max": max(abs(a[1] - b[1]) for one in found for a, b in zip(one, found[0], strict=True)),
            "tokens_per_cpu_second": total / sum(spent[way]),
            "unfit": unfit(made[way]),
            "speed": float(np.median(np.array(spent["without"]) / np.array(spent[way]))),
        }
        for way, found in seen.items()
    }


async def refusal(directory: Path, on: bool) -> str:
    """Return the error of a replica's invariance check at its start, with the setting on or off; empty if it passes."""
    from tidemill.consumers.replica.config import KvPolicy, ReplicaSettings
    from tidemill.consumers.replica.engine import ReplicaEngine
    from tidemill.consumers.replica.server import server_arguments
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    switch(on)
    settings = ReplicaSettings(max_model_len=128, kv_cache_mb=16)
    specs = engines.specs_of(engines.map_checkpoint(directory))
    engine = await ReplicaEngine.start(server_arguments(str(directory), settings), specs, 0, KvPolicy.STALE)
    try:
        await engine.require_invariance()
    except UnsupportedModelError as error:
        return str(error)
    finally:
        engine.shutdown()
    return ""


def drive(root: Path) -> dict[str, Any]:
    """Return the comparison of each model, and the refusal."""
    found: dict[str, Any] = {}
    # The one with experts is first, as in `engine_driver.KINDS`.
    kinds = {"experts": engines.Kind("float32", intermediate=64), "dense": engines.Kind("float32", tied=True)}
    made = {name: engines.make_model(kind, root / name) for name, kind in kinds.items()}
    # This is first: a server forks its engine, which is only possible before this process has computed anything.
    found["refusal"] = {way: asyncio.run(refusal(made["dense"], on)) for way, on in WAYS.items()}
    for name, runs in {"experts": RUNS // 2, "dense": RUNS}.items():
        found[name] = compare(made[name], "float32", words=190, length=40, tokens=8, runs=runs)
    return found
