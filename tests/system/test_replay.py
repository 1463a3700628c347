"""A finished demonstration, replayed from its log: the groups and weights are the same; a changed rule is detected.

The versions of its trainer and its vLLM replica have NVFP4 values: weights of few bits in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from demonstration import STEPS, TIMEOUT_S, Finished
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.kernels.weights.anchor import anchor_weights

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def common(finished: Finished) -> Iterator[list[str]]:
    """The options that select the log of the demonstration; its Kafka is started again on its data."""
    with finished.open_log() as address:
        yield ["--json", "--bootstrap", address, "--config", str(finished.directory / "settings.toml")]


def ask(common: list[str], *arguments: str) -> dict:
    # In this process: a new one would take longer to import the trainer than to answer.
    done = CliRunner().invoke(app, [*arguments, *common])
    assert done.exit_code in (0, 1) and done.stdout, done.output
    return json.loads(done.stdout)


def test_a_whole_demonstration_replayed_twice_gives_the_same_groups(common: list[str]):
    for prefix in ("once.", "twice."):
        found = ask(common, "replay", "stage", "assembly", "--into", prefix)
        assert found["identical"] == found["total"] == found["there"] > 0, found["first"]
    between = ask(common, "replay", "diff", "once.", "twice.")
    assert (between["identical"], between["out_of_order"]) == (between["total"], None)


def test_the_recorded_steps_give_the_recorded_weights(common: list[str]):
    found = ask(common, "replay", "steps", f"1..{STEPS}")
    assert (found["identical"], found["total"]) == (STEPS, STEPS)
    assert all(step["replayed"] == step["recorded"] for step in found["steps"])


def test_with_another_rule_the_first_group_that_changed_is_named(common: list[str]):
    found = ask(common, "replay", "stage", "assembly", "--reward", "answer=2", "--reward", "tool_use=0.5")
    assert found["changed"] and found["first"]["kind"] == "changed"
    assert any(field["path"].endswith(".reward") for field in found["first"]["fields"])


def magnitudes(finished: Finished, name: str) -> int:
    """Return the greatest number of distinct magnitudes in 16 neighbouring values of a weight in the newest anchor."""
    bits = dict(anchor_weights(str(finished.newest_anchor())))[name].bits
    return max(len(np.unique(block)) for block in (bits & 0x7FFF).reshape(-1, 16))


def test_every_version_is_proved_and_its_weights_have_few_values(finished: Finished):
    proofs = finished.rows("SELECT version, status, fingerprint = expected_fingerprint AS same FROM weights_acks")
    served = {row["version"] for row in proofs}
    assert all(row["same"] for row in proofs), proofs
    # A replica that was killed resumes with the newest version.
    assert {0, STEPS} <= served <= set(range(STEPS + 1))
    assert finished.summary["fingerprints_equal"] and finished.summary["audit_sound"]
    assert not finished.summary["refusals"]
    (log,) = finished.directory.rglob("logs/replica-0.log")
    assert "serving version 0 (values of nvfp4, dequantised)" in log.read_text()
    # E2M1 has eight magnitudes; the embeddings are not rounded to it.
    assert magnitudes(finished, "model.layers.0.self_attn.q_proj.weight") <= 8
    assert magnitudes(finished, "model.embed_tokens.weight") > 8


def test_the_trainer_computes_with_the_values_that_are_served(finished: Finished, common: list[str]):
    """The control is the same step by a trainer that computes with the weights that it would serve in bf16."""
    (step,) = finished.rows("SELECT metrics['mismatch/k3'] AS k3 FROM train_steps WHERE step = 1")
    versions = ask(common, "weights", "log")["versions"]
    assert [row["serving_format"] for row in versions] == ["nvfp4"] * (STEPS + 1)
    (made,) = ask(common, "replay", "steps", "1", "--what-if", "trainer.forward=masters")["steps"]
    k3 = made["metrics"]["mismatch/k3"]
    assert k3["recorded"] == step["k3"] < 1e-6
    assert k3["replayed"] > 1e-4
