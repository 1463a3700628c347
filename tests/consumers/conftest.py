"""Fixture of the tests of real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
END_S = 600.0


@pytest.fixture(scope="session")
def driven(tmp_path_factory: pytest.TempPathFactory, vllm: None) -> Iterator[Callable[[str], Any]]:
    """Run a driver of this folder in a process that has imported vLLM, and return its result."""
    log = tmp_path_factory.mktemp("drivers") / "log"
    with log.open("wb") as errors:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.consumers.drivers"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert program.stdin is not None and program.stdout is not None

    def run(module: str) -> Any:
        directory = tmp_path_factory.mktemp(module)
        print(module, directory, file=program.stdin, flush=True)
        assert program.stdout.readline() == "0\n", log.read_text(errors="replace")[-4000:]
        return json.loads((directory / "found.json").read_text())

    yield run
    program.stdin.close()
    program.wait(END_S)
