"""Fixtures of the system tests; their helpers are modules in the same folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from demonstration import SMALL, STEPS, Finished, run_demonstration


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished demonstration of the simulated loop; each role was killed after a first step.

    The tests with users start from its model. Its versions contain NVFP4 values; the versions of demonstrations that
    start from its model contain any bf16 values.
    """
    settings, directory = [*SMALL, "trainer.serving_format=nvfp4"], tmp_path_factory.mktemp("demo")
    return run_demonstration(directory, settings, "--act", "one", "--steps", str(STEPS), kill_after="s  step [1-3]  ")
