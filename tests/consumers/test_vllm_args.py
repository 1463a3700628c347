"""vLLM's own arguments in the replica's settings: names that are refused, and the values that reach vLLM."""

import json
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from pydantic import ValidationError

from tidemill.compose.config import ConfigError, load_settings
from tidemill.consumers.replica.config import REFUSED, ReplicaSettings, flags, refusal

PROBE = """
import gc, json, sys
gc.disable()
from tidemill.consumers.replica.environment import prepare_environment
prepare_environment(1)
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from tidemill.consumers.replica.completions import ChatCompletion
from vllm.utils.argparse_utils import FlexibleArgumentParser
from tidemill.consumers.replica.completions import chat_route
from tidemill.compose.config import ConfigError, load_settings
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.server import server_arguments
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import ChatSettings

def parsed(given):
    try:
        arguments = vars(server_arguments(sys.argv[1], ReplicaSettings(vllm_args=given)))
    except ValueError as error:
        return str(error)
    return {name.replace("-", "_"): arguments.get(name.partition(".")[0].replace("-", "_")) for name in given}

app = FastAPI()
refused = ChatServer.load(sys.argv[1], ChatSettings(), 9, 99)
app.include_router(chat_route(refused, ChatCompletion.__new__(ChatCompletion)))
answer = TestClient(app).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "t5"}]})
options = make_arg_parser(FlexibleArgumentParser())._option_string_actions
print(json.dumps({
    "options": [option[2:] for option in options if option.startswith("--")],
    "parsed": [parsed(given) for given in json.loads(sys.argv[2])],
    "chat": [answer.status_code, answer.json()],
}, default=str))
"""
TAKEN = [
    {"gpu-memory-utilization": 0.5, "enable_chunked_prefill": False, "seed": 7},
    {"middleware": ["a.b", "c.d"], "allowed-media-domains": ["x", "y"], "allowed-origins": ["*"]},
    {"structured-outputs-config": {"backend": "xgrammar"}, "max-num-scheduled-tokens": 64},
]
WRONG = [{"no-such-thing": 1}, {"gpu-memory": 0.5}, {"seed": "many"}, {"seed": True}, {"structured-outputs-config": 3}]


@pytest.fixture(scope="module")
def probe(tmp_path_factory, vllm):
    """Output of vLLM's parser and the chat route, from a separate process: vLLM reads its environment at import."""
    checkpoint = tmp_path_factory.mktemp("no-template")
    vocabulary = {"t5": 0, "<|end|>": 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t5"}
    (checkpoint / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, str(checkpoint), json.dumps(TAKEN + WRONG)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_arguments_reach_vllms_parser(probe):
    first, second, third = probe["parsed"][: len(TAKEN)]
    assert first == {"gpu_memory_utilization": 0.5, "enable_chunked_prefill": False, "seed": 7}
    assert second == {"middleware": ["a.b", "c.d"], "allowed_media_domains": ["x", "y"], "allowed_origins": ["*"]}
    assert "backend='xgrammar'" in third["structured_outputs_config"] and third["max_num_scheduled_tokens"] == 64


def test_arguments_that_vllm_rejects_are_refused_with_its_message(probe):
    unknown, short, number, switch, table = probe["parsed"][len(TAKEN) :]
    assert unknown == "replica.vllm_args: unrecognized arguments: --no-such-thing=1"
    assert "unrecognized arguments: --gpu-memory=0.5" in short, (
        "an abbreviation would get past the names that are refused"
    )
    assert "--seed" in number and "many" in number and "--seed" in switch
    assert "--structured-outputs-config" in table


def test_every_pattern_of_a_refusal_matches_an_argument_of_vllm(probe):
    for patterns in REFUSED.values():
        for pattern in patterns.split():
            assert pattern == "model-tag" or any(fnmatchcase(name, pattern) for name in probe["options"]), pattern


@pytest.mark.parametrize(
    "name",
    ["quantization", "worker-extension-cls", "worker_extension_cls", "--model", "tokenizer", "dtype", "port", "host",
     "no-enforce-eager", "no-enable-prefix-caching", "data-parallel-size", "tensor_parallel_size", "generation-config",
     "override-generation-config.temperature", "logprobs-mode", "chat-template", "tool-call-parser", "config", "help",
     "ssl-keyfile", "api-key", "hf-overrides", "enable-lora", "max-lora-rank", "max-model-len",
     "pipeline-parallel-size", "enable-expert-parallel", "speculative-config"],
)  # fmt: skip
def test_arguments_that_tidemill_sets_or_that_proofs_depend_on_are_refused_by_name(name):
    with pytest.raises(ValidationError, match=f"{name} cannot be set here: {refusal(name)[:20]}"):
        ReplicaSettings(vllm_args={name: True})


def test_flags():
    arguments = {
        "a_b": True,
        "c": False,
        "d": [1, "x"],
        "e": [1, "x"],
        "f": [1],
        "g": {"h": None},
        "i": "-1",
        "j.k": 2.5,
    }
    made = flags(arguments, repeats=lambda option: option == "--d", takes_many=lambda option: option == "--e")
    assert made == [
        "--a-b",
        "--no-c",
        "--d=1",
        "--d=x",
        "--e",
        "1",
        "x",
        "--f=[1]",
        '--g={"h": null}',
        "--i=-1",
        "--j.k=2.5",
    ]


def test_a_model_without_a_chat_template_is_a_clear_error(probe):
    status, answer = probe["chat"]
    assert (
        status == 400 and "it is a base model" in answer["error"]["message"] and "/" not in answer["error"]["message"]
    )


def test_they_are_a_table_of_the_configuration(tmp_path):
    file = tmp_path / "tidemill.toml"
    file.write_text('[replica.vllm_args]\nseed = 5\n[replica.vllm_args.structured-outputs-config]\nbackend = "x"\n')
    assert load_settings(file).replica.vllm_args == {"seed": 5, "structured-outputs-config": {"backend": "x"}}
    file.write_text('[replica.vllm_args]\nquantization = "fp8"\n')
    with pytest.raises(ConfigError, match=r"replica\.vllm_args: .*quantization cannot be set here"):
        load_settings(file)
