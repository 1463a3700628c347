"""What the fast lane leaves out, and that nothing slips in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "def test_plain(): ...\n"
FIXTURES = """
import pytest
from tests.conftest import broker, kafka, vllm

@pytest.fixture
def topics(kafka): ...

@pytest.fixture
def engine(vllm): ...
"""


def play(folder: Path, source: str) -> tuple[int, str]:
    """A file of tests in the fast lane: exit status and report."""
    file = folder / "test_it.py"
    file.write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.fast_lane",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    done = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fixture", ["broker", "kafka", "topics", "vllm", "engine"])
def test_one_that_needs_a_broker_or_vllm_is_left_out(fixture: str, tmp_path: Path):
    status, report = play(tmp_path, f"{FIXTURES}{PLAIN}def test_heavy({fixture}): assert False\n")
    assert status == 0 and "1 passed, 1 deselected" in report, report


STARTS = {
    "from tidemill.compose.stack.config import StackSettings\n"
    "from tidemill.compose.stack.kafka import LocalStack\n"
    "def test_it(tmp_path): LocalStack(StackSettings(data_dir=tmp_path)).up()\n": "broker",
    "def test_it(): import vllm\n": "vllm",
    "import subprocess, sys\n"
    "def test_it(): subprocess.run([sys.executable, '-c', 'import vllm.config'], check=True)\n": "vllm",
}


@pytest.mark.parametrize("source", STARTS, ids=["a broker", "vLLM", "vLLM in a child"])
def test_one_that_starts_what_it_does_not_name_fails(source: str, tmp_path: Path):
    status, report = play(tmp_path, PLAIN + source)
    assert status == 1 and "1 failed, 1 passed" in report, report
    assert f"the fast lane starts no {STARTS[source]}" in report


def test_a_broker_elsewhere_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEMILL_KAFKA__BOOTSTRAP", "kafka:9092")
    source = "import os\ndef test_it(): assert 'TIDEMILL_KAFKA__BOOTSTRAP' not in os.environ\n"
    status, report = play(tmp_path, source)
    assert status == 0, report


def test_slow_tests_exist():
    from tests.fast_lane import SLOW

    for name in SLOW:
        file, *test = name.split("::")
        assert (ROOT / "tests" / file).exists(), name
        assert not test or f"def {test[0]}(" in (ROOT / "tests" / file).read_text("utf-8"), name
