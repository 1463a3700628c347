"""What the README says can be typed, can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.consumers.query import named_queries

README = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text("utf-8")
QUERIES = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", README.split("## Ask it")[1].split("## ")[0], re.MULTILINE))
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
