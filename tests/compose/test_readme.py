"""What the README says can be typed, can be typed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.consumers.sink.query import named_queries

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text("utf-8")
FOLDERS = ("schemas", "kernels", "producers", "streams", "trainer", "consumers", "compose")
QUERIES = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", README.split("## Ask it")[1].split("## ")[0], re.MULTILINE))
BENCHES = sorted(
    path.name for path in (ROOT / "tests/bench").glob("*.py") if "ArgumentParser" in path.read_text("utf-8")
)
LISTENERS = {
    "producers/router/role.py": "router",
    "producers/gateway/server.py": "gateway",
    "producers/rollout/endpoint.py": "a worker's loopback",
    "consumers/sink/server.py": "sink",
    "consumers/replica/role.py": "the replicas' HTTP",
}
COMMANDS = sorted(set(re.findall(r"`?tidemill ([a-z-]+)", README)))


def test_ten_queries_and_more_are_listed_with_the_questions_they_answer():
    assert len(QUERIES) >= 10
    assert {name: named_queries().get(name) for name in QUERIES} == QUERIES


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_help_names_every_role():
    output = CliRunner().invoke(app, ["--help"]).output
    for role in ("stack", "topics", "serve", "rollout", "stream", "train", "sink", "query", "demo", "feed"):
        assert role in output


def test_an_unknown_setting_is_refused_with_its_name():
    result = CliRunner().invoke(app, ["feed", "--set", "feed.unknown=1", "--bootstrap", "127.0.0.1:9"])
    assert result.exit_code != 0
    assert "feed.unknown" in str(result.exception)


def test_the_benches_are_those_that_are_named():
    named = set(re.findall(r"`(?:python tests/bench/)?(\w+\.py)", README))
    assert set(BENCHES) <= named, sorted(set(BENCHES) - named)


@pytest.mark.parametrize("script", BENCHES)
def test_every_bench_explains_itself_from_any_directory(script: str, tmp_path: Path):
    command = [sys.executable, str(ROOT / "tests/bench" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {script}"), done.stderr


def test_those_that_listen_are_those_that_are_named():
    claim = " ".join(README.split("**The log is the truth.**")[1].split("- **")[0].split())
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        names = {
            getattr(node.func, "attr", getattr(node.func, "id", ""))
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
        }
        if names & {"bind", "create_server", "start_server", "start_http_server", "TCPSite", "start_unix_server"}:
            found.add(str(path.relative_to(ROOT)))
    # The one that binds for all of them, and the one that looks for free ports.
    assert found - {"schemas/address.py", "compose/stack/ports.py"} == set(LISTENERS)
    assert all(name in claim for name in LISTENERS.values())
