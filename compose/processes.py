"""Child processes of one command: started with a log file each, watched, and stopped without orphans.

Invariants: a child does not outlive its parent, even if the parent is killed; a child that ends early is an error that
contains the end of its log, or is restarted with backoff; stopping sends SIGTERM first, and after a grace period
SIGKILL, to the whole process group.

The guard is a process of its own that ends all processes of a command if the command itself was killed: its roles, then
its local stack. The command writes the id of each role to the guard's standard input, and at the end that it has ended
them itself. If the input ends without that message, the command was killed, or interrupted while it ended them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import psutil  # type: ignore[import-untyped]

from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.shutdown import signals_deferred

GRACE_S = 20.0
LOG_TAIL_LINES = 15
HEALTHY_S = 45.0
"""Seconds. A shorter run that ended by itself counts towards `MOST_SHORT_RUNS`."""
MOST_SHORT_RUNS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Backoff before a role is restarted: doubled after each short run."""
PR_SET_PDEATHSIG = 1
TIDEMILL = ("-m", "tidemill")
"""The arguments of Python that start the command line."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    arguments: Sequence[str]
    environment: Mapping[str, str]
    program: Sequence[str]
    began: float = field(default_factory=time.monotonic)

    def tail(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def _die_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this new process when its `parent` ends; exit if that has happened already."""
    # The parent's handler would ignore a signal that arrives before the program is loaded.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


class Supervisor:
    """Starts, watches and stops the roles of one command."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
        *,
        restarted: Callable[[str], None] | None = None,
        started: Callable[[int], None] = lambda _pid: None,
    ) -> None:
        """Keep the roles' logs in a directory.

        Args:
            environment: of every role. None: that of this process.
            restarted: called with a message for each role that ended early and is restarted. None: that is an error.
            started: called with the process id of each role.
        """
        self._log_dir = log_dir
        self._environment = os.environ if environment is None else environment
        self._roles: dict[str, Role] = {}
        self._restarted, self._started = restarted, started
        self._short_lives: Counter[str] = Counter()
        self._due: dict[str, float] = {}
        """The time at which an ended role is restarted, on the monotonic clock."""
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = TIDEMILL,
    ) -> Role:
        """Start `tidemill ARGUMENTS`, or another Python program, as the role `name`; its output is appended to
        `<log_dir>/<name>.log`."""
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as output, signals_deferred():
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self._environment, **(environment or {})},
                start_new_session=True,
                preexec_fn=partial(_die_with, os.getpid()),
            )
            # Before a signal takes effect, so that a process that it ends stops this role too.
            self._roles[name] = Role(name, process, log, arguments, environment or {}, program)
        self._started(process.pid)
        return self._roles[name]

    def ended(self, name: str) -> bool:
        """Return whether a role has ended without error. Raises RuntimeError if it failed and is not restarted."""
        role = self._roles[name]
        code = role.process.poll()
        if code not in (None, 0) and self._restarted is None:
            raise RuntimeError(f"{name} ended with status {code}; the end of {role.log}:\n{role.tail()}")
        return code == 0

    def check(self, may_end: Sequence[str] = ()) -> None:
        """Check for ended roles, except those in `may_end` that ended without error.

        Raises RuntimeError for them, or, if roles are restarted, for one that ends by itself soon after each start.
        """
        for name, role in list(self._roles.items()):
            code = role.process.poll()
            if code is None or (code == 0 and name in may_end):
                continue
            now = time.monotonic()
            if self._restarted is None:
                if self.ended(name):
                    raise RuntimeError(f"{name} ended early; the end of {role.log}:\n{role.tail()}")
            elif name not in self._due:
                _kill_group(role)
                short = self._short_lives[name] = 1 if now - role.began > HEALTHY_S else self._short_lives[name] + 1
                if code >= 0 and short > MOST_SHORT_RUNS:
                    raise RuntimeError(
                        f"{name} ended soon after {short} starts in a row, the last time with status {code}; the end "
                        f"of {role.log}:\n{role.tail()}"
                    )
                pause_s = min(FIRST_PAUSE_S * 2 ** (short - 1), LONGEST_PAUSE_S)
                self._due[name] = now + pause_s
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                self._restarted(f"{name} {how}: it is started again in {pause_s:g} s; its log is {role.log}")
            elif now >= self._due[name]:
                del self._due[name]
                self.start(name, role.arguments, role.environment, role.program)

    def stop(self, *names: str, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to roles, SIGKILL after one grace period, and SIGKILL to the rest of their process groups."""
        roles = [self._roles.pop(name) for name in names]
        deadline = time.monotonic() + grace_s
        for role in roles:
            self._due.pop(role.name, None)
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGTERM)
        for role in roles:
            with suppress(subprocess.TimeoutExpired):
                role.process.wait(max(0.0, deadline - time.monotonic()))
            _kill_group(role)
            role.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop(*self._roles, grace_s=GRACE_S)


def _kill_group(role: Role) -> None:
    with suppress(ProcessLookupError):
        os.killpg(role.process.pid, signal.SIGKILL)


DONE = "done"


class ChildGuard:
    """The guard of this process, for the length of a block."""

    def __init__(self, stack: Path, grace_s: float = GRACE_S) -> None:
        """Start the guard.

        Args:
            stack: the data directory of the local stack, which need not exist.
            grace_s: how long the processes of a killed command may take to end.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(stack), str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        self._tell(str(pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        # After an interrupt, while the command ended its roles, some of them may be left: the guard ends them.
        if kind is None:
            self._tell(DONE)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the guard was killed and needs no message
            print(word, file=self._process.stdin, flush=True)


def main() -> None:
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
