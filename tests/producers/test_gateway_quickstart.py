"""The gateway's printed commands, run as they are printed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess

import tidemill.producers.gateway as module
from tests.producers.feedback_support import PRODUCT, token, topics_of, written
from tidemill.compose.config import TidemillSettings
from tidemill.producers.gateway.config import GatewaySettings
from tidemill.producers.gateway.server import GatewayServer


def blocks() -> list[str]:
    """The indented pieces of the module's docstring."""
    found: list[list[str]] = [[]]
    for line in (module.__doc__ or "").splitlines():
        if line.startswith("    "):
            found[-1].append(line[4:])
        elif found[-1]:
            found.append([])
    return ["\n".join(block) for block in found if block]


def bash(script: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-ec", script], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_printed_keys_are_usable(monkeypatch):
    start, _ = blocks()
    *exports, command = start.splitlines()
    assert command.startswith("tidemill gateway --bootstrap kafka:9092")
    printed = bash("\n".join([*exports, "env -0"]))
    made = dict(line.split("=", 1) for line in printed.split("\0") if line.startswith(("TIDEMILL_", "KEY=")))
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    settings = TidemillSettings()
    settings.product.require_keys()
    assert settings.gateway.api_keys == {"shop": hashlib.sha256(made["KEY"].encode()).hexdigest()}


def test_the_printed_request_is_taken(kafka, topic_prefix):
    _, request = blocks()
    settings = topics_of(kafka.bootstrap, topic_prefix)
    key = "k" * 64
    hashed = hashlib.sha256(key.encode()).hexdigest()
    gateway = GatewaySettings(port=0, api_keys={"shop": hashed}, acknowledge_timeout_s=60)
    with GatewayServer(settings, PRODUCT, gateway) as server:
        assert "http://127.0.0.1:8090/" in request
        script = request.replace("http://127.0.0.1:8090", server.url)
        said = bash(script, KEY=key, TOKEN=token(user="ann@example.com"))
    assert json.loads(said) == {"event_id": "click-1"}
    assert [f.record.event_id for f in written(settings)] == ["click-1"]
