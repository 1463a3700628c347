"""The engine's salts of the prefix cache, in a separate process that imports vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import asyncio, json
from contextlib import suppress
from types import SimpleNamespace
from tidemill.consumers.replica.environment import prepare_environment
prepare_environment(1)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from tidemill.consumers.replica.config import KvPolicy
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.ledger import WriteRefusedError

class Half(ReplicaEngine):
    "Two engines, of which the second refuses each write."
    engine_core = SimpleNamespace(core_engines=[0, 1])
    model_config = SimpleNamespace(is_moe=False)
    kv_policy = KvPolicy.STALE
    version = 3
    __init__ = __del__ = lambda self: None

    async def _cores(self, method, *arguments):
        refused = "rank 0: damaged" if method == "tidemill_commit" else ""
        return [{"refused": ""}, {"refused": refused}]

def salt(**own):
    engine.generate({"prompt_token_ids": [5], **own}, SamplingParams())
    return salts[-1]

salts, engine = [], Half()
AsyncLLM.generate = lambda self, prompt, *rest, **options: salts.append(prompt["cache_salt"])
made = {"plain": salt(), "mine": salt(cache_salt="mine"), "again": salt(cache_salt="mine")}
with suppress(WriteRefusedError):
    asyncio.run(engine.apply([], 4))
made["undone"] = salt()

print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def probe(vllm: None) -> Any:
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_requests_share_prefixes_only_with_requests_of_the_same_salt(probe: Any):
    assert probe["mine"] == probe["again"] != probe["plain"]


def test_a_prefix_computed_by_a_write_that_was_undone_is_not_reused(probe: Any):
    """One engine served the new version until it was undone, because another engine refused it."""
    assert probe["undone"] != probe["plain"]
