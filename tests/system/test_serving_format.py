"""Weights of few bits from one end to the other: a trainer and a vLLM replica whose versions hold values of NVFP4."""

from __future__ import annotations

import json

import numpy as np
import pytest
from demonstration import SMALL, Finished, role_logs, run_demonstration
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.kernels.weights.anchor import anchor_weights

STEPS = 2

pytestmark = pytest.mark.timeout(900)  # the first test's time has two demonstrations in it


@pytest.fixture(scope="module")
def few_bits(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A demonstration of the simulated loop, from the model of another one, that has ended."""
    settings = [*SMALL, "trainer.serving_format=nvfp4", f"trainer.publish.anchor_every={STEPS}"]
    arguments = ["--act", "one", "--steps", str(STEPS), "--model", str(finished.newest_anchor())]
    return run_demonstration(tmp_path_factory.mktemp("few-bits"), settings, *arguments)


def magnitudes(finished: Finished, name: str) -> int:
    """The most distinct sizes among 16 values of a row that stand together, of a weight of the newest anchor."""
    bits = dict(anchor_weights(str(finished.newest_anchor())))[name].bits
    return max(len(np.unique(block)) for block in (bits & 0x7FFF).reshape(-1, 16))


def test_every_version_is_proved_and_its_weights_have_few_values(few_bits: Finished):
    proofs = few_bits.rows("SELECT version, status, fingerprint = expected_fingerprint AS same FROM weights_acks")
    assert {row["version"] for row in proofs if row["same"]} == set(range(STEPS + 1)), proofs
    assert few_bits.summary["fingerprints_equal"] and few_bits.summary["audit_sound"]
    assert not few_bits.summary["refusals"]
    assert "serving version 0 (values of nvfp4, dequantised)" in role_logs(few_bits.directory)
    # E2M1 has eight sizes; the table of the embeddings stays as it was.
    assert magnitudes(few_bits, "model.layers.0.self_attn.q_proj.weight") <= 8
    assert magnitudes(few_bits, "model.embed_tokens.weight") > 8


def test_the_trainer_computes_with_the_values_that_are_served(few_bits: Finished):
    """The control are the same steps by a trainer that computes with what it would serve in bf16."""
    (step,) = few_bits.rows("SELECT metrics['mismatch/k3'] AS k3 FROM train_steps WHERE step = 1")
    stack = LocalStack(StackSettings(data_dir=few_bits.directory / "kafka", heap_mb=320))
    try:
        found = ["--json", "--bootstrap", stack.up().bootstrap, "--config", str(few_bits.directory / "settings.toml")]
        log = CliRunner().invoke(app, ["weights", "log", *found])
        replayed = CliRunner().invoke(app, ["replay", "steps", "1", "--what-if", "trainer.forward=masters", *found])
    finally:
        stack.down()
    assert [row["serving_format"] for row in json.loads(log.stdout)["versions"]] == ["nvfp4"] * (STEPS + 1)
    ((made,),) = [json.loads(replayed.stdout)["steps"]]
    k3 = made["metrics"]["mismatch/k3"]
    assert k3["recorded"] == step["k3"] < 1e-6
    assert k3["replayed"] > 1e-4
