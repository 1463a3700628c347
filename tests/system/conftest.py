"""The helpers of the system tests are modules beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from demonstration import SMALL, STEPS, Finished, run_demonstration


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A demonstration of the simulated loop that has ended, each of whose roles was killed after a first step.

    Its model is where users' tests begin. Its versions hold values of NVFP4; those of the demonstrations that begin
    with its model hold any values of bf16.
    """
    settings, directory = [*SMALL, "trainer.serving_format=nvfp4"], tmp_path_factory.mktemp("demo")
    return run_demonstration(directory, settings, "--act", "one", "--steps", str(STEPS), kill_after="s  step [1-3]  ")
