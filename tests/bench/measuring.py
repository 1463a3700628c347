"""Common parts of the benchmarks: JSON lines, a log and a demonstration to measure, the peak memory of a process.

Import this before the modules of `tests`, since it adds that folder to the import path.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack

sys.path.insert(0, str(Path(__file__).parents[2]))

T = TypeVar("T")
_figures: TextIO | None = None
"""The file of the figures; None: the standard output."""


def say(figure: str, **values: object) -> None:
    """Print one JSON line; floats have four significant digits."""
    rounded = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in values.items()}
    print(json.dumps({"figure": figure, **rounded}), file=_figures, flush=True)


@contextmanager
def log_at(bootstrap: str | None, data_dir: Path) -> Iterator[str]:
    """Yield the given address, or that of a broker of the local stack on `data_dir`, which runs within the context."""
    if bootstrap:
        yield bootstrap
        return
    stack = LocalStack(StackSettings(data_dir=data_dir))
    try:
        yield stack.up(lambda _: None).bootstrap
    finally:
        stack.down(lambda _: None)


@contextmanager
def scratch_log(bootstrap: str | None) -> Iterator[tuple[str, Path]]:
    """Call `log_at` with a temporary directory; yields the address and the directory."""
    scratch = tempfile.TemporaryDirectory(prefix="tidemill-bench-")
    with scratch as root, log_at(bootstrap, Path(root, "stack")) as address:
        yield address, Path(root)


def cpu_seconds(work: Callable[[], object], runs: int) -> float:
    """Return the median processor time of a call, after one to warm up."""
    work()
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def distance(apart: np.ndarray) -> dict[str, float]:
    """Return the figures of differences of logprobs in nats: k3, the maximum and the 99 % quantile of their size."""
    size = np.abs(apart)
    k3 = float((np.expm1(apart) - apart).mean())
    return {"k3": k3, "max": float(size.max()), "p99": float(np.quantile(size, 0.99))}


def in_own_process(work: Callable[..., T], *arguments: object) -> T:
    """Call a function in its own process, where only `say` writes to the standard output, and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn"), _only_figures) as pool:
        return pool.submit(work, *arguments).result()


def _only_figures() -> None:
    global _figures
    _figures = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def demonstration(data_dir: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run a demonstration with NAME.log and NAME.json in `data_dir`, and return its summary."""
    output = data_dir / f"{name}.json"
    command = [sys.executable, "-m", "tidemill", "demo", "--json", str(output)]
    with (data_dir / f"{name}.log").open("wb") as log:
        subprocess.run([*command, "--data-dir", str(data_dir), *arguments], stdout=log, stderr=log, check=True)
    return json.loads(output.read_text("utf-8"))


def peak_bytes(pid: int | str = "self") -> int:
    """Peak resident memory of a process so far. `ru_maxrss` would start with that of the process before it."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10
