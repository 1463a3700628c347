"""Triton's kernels compile for a GPU. The rehearsal of `tests/gpu` shows that they are correct in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_for_gpu.py")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter accepts programs that the compiler refuses; the compiler needs no GPU."""
    pytest.importorskip("triton", reason="PyTorch came without Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    compiled = set(done.stdout.split())
    assert {"mark_changes", "write_indices", "sum_range", "sum_chosen", "gather_patterns"} <= compiled
    assert {"quantise_tile", "dequantise_tile"} <= compiled
    assert {"count_rows", "rank_changed", "count_changed", "place_changed", "write_gaps", "count_patterns"} <= compiled
