"""Weights of few bits from one end to the other: a trainer and a vLLM replica whose versions hold values of NVFP4."""

from __future__ import annotations

import json

import numpy as np
import pytest
from demonstration import STEPS, TIMEOUT_S, Finished
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.kernels.weights.anchor import anchor_weights

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def magnitudes(finished: Finished, name: str) -> int:
    """The most distinct sizes among 16 values of a row that stand together, of a weight of the newest anchor."""
    bits = dict(anchor_weights(str(finished.newest_anchor())))[name].bits
    return max(len(np.unique(block)) for block in (bits & 0x7FFF).reshape(-1, 16))


def test_every_version_is_proved_and_its_weights_have_few_values(finished: Finished):
    proofs = finished.rows("SELECT version, status, fingerprint = expected_fingerprint AS same FROM weights_acks")
    assert {row["version"] for row in proofs if row["same"]} == set(range(STEPS + 1)), proofs
    assert finished.summary["fingerprints_equal"] and finished.summary["audit_sound"]
    assert not finished.summary["refusals"]
    (log,) = finished.directory.rglob("logs/replica-0.log")
    assert "serving version 0 (values of nvfp4, dequantised)" in log.read_text()
    # E2M1 has eight sizes; the table of the embeddings stays as it was.
    assert magnitudes(finished, "model.layers.0.self_attn.q_proj.weight") <= 8
    assert magnitudes(finished, "model.embed_tokens.weight") > 8


def test_the_trainer_computes_with_the_values_that_are_served(finished: Finished):
    """The control are the same steps by a trainer that computes with what it would serve in bf16."""
    (step,) = finished.rows("SELECT metrics['mismatch/k3'] AS k3 FROM train_steps WHERE step = 1")
    stack = LocalStack(StackSettings(data_dir=finished.directory / "kafka", heap_mb=320))
    try:
        found = ["--json", "--bootstrap", stack.up().bootstrap, "--config", str(finished.directory / "settings.toml")]
        log = CliRunner().invoke(app, ["weights", "log", *found])
        replayed = CliRunner().invoke(app, ["replay", "steps", "1", "--what-if", "trainer.forward=masters", *found])
    finally:
        stack.down()
    assert [row["serving_format"] for row in json.loads(log.stdout)["versions"]] == ["nvfp4"] * (STEPS + 1)
    ((made,),) = [json.loads(replayed.stdout)["steps"]]
    k3 = made["metrics"]["mismatch/k3"]
    assert k3["recorded"] == step["k3"] < 1e-6
    assert k3["replayed"] > 1e-4
