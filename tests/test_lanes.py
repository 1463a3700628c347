"""How the tests are run: the fast lane leaves some out, and workers share the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fast_lane import SLOW
from tests.workers import UNITS, unit_of

ROOT = Path(__file__).resolve().parent.parent
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""Variables of a pytest that has no options of this one and imports no installed plugin, which would take most of its
time."""
TESTS = """
import os, pytest, subprocess, sys
from tests.conftest import broker, brokers, kafka, vllm
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack

@pytest.fixture
def topics(kafka): ...

@pytest.fixture
def engine(vllm): ...

def test_without_an_external_broker(): assert "TIDEMILL_KAFKA__BOOTSTRAP" not in os.environ
def test_broker(tmp_path): LocalStack(StackSettings(data_dir=tmp_path)).up()
def test_vllm(): import vllm
def test_child(): subprocess.run([sys.executable, "-c", "import vllm.config"], check=True)
"""


def test_the_fast_lane_leaves_out_tests_of_a_broker_or_vllm_and_fails_those_that_start_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TIDEMILL_KAFKA__BOOTSTRAP", "kafka:9092")
    left_out = ("broker", "kafka", "topics", "vllm", "engine")
    tests = "".join(f"def test_of_{fixture}({fixture}): assert False\n" for fixture in left_out)
    file = tmp_path / "test_it.py"
    file.write_text(f"{TESTS}{tests}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast_lane", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(file)],
        cwd=ROOT, env={**os.environ, **ALONE}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = done.stdout + done.stderr
    assert done.returncode == 1 and f"3 failed, 1 passed, {len(left_out)} deselected" in report, report
    said = report.partition("FAILURES")[2].partition("short test summary")[0]
    for test, fixture in {"test_broker": "broker", "test_vllm": "vllm", "test_child": "vllm"}.items():
        own = said.partition(f"_ {test} _")[2].partition("_ test_")[0]
        assert f"the fast lane starts no {fixture}" in own, report


def test_slow_tests_exist():
    for name in SLOW:
        file, *test = name.split("::")
        assert (ROOT / "tests" / file).exists(), name
        assert not test or f"def {test[0]}(" in (ROOT / "tests" / file).read_text("utf-8"), name


def test_files_that_share_a_fixture_are_one_unit_and_each_other_file_is_a_unit():
    tests = ROOT / "tests"
    files = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in tests.rglob("test_*.py")}
    del files["tests/test_lanes.py"]
    for fixture in UNITS:
        argument = {"view": "view: View"}.get(fixture, fixture)
        using = {file for file, text in files.items() if re.search(rf"def \w+\((.*\W)?{argument}\b", text)}
        assert using and {unit_of(f"{file}::test_it") for file in using} == {fixture}
    alone = {file for file in files if unit_of(f"{file}::test_it") not in UNITS}
    assert alone and all(unit_of(f"{file}::test_it") == file for file in alone)


def test_one_worker_runs_the_whole_loop_first_and_long_files_run_next(tmp_path: Path):
    """Two workers, and a copy of the folder names with four units: the unit that remains to the end is a short one."""
    test = "import os\ndef test_{0}(request): print(os.environ['PYTEST_XDIST_WORKER'], __file__, " \
        "request.config.workerinput['brokers'], file=open('ran', 'a'))\n"  # fmt: skip
    broker = "import pytest\n@pytest.fixture(autouse=True)\ndef broker(): ...\n"
    whole_loop = UNITS["finished"]
    short, long = ("tests/compose/test_one.py", "tests/compose/test_other.py"), "tests/compose/test_with_a_broker.py"
    for file in (*short, long, *whole_loop):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(broker * (file == long) + "".join(test.format(number) for number in range(3)))
    options = ["-p", "no:cacheprovider", "-p", "xdist.plugin", "--rootdir", str(tmp_path), "--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.workers", "-n", "2", "--no-loadscope-reorder", *options, "tests"],
        cwd=tmp_path, env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    by_worker: dict[str, list[str]] = {}
    brokers = set()
    for line in (tmp_path / "ran").read_text().splitlines():
        worker, file, directory = line.split()
        by_worker.setdefault(worker, []).append(Path(file).relative_to(tmp_path).as_posix())
        brokers.add(directory)
    files, others = sorted(by_worker.values(), key=lambda files: not {*whole_loop} & set(files))
    loop = 3 * len(whole_loop)
    assert set(files[:loop]) == {*whole_loop} and others[0] == long and len(files) + len(others) == loop + 9
    assert len(brokers) == 1 and not Path(*brokers).exists()
