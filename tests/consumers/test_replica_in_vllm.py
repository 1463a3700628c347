"""The replica's code around vLLM's, without an engine: arguments, the chat route, salts and refused writes."""

import asyncio
import gc
import json
import logging
from contextlib import suppress
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tidemill.compose.config import load_settings
from tidemill.consumers.replica.config import REFUSED, KvPolicy, ReplicaSettings, flags, refusal
from tidemill.consumers.replica.ledger import WriteRefusedError
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import ChatSettings


@pytest.fixture(scope="module")
def imported(vllm):
    """Import vLLM into this process, with garbage collection disabled during the import."""
    level = logging.getLogger().level
    gc.disable()
    import tidemill.consumers.replica.server  # noqa: F401

    gc.enable()
    # One of vLLM's libraries may set the root logger to errors only.
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint that has only a tokenizer, without a chat template."""
    directory = tmp_path_factory.mktemp("no-template")
    model = {"type": "WordLevel", "vocab": {"t5": 0, "<|end|>": 1}, "unk_token": "t5"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return str(directory)


@pytest.fixture
def parsed(imported, checkpoint):
    """Parse arguments with vLLM's parser."""
    from tidemill.consumers.replica.server import server_arguments

    return lambda given: server_arguments(checkpoint, ReplicaSettings(vllm_args=given))


def test_arguments_reach_vllms_parser(parsed):
    found = parsed({
        "gpu-memory-utilization": 0.5, "enable_chunked_prefill": False, "seed": 7, "middleware": ["a.b", "c.d"],
        "allowed-media-domains": ["x", "y"], "allowed-origins": ["*"], "max-num-scheduled-tokens": 64,
        "structured-outputs-config": {"backend": "xgrammar"},
    })  # fmt: skip
    assert (found.gpu_memory_utilization, found.enable_chunked_prefill, found.seed) == (0.5, False, 7)
    assert (found.middleware, found.allowed_media_domains) == (["a.b", "c.d"], ["x", "y"])
    assert (found.allowed_origins, found.max_num_scheduled_tokens) == (["*"], 64)
    assert found.structured_outputs_config.backend == "xgrammar"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"no-such-thing": 1}, "unrecognized arguments: --no-such-thing=1"),
        # An abbreviation would get past the names that are refused.
        ({"gpu-memory": 0.5}, "unrecognized arguments: --gpu-memory=0.5"),
        ({"seed": "many"}, "--seed.*many"),
        ({"seed": True}, "--seed"),
        ({"structured-outputs-config": 3}, "--structured-outputs-config"),
    ],
)
def test_arguments_that_vllm_rejects_are_refused_with_its_message(parsed, given, said):
    with pytest.raises(ValueError, match=rf"(?s)replica\.vllm_args: .*{said}"):
        parsed(given)


def test_every_pattern_of_a_refusal_matches_an_argument_of_vllm(imported):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = [option.removeprefix("--") for option in make_arg_parser(FlexibleArgumentParser())._option_string_actions]
    for patterns in REFUSED.values():
        for pattern in patterns.split():
            assert pattern == "model-tag" or any(fnmatchcase(name, pattern) for name in options), pattern


@pytest.mark.parametrize(
    "name",
    ["quantization", "worker-extension-cls", "worker_extension_cls", "--model", "tokenizer", "dtype", "port", "host",
     "no-enforce-eager", "no-enable-prefix-caching", "data-parallel-size", "tensor_parallel_size", "generation-config",
     "override-generation-config.temperature", "logprobs-mode", "chat-template", "tool-call-parser", "config", "help",
     "ssl-keyfile", "api-key", "hf-overrides", "enable-lora", "max-lora-rank", "max-model-len",
     "pipeline-parallel-size", "enable-expert-parallel", "speculative-config", "quantization=fp8", "--dtype=bfloat16"],
)  # fmt: skip
def test_arguments_that_tidemill_sets_or_that_proofs_depend_on_are_refused_by_name(name):
    with pytest.raises(ValidationError, match=f"{name} cannot be set here: {refusal(name)[:20]}"):
        ReplicaSettings(vllm_args={name: True})


def test_flags():
    lists = {"d": [1, "x"], "e": [1, "x"], "f": [1]}
    arguments = {"a_b": True, "c": False, **lists, "g": {"h": None}, "i": "-1", "j.k": 2.5}
    made = flags(arguments, repeats=lambda option: option == "--d", takes_many=lambda option: option == "--e")
    assert made == [
        "--a-b", "--no-c", "--d=1", "--d=x", "--e", "1", "x", "--f=[1]", '--g={"h": null}', "--i=-1", "--j.k=2.5",
    ]  # fmt: skip


def test_arguments_are_a_table_of_the_configuration(tmp_path):
    file = tmp_path / "tidemill.toml"
    file.write_text('[replica.vllm_args]\nseed = 5\n[replica.vllm_args.structured-outputs-config]\nbackend = "x"\n')
    assert load_settings(file).replica.vllm_args == {"seed": 5, "structured-outputs-config": {"backend": "x"}}
    file.write_text('[replica.vllm_args]\nquantization = "fp8"\n')
    with pytest.raises(ValueError, match=r"replica\.vllm_args: .*quantization cannot be set here"):
        load_settings(file)


def test_a_model_without_a_chat_template_is_a_clear_error(imported, checkpoint):
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    from tidemill.consumers.replica.completions import ChatCompletion, chat_route

    app = FastAPI()
    chat = ChatServer.load(checkpoint, ChatSettings(), 9, 99)
    app.include_router(chat_route(chat, ChatCompletion.__new__(ChatCompletion)))
    answer = TestClient(app).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "t5"}]})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "it is a base model" in message and "/" not in message


@pytest.fixture
def engine(imported, monkeypatch):
    """An engine that returns the salt of a request. Of its two engine cores, the second refuses each write."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from tidemill.consumers.replica.engine import ReplicaEngine

    class Half(ReplicaEngine):
        engine_core = SimpleNamespace(core_engines=[0, 1])
        model_config = SimpleNamespace(is_moe=False)
        kv_policy = KvPolicy.STALE
        version = 3
        __init__ = __del__ = lambda self: None

        async def _cores(self, method, *arguments):
            return [{"refused": ""}, {"refused": "rank 0: damaged" if method == "tidemill_commit" else ""}]

    monkeypatch.setattr(AsyncLLM, "generate", lambda self, prompt, *rest, **options: prompt["cache_salt"])
    return Half()


def salt(engine, **own):
    from vllm.sampling_params import SamplingParams

    return engine.generate({"prompt_token_ids": [5], **own}, SamplingParams())


def test_requests_share_prefixes_only_with_requests_of_the_same_salt(engine):
    assert salt(engine, cache_salt="mine") == salt(engine, cache_salt="mine") != salt(engine)


def test_a_prefix_computed_by_a_write_that_was_undone_is_not_reused(engine):
    """One engine core served the new version until it was undone, because another one refused it."""
    before = salt(engine)
    with pytest.raises(WriteRefusedError):
        asyncio.run(engine.apply([], 4))
    assert salt(engine) != before


def test_a_model_that_a_rank_cannot_map_is_refused_with_its_reason(engine, monkeypatch):
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    async def refuse(method, *_arguments):
        raise Exception(f"Call to {method} method failed: rank 0: no place for head.bias")  # as vLLM does

    monkeypatch.setattr(engine, "_cores", refuse)
    with pytest.raises(UnsupportedModelError, match="this replica cannot serve the model: rank 0: no place for head"):
        asyncio.run(engine.map([]))


def test_cores_resume_when_the_task_is_cancelled_while_they_pause(imported):
    from tidemill.consumers.replica.engine import ReplicaEngine

    asked = []

    class Cores:
        _together = True

        async def _cores(self, method, *arguments):
            asked.append(method)
            if method == "pause_scheduler":
                await asyncio.Event().wait()

    async def write():
        async with ReplicaEngine._paused(Cores()):
            pass

    async def cancel():
        task = asyncio.create_task(write())
        while not asked:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert asked == ["pause_scheduler", "resume_scheduler"]


def test_a_refused_staging_does_not_undo_an_earlier_update(imported):
    from tidemill.consumers.replica import plugin

    class Core:
        """An engine core with one rank that stores its calls."""

        def __init__(self):
            self.tidemill_updates, self.version, self.fault, self.asked = plugin.CoreUpdates(False), "4", "", []
            self.scheduler = SimpleNamespace(get_request_counts=lambda: (0, 0))

        def collective_rpc(self, method, args):
            self.asked.append(method)
            return [{"fault": self.fault if method == "tidemill_answer" else "", "stage_ms": 0.0, "apply_ms": 0.0}]

        def get_weight_version(self):
            return self.version

        def set_weight_version(self, version):
            self.version = version

    core = Core()
    plugin._begin(core, "stage", [])
    assert plugin._commit(core, 5, False)["refused"] == ""
    core.fault = "the changes are damaged"
    plugin._begin(core, "stage", [])
    assert plugin._commit(core, 6, False)["refused"] == "rank 0: the changes are damaged"
    assert plugin._undo(core)["refused"] == "there is no update to undo"
    assert (core.version, "tidemill_undo" in core.asked) == ("5", False)
