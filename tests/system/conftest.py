"""The helpers of the system tests are modules beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from demonstration import SMALL, STEPS, Finished, run_demonstration


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A demonstration of the simulated loop that has ended; its model is where users' tests begin."""
    data_dir = tmp_path_factory.mktemp("demo")
    return run_demonstration(data_dir, SMALL, "--act", "one", "--steps", str(STEPS))
