"""The environment and the agent of docs/extend.md run unchanged."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.config import load_settings
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import TaskQuery
from tidemill.producers.environments.check import task_of
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerOptions
from tidemill.producers.environments.open import EnvironmentSet
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.player import Player
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import Rollout

EXTEND = (Path(__file__).resolve().parents[3] / "docs" / "extend.md").read_text("utf-8")
LEDGER = LedgerEnvironment(LedgerOptions())
CODE = [code for code in re.findall(r"```python\n(.*?)```", EXTEND, re.DOTALL) if code.startswith('"""')]
TABLES = re.findall(r"```toml\n(.*?)```", EXTEND, re.DOTALL)
COMMANDS = re.findall(r"^tidemill (.*)$", EXTEND, re.MULTILINE)


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_company").mkdir()
    (tmp_path / "my_company" / "env.py").write_text(CODE[0])
    (tmp_path / "agent.py").write_text(CODE[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_examples_have_at_most_the_stated_number_of_lines():
    assert len(CODE) == 2
    assert len([line for line in CODE[0].splitlines() if line.strip()]) <= 60
    assert len([line for line in CODE[1].splitlines() if line.strip()]) <= 30


def test_the_environment_keeps_its_contract(company):
    command = next(command for command in COMMANDS if command.startswith("env check"))
    result = CliRunner().invoke(app, [*command.split(), "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.output)) > 10


def test_a_hostile_turn_that_succeeds_is_named_by_the_check(company):
    code = CODE[0].replace("success=right", "success=True")
    assert code != CODE[0]
    (company / "my_company" / "env.py").write_text(code)
    result = CliRunner().invoke(app, ["env", "check", "my_company.env:Support"])
    assert result.exit_code == 1
    assert "FAIL  special tokens: reward 0 after 1 calls; such a turn must not be a success" in result.output


def test_the_environment_is_shown(company):
    command = next(command for command in COMMANDS if command.startswith("env show"))
    result = CliRunner().invoke(app, [*command.split(), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)
    assert shown["options"] == [
        {"name": "orders", "type": "int", "value": 100, "meaning": "How many orders there are."}
    ]
    assert shown["rewards"] == [{"name": "right", "weight": 1.0}] and "find_order" in shown["prompt"]


def test_a_broken_contract_is_reported(company):
    broken = CODE[0].replace("Random(query.seed)", "Random()")
    (company / "my_company" / "broken.py").write_text(broken)
    result = CliRunner().invoke(app, ["env", "check", "my_company.broken:Support"])
    assert result.exit_code == 1 and "FAIL  tasks are deterministic" in result.output


def test_the_settings_in_the_docs_are_valid(company):
    for number, table in enumerate(TABLES):
        (company / f"{number}.toml").write_text(table)
        load_settings(company / f"{number}.toml")
    assert [entry["name"] for entry in tomllib.loads(TABLES[0])["run"]["environments"]] == [
        "my_company.env:Support", "reasoning_gym:chain_sum"]  # fmt: skip


def test_the_agent_plays_an_episode(company, new_replica, chat):
    replica = new_replica()
    settings = RolloutSettings(replicas=[replica.address], max_context_tokens=20_000, episode_timeout_s=600)
    entry = EnvironmentEntry(name="ledger", agent=[sys.executable, "agent.py"])

    async def main() -> Rollout:
        environments = EnvironmentSet([entry], settings)
        draft = next(LEDGER.tasks(TaskQuery(0)))
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", environments, chat, client, endpoint)
            return await player.play(task_of(LEDGER, "ledger", draft), 0)

    rollout = asyncio.run(main())
    assert rollout.success, rollout.failure
    assert rollout.turns == 5 == len(replica.requests) and len(rollout.segments) == 1
