"""Triton's kernels are correct in the interpreter and compile for a GPU; each check runs in its own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
SECONDS = 900


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.timeout(SECONDS + 20)
def test_kernels_equal_their_twins_in_the_interpreter():
    pytest.importorskip("triton", reason="PyTorch came without Triton")
    options = ("-q", "-p", "no:cacheprovider", "--noconftest", "--import-mode=importlib", "--durations=5")
    cases = (str(FOLDER / name) for name in ("triton_cases.py", "triton_quantise_cases.py"))
    done = run("-m", "pytest", *options, *cases, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 95
    assert "skipped" not in done.stdout


@pytest.mark.timeout(SECONDS + 20)
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter accepts programs that the compiler refuses; the compiler needs no GPU."""
    pytest.importorskip("triton", reason="PyTorch came without Triton")
    done = run(str(FOLDER / "compile_for_gpu.py"), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    compiled = set(done.stdout.split())
    assert {
        "mark_changes",
        "write_indices",
        "sum_range",
        "sum_chosen",
        "gather_patterns",
        "scatter_patterns",
    } <= compiled
    assert {"quantise_tile", "dequantise_tile"} <= compiled
    assert {"count_rows", "rank_changed", "count_changed", "place_changed", "write_gaps", "count_patterns"} <= compiled
