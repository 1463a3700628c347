"""The statements of docs/limits.md that a test can check."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tidemill.compose.config import TidemillSettings
from tidemill.compose.stack.config import StackSettings
from tidemill.consumers.replica.config import refusal
from tidemill.consumers.sink import http_api as sink_server
from tidemill.producers.edge.completion_request import Refusal, RequestKind, parse
from tidemill.schemas.chat.messages import BadMessage, checked_messages

ROOT = Path(__file__).resolve().parent.parent.parent


def test_midtraining_is_one_process_on_a_cpu():
    for name in ("midtrain.py", "midtrain_config.py", "muon.py"):
        source = (ROOT / "trainer" / name).read_text("utf-8")
        assert not re.search(r"cuda|device|torch\.distributed|[Rr]anks", source), name


def test_ranks_share_no_sequences():
    for path in (ROOT / "trainer").rglob("*.py"):
        assert not re.search(r"context_parallel", path.read_text("utf-8")), path


@pytest.mark.parametrize(
    "name",
    [
        "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "enable-expert-parallel", "enable-lora",
        "quantization", "speculative-config", "api-key", "ssl-keyfile",
    ],
)  # fmt: skip
def test_vllms_arguments_that_would_break_a_proof_are_refused(name: str):
    assert refusal(name)


@pytest.mark.parametrize(
    "field", [{"n": 2}, {"best_of": 2}, {"seed": 1}, {"suffix": "x"}, {"prompt": ["a", "b"]}], ids=str
)
def test_the_router_gives_one_answer_per_request(field: dict):
    with pytest.raises(Refusal) as refused:
        parse(RequestKind.COMPLETION, json.dumps({"prompt": "x", **field}).encode())
    assert refused.value.status == 400


def test_chat_is_text():
    with pytest.raises(BadMessage, match="reads only text"):
        checked_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_defaults_stay_on_this_machine():
    settings = TidemillSettings()
    assert sink_server.LOOPBACK == settings.replica.host == "127.0.0.1"
    assert (StackSettings().brokers, settings.kafka.replication_factor) == (1, 1)
    with pytest.raises(ValueError, match="1 or 3 brokers"):
        StackSettings(brokers=4)
