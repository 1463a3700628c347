"""Real engines: a delta written in place is, byte for byte and token for token, a fresh load of the new weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("replica_driver.py")
KINDS = ["tied-float32", "untied-float32", "untied-bfloat16"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What the driver saw of each kind of engine."""
    command = [sys.executable, str(DRIVER), "engines", str(tmp_path_factory.mktemp("engines"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_an_applied_delta_is_a_fresh_load_byte_for_byte(compared, kind):
    seen = compared[kind]
    assert seen["moved"]["total"] == seen["fresh"]["total"] == seen["expected"]
    assert seen["moved"]["tensors"] == seen["fresh"]["tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_applied_delta_computes_what_a_fresh_load_computes(compared, kind):
    seen = compared[kind]
    assert seen["moved_greedy"] == seen["fresh_greedy"]
    assert seen["before"] != seen["moved_greedy"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_can_be_undone_and_a_whole_version_written(compared, kind):
    assert compared[kind]["undone"] == compared[kind]["original"]
    assert compared[kind]["whole"] == compared[kind]["expected"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_in_a_served_tensor_fails_the_proof(compared, kind):
    damaged = compared[kind]["damage"]
    assert damaged["damage"] or damaged["total"] != compared[kind]["expected"]
    assert bool(damaged["damage"]) == kind.endswith("float32")


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_is_packed_away(compared, kind):
    assert min(compared[kind]["sizes"].values()) > 0


def test_a_mixture_of_experts_is_refused_with_the_reason(compared):
    assert "mixture-of-experts" in compared["experts"]
