"""The fast lane, `make test-fast`: tests that start no broker and no vLLM, without the slowest.

    python -m pytest -p tests.fast_lane

Nobody marks a test. One is left out that uses the fixture `broker` or `vllm`, by itself or through the fixtures that it
uses, or that stands in a file of `SLOW`. One that starts either without the fixture fails: in this lane the `java` that
the local stack finds, and the package `vllm` that Python finds, are ones that end with an error. So it is in child
processes, which inherit the environment.
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
    "consumers/test_clickhouse_server.py",
    "consumers/view/test_browser.py",
    "gpu/test_run.py::test_a_rehearsal_runs_every_check",
    "kernels/test_triton.py",
    "producers/environments/test_process.py",
    "system",
    "test_static.py::test_types_are_checked",
    "trainer/test_interrupted.py",
    "trainer/test_ranks.py",
    "trainer/test_step.py::test_two_processes_get_the_same_weights_bit_for_bit",
)
"""Folders, files and tests below tests/ that keep a processor busy for long: whole demonstrations and trainings, mypy,
Triton's interpreter, every named query on a ClickHouse server (70 s), every view in a browser (22 s), a process for
each bench, and one or more for each hostile environment (some 2 s a test)."""

REFUSAL = "the fast lane starts no {0}: let the test use the fixture `{0}`, by which the lane leaves it out"
JAVA = f"""#!/bin/sh
# Asked for its version it answers: that starts nothing.
if [ "$1" = -version ]; then echo 'openjdk version "21.0.1"' >&2; exit 0; fi
echo '{REFUSAL.format("broker")}' >&2
exit 1
"""
KEY = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Put a `java` and a package `vllm` that refuse before the real ones, here and for child processes."""
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


def is_slow(item: pytest.Item) -> bool:
    """Whether a test stands in what `SLOW` names."""
    name = f"{os.path.relpath(item.path, ROOT)}::{item.name}"
    return any(name == slow or name.startswith((f"{slow}/", f"{slow}::", f"{slow}[")) for slow in SLOW)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a broker, vLLM or much time."""
    left_out = [item for item in items if LEFT_OUT & set(getattr(item, "fixturenames", ())) or is_slow(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
