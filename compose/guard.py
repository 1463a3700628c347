"""Ends what a command has started when the command itself was killed: its roles, then its local stack.

The command tells this process the id of each role by its standard input, and at last that it has ended them itself. An
input that ends without that word means that the command is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

from tidemill.compose.stack import LocalStack, StackSettings

DONE = "done"
GRACE_S = 20.0
"""Seconds that roles get to end by themselves."""


class Guard:
    """The guard of this process, for the length of a block."""

    def __init__(self, stack: Path, grace_s: float = GRACE_S) -> None:
        """`stack` is the data directory of the local stack, which need not exist."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(stack), str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Tell it of a role."""
        self._tell(str(pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(DONE)
        self._process.wait()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:  # somebody has ended the guard: there is nobody to tell
            return


def main() -> None:
    """Entry point of the guard's own process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    roles = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        with suppress(psutil.NoSuchProcess):
            roles.append(psutil.Process(int(line)))
    started = []
    for role in roles:
        with suppress(psutil.NoSuchProcess):
            started += [role, *role.children(recursive=True)]
            role.terminate()
    for process in psutil.wait_procs(started, float(sys.argv[2]))[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    LocalStack(StackSettings(data_dir=Path(sys.argv[1]))).down()


if __name__ == "__main__":
    main()
