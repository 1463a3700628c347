"""The checks that need a GPU, in one call: `make test-gpu`, or `python -m tests.gpu.run [--out FILE]`.

It prints one JSON document: the device, and for each check whether it passed, its seconds and its figures. Each check
is a separate process with a time limit; together they stay below ten minutes. The exit status is 1 if a check failed.

Without a GPU nothing is run: the document and a message say so, the status is 0, and nothing counts as passed. With
`--rehearse`, the same checks run on the CPU with small inputs, and Triton's interpreter replaces the GPU. This shows
that the checks run; its figures are not those of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CASES = ("tests/kernels/triton_cases.py", "tests/kernels/triton_quantise_cases.py")
DEVICE = "TIDEMILL_TEST_DEVICE"
"""Environment variable of `triton_cases.py`: the device of its tensors."""
NO_GPU = "no GPU: nothing was run"
REHEARSAL_S = 900.0
"""Time limit of each check in a rehearsal, which may run on a busy machine."""


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One check: a command, and a function that reads its figures."""

    name: str
    command: list[str]
    seconds: float
    """Time limit."""
    environment: Mapping[str, str]
    figures: Callable[[str], Any]
    """Reads the figures from the command's standard output."""


def checks(rehearse: bool) -> list[GpuCheck]:
    """Return every check, in order."""
    where = {DEVICE: "cpu", "TRITON_INTERPRET": "1"} if rehearse else {DEVICE: "cuda", "TRITON_INTERPRET": "0"}
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--import-mode=importlib"]
    small = ["--elements", "4096", "--runs", "1"] if rehearse else ["--runs", "5"]
    smaller = ["--small"] if rehearse else []
    kinds = ["--densities", "0.01", "--dtypes", "bfloat16"]
    strict = {**where, "TIDEMILL_KERNELS": "strict"}
    made = [
        GpuCheck("kernels_equal_their_twins", ["-m", "pytest", *options, *CASES], 100, where, _counted),
        GpuCheck("kernels_speed", ["tests/bench/bench_kernels.py", *kinds, *small], 90, {}, _lines),
        GpuCheck("delta_speed", ["-m", "tests.gpu.delta_speed", *smaller], 50, where, _lines),
        GpuCheck("live_weights", ["-m", "tests.gpu.live_weights", *smaller], 50, strict, _lines),
        GpuCheck("step_agreement", ["-m", "tests.gpu.step_agreement", *smaller], 80, where, _lines),
        GpuCheck("train_step", ["-m", "tests.gpu.train_step", *smaller], 185, where, _lines),
    ]
    return [replace(check, seconds=REHEARSAL_S) for check in made] if rehearse else made


def run_check(check: GpuCheck) -> dict[str, Any]:
    """Run a check and return its entry in the document."""
    begun, path = time.monotonic(), os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **check.environment, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [sys.executable, *check.command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=check.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        late = f"not done within {check.seconds:g} s"
        # Bytes, also with text=True.
        so_far = (error.stdout or b"").decode(errors="replace")
        return {"passed": False, "seconds": check.seconds, "problem": "\n".join([late, *so_far[-3000:].splitlines()])}
    told: dict[str, Any] = {"passed": done.returncode == 0, "seconds": round(time.monotonic() - begun, 1)}
    if done.returncode:
        told["problem"] = (done.stdout[-3000:] + done.stderr[-1000:]).strip()
    else:
        told["figures"] = check.figures(done.stdout)
    return told


def device_name() -> str | None:
    """Return the GPU that PyTorch finds; None if there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> int:
    """Run the checks that can run and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the document to this file as well")
    parser.add_argument("--rehearse", action="store_true", help="run the checks on the CPU, small; no figure of a GPU")
    parser.add_argument("--only", action="append", help="run only this check; may be repeated")
    chosen = parser.parse_args()
    gpu = device_name()
    found: dict[str, Any] = {"gpu": gpu, "rehearsal": chosen.rehearse, "checks": {}}
    if gpu is None and not chosen.rehearse:
        found["note"] = NO_GPU
    else:
        todo = [check for check in checks(chosen.rehearse) if not chosen.only or check.name in chosen.only]
        for check in todo:
            print(f"{check.name} (at most {check.seconds:g} s)", file=sys.stderr, flush=True)
            found["checks"][check.name] = run_check(check)
    text = json.dumps(found, indent=2)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", "utf-8")
    if "note" in found:
        print(NO_GPU, file=sys.stderr)
    return 0 if all(told["passed"] for told in found["checks"].values()) else 1


def _lines(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _counted(output: str) -> dict[str, int]:
    """Read the counts in pytest's last line."""
    return {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped)", output)}


if __name__ == "__main__":
    sys.exit(main())
