"""transformers and vLLM look for a package `kernels`; see also `tests/trainer/test_families.py`."""

from pathlib import Path


def test_no_init_file():
    assert not (Path(__file__).resolve().parents[2] / "kernels" / "__init__.py").exists()
