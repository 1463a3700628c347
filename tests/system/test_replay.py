"""A demonstration that has ended, replayed from its log: the same groups, the same weights; other rules are found."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from demonstration import STEPS, TIMEOUT_S, Finished
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def common(finished: Finished) -> Iterator[list[str]]:
    """The options by which the log of the demonstration is found, its Kafka started again over its data."""
    stack = LocalStack(StackSettings(data_dir=finished.directory / "kafka", heap_mb=320))
    try:
        address = stack.up().bootstrap
        yield ["--json", "--bootstrap", address, "--config", str(finished.directory / "settings.toml")]
    finally:
        stack.down()


def ask(common: list[str], *arguments: str) -> dict:
    # In this process: a new one would take longer to import the trainer than to answer.
    done = CliRunner().invoke(app, ["replay", *arguments, *common])
    assert done.exit_code in (0, 1) and done.stdout, done.output
    return json.loads(done.stdout)


def test_a_whole_demonstration_replayed_twice_gives_the_same_groups(common: list[str]):
    for prefix in ("once.", "twice."):
        found = ask(common, "stage", "assembly", "--into", prefix)
        assert found["identical"] == found["total"] == found["there"] > 0, found["first"]
    between = ask(common, "diff", "once.", "twice.")
    assert (between["identical"], between["out_of_order"]) == (between["total"], None)


def test_the_recorded_steps_give_the_recorded_weights(common: list[str]):
    found = ask(common, "steps", f"1..{STEPS}")
    assert (found["identical"], found["total"]) == (STEPS, STEPS)
    assert all(step["replayed"] == step["recorded"] for step in found["steps"])


def test_with_another_rule_the_first_group_that_changed_is_named(common: list[str]):
    found = ask(common, "stage", "assembly", "--reward", "answer=2", "--reward", "tool_use=0.5")
    assert found["changed"] and found["first"]["kind"] == "changed"
    assert any(field["path"].endswith(".reward") for field in found["first"]["fields"])
