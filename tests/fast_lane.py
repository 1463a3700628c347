"""The fast lane, `make test-fast`: tests that start no broker and no vLLM, without the slowest tests.

    python -m pytest -p tests.fast_lane

Tests are not marked. A test is left out if it uses the fixture `broker` or `vllm`, directly or through other fixtures,
or if `SLOW` names it. A test that starts a broker or vLLM without the fixture fails: in this lane, the `java` that the
local stack finds, and the package `vllm` that Python finds, exit with an error. Child processes inherit this through
the environment.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

LEFT_OUT = {"broker", "vllm"}
"""Fixtures of tests/conftest.py."""
ROOT = Path(__file__).resolve().parent
SLOW: tuple[str, ...] = (
    "compose/test_plan.py::test_the_formula_is_within_15_percent_of_a_process_that_took_two_steps",
    "compose/test_readme.py::test_a_script_that_does_not_start_is_seen",
    "compose/test_readme.py::test_every_bench_explains_itself_from_any_directory",
    "compose/test_readme.py::test_the_commands_for_weights_need_no_engine",
    "compose/test_weights.py::test_checkpoints_are_compared_without_a_log",
    "consumers/test_clickhouse_server.py",
    "consumers/test_query.py::test_every_named_query_answers_on_empty_tables",
    "consumers/view/test_browser.py",
    "consumers/view/test_numbers.py",
    "gpu/test_run.py::test_a_rehearsal_runs_every_check",
    "kernels/test_triton.py",
    "kernels/test_vectors.py::test_a_processor_without_vectors_makes_the_same_bytes",
    "producers/environments/test_docs.py",
    "producers/environments/test_process.py",
    "producers/environments/test_reasoning_gym.py",
    "producers/environments/test_textarena.py",
    "producers/environments/test_verifiers.py",
    "schemas/log/test_stall.py::test_a_process_that_was_stopped_and_goes_on_is_not_hung",
    "system",
    "test_lanes.py",
    "test_static.py::test_types_are_checked",
    "trainer/test_interrupted.py",
    "trainer/test_ranks.py",
)
"""Folders, files and tests below tests/ that take long: whole demonstrations and trainings, mypy, Triton's interpreter,
every view in a browser (22 s), every query (70 s on a ClickHouse server), every task of reasoning-gym and every game of
TextArena, kernels compiled again, a process for each bench, a stopped process, pytest in a process of its own, and one
or more processes for each hostile environment and for the servers of verifiers (about 2 s a test)."""

REFUSAL = "the fast lane starts no {0}: let the test use the fixture `{0}`, by which the lane leaves it out"
JAVA = f"""#!/bin/sh
# Asked for its version it answers: that starts nothing.
if [ "$1" = -version ]; then echo 'openjdk version "21.0.1"' >&2; exit 0; fi
echo '{REFUSAL.format("broker")}' >&2
exit 1
"""
KEY = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Put a `java` and a package `vllm` that fail in front of the real ones, also for child processes."""
    folder = tempfile.TemporaryDirectory(prefix="fast-lane-")
    config.stash[KEY] = folder
    package, java = Path(folder.name, "vllm"), Path(folder.name, "bin", "java")
    package.mkdir()
    (package / "__init__.py").write_text(f"raise RuntimeError({REFUSAL.format('vllm')!r})\n")
    java.parent.mkdir()
    java.write_text(JAVA)
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    sys.path.insert(0, folder.name)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder.name, os.environ.get("PYTHONPATH")]))
    os.environ["JAVA_HOME"] = folder.name
    os.environ.pop("TIDEMILL_KAFKA__BOOTSTRAP", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove them."""
    config.stash[KEY].cleanup()


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test needs a broker or vLLM, or is in `SLOW`."""
    name = f"{os.path.relpath(item.path, ROOT)}::{item.name}"
    needs = LEFT_OUT & set(getattr(item, "fixturenames", ()))
    return bool(needs) or any(name == slow or name.startswith((f"{slow}/", f"{slow}::", f"{slow}[")) for slow in SLOW)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a broker, vLLM or much time."""
    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
