"""What benchmarks share: a JSON line a figure, a log and a demonstration to measure, the peak of a process.

Import this before what stands in `tests`, whose folder it makes known.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.http_connections import bind

sys.path.insert(0, str(Path(__file__).parents[2]))

UP_S = 60.0


def say(figure: str, **values: object) -> None:
    """Print one JSON line; numbers with four significant digits."""
    rounded = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in values.items()}
    print(json.dumps({"figure": figure, **rounded}), flush=True)


@contextmanager
def log_at(bootstrap: str | None, data_dir: Path) -> Iterator[str]:
    """The given address, or that of a broker of the local stack over `data_dir` for the length of the context."""
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
    """`log_at` with its data in a directory of the context's own; the address, and that directory."""
    scratch = tempfile.TemporaryDirectory(prefix="tidemill-bench-")
    with scratch as root, log_at(bootstrap, Path(root, "stack")) as address:
        yield address, Path(root)


def relay(*arguments: str) -> None:
    """Run the benchmark that was started once more, with these arguments, and print the figures that it says."""
    done = subprocess.run([sys.executable, sys.argv[0], *arguments], check=True, stdout=subprocess.PIPE, text=True)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith('{"figure"')), flush=True)


def demonstration(data_dir: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run one, with NAME.log and NAME.json in `data_dir`; its summary."""
    output = data_dir / f"{name}.json"
    command = [sys.executable, "-m", "tidemill.compose.cli", "demo", "--json", str(output)]
    with (data_dir / f"{name}.log").open("wb") as log:
        subprocess.run([*command, "--data-dir", str(data_dir), *arguments], stdout=log, stderr=log, check=True)
    return json.loads(output.read_text("utf-8"))


def free_port() -> int:
    """A port that nothing listens at."""
    with bind("127.0.0.1", 0, "port") as free:
        return free.getsockname()[1]


async def until_up(url: str, process: subprocess.Popen[Any]) -> None:
    """Wait until a process answers at `url`."""
    deadline = time.monotonic() + UP_S
    async with aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, f"{url} does not answer"
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


def peak_bytes(pid: int | str = "self") -> int:
    """The most resident memory of a process so far. Its `ru_maxrss` begins with that of the process before it."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10
