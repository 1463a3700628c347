"""transformers and vLLM look for a package `kernels`; they must not find `kernels/` of this repository."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import transformers, vllm
from transformers import Qwen3ForCausalLM
from transformers.utils import is_kernels_available
import tidemill.kernels.weights.publish
ours = [name for name in sys.modules if name.startswith("kernels.") and name.split(".")[1] in {modules}]
print("available", is_kernels_available(), "taken", ours)
"""


def test_no_init_file():
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("vllm")
def test_transformers_and_vllm_find_the_installed_package_and_not_this_folder():
    pytest.importorskip("vllm", reason="the replica's extra is not installed")
    modules = sorted({"weights", *(path.stem for path in (ROOT / "kernels").glob("*.py"))})
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(modules=modules)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    installed = any(found.metadata["Name"] == "kernels" for found in distributions())
    assert f"available {installed} taken []" in done.stdout
