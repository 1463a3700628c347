"""The commands in the gateway's docstring and in docs/extend.md run as printed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import tidemill.producers.edge.gateway as module
from tests.producers.feedback_support import PRODUCT, printed_blocks, token, written
from tidemill.compose.config import TidemillSettings
from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge.gateway import gateway_server
from tidemill.schemas.catalogue import Topic

EXTEND = (Path(__file__).resolve().parents[2] / "docs/extend.md").read_text("utf-8")


def bash(script: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-ec", script], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_printed_keys_are_usable(monkeypatch):
    start, _ = printed_blocks(module)
    *exports, command = start.splitlines()
    assert command.startswith("tidemill gateway --bootstrap kafka:9092")
    printed = bash("\n".join([*exports, "env -0"]))
    made = dict(line.split("=", 1) for line in printed.split("\0") if line.startswith(("TIDEMILL_", "KEY=")))
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    settings = TidemillSettings()
    settings.product.require_keys()
    assert settings.gateway.api_keys == {"shop": hashlib.sha256(made["KEY"].encode()).hexdigest()}


def of_the_page(named: str) -> str:
    """Return the page's code block that contains `named`, without its first line, the language."""
    (found,) = (block for block in EXTEND.split("```")[1::2] if named in block)
    return found.partition("\n")[2]


def test_the_printed_requests_are_accepted(kafka):
    settings = kafka.fresh(topics=[Topic.FEEDBACK])
    key, ann = "k" * 64, token(user="ann@example.com")
    hashed = hashlib.sha256(key.encode()).hexdigest()
    gateway = GatewaySettings(port=0, api_keys={"shop": hashed}, acknowledge_timeout_s=60)
    _, request = printed_blocks(module)
    from_page = of_the_page("curl https://GATEWAY/")
    assert "http://127.0.0.1:8090/" in request and "TOKEN" in from_page
    with gateway_server(settings, PRODUCT, gateway) as server:
        said = bash(request.replace("http://127.0.0.1:8090", server.url), KEY=key, TOKEN=ann)
        said_too = bash(from_page.replace("https://GATEWAY", server.url).replace("TOKEN", ann), KEY=key)
    assert (json.loads(said), json.loads(said_too)) == ({"event_id": "click-1"}, {"event_id": "click-4711"})
    assert {f.record.event_id for f in written(settings)} == {"click-1", "click-4711"}


def test_the_events_of_the_printed_program_are_accepted(kafka, monkeypatch, patient):
    settings = kafka.fresh(topics=[Topic.FEEDBACK])
    for name, value in PRODUCT.environment().items():
        monkeypatch.setenv(name, value)
    program = of_the_page("from tidemill.producers import FeedbackProducer")
    assert '"kafka:9092"' in program
    exec(program.replace('"kafka:9092"', "kafka"), {"kafka": settings, "token": token(user="ann@example.com")})
    assert sorted((f.record.kind.value, f.record.value) for f in written(settings) if f.record.corrects is None) == [
        ("edit_kept_soon", 0.8),
        ("thumb", 1.0),
    ]
