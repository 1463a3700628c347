"""Detached processes with pid files, their ports, and the lock on their directory.

A pid file alone is no proof: the process counts only if its command line contains the marker, so that a reused pid of
another program never matches and is never signalled. The kernel releases the lock when its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tidemill.compose.stack.config import HOST, StackError

KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A process identified by a pid file and by a marker, which is one whole argument of its command line."""

    pid_file: Path
    marker: str

    def start(self, command: Sequence[str], output: Path) -> int:
        """Start `command`, which must contain the marker, in its own session, with output appended to a file; return
        its pid."""
        if self.marker not in command:
            raise ValueError(f"the command lacks its marker {self.marker!r}")
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        out = (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        actions = [null, out, (os.POSIX_SPAWN_DUP2, 1, 2)]
        pid = os.posix_spawn(command[0], list(command), os.environ, file_actions=actions, setsid=True)
        self.pid_file.write_text(f"{pid}\n")
        return pid

    def find(self) -> psutil.Process | None:
        """Return the running process: the one in the pid file, or any with the marker, or None."""
        try:
            recorded = psutil.Process(int(self.pid_file.read_text()))
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            recorded = None
        if recorded is not None and self._matches(recorded):
            return recorded
        return next((process for process in psutil.process_iter() if self._matches(process)), None)

    @property
    def was_started(self) -> bool:
        """Whether a pid file says that the process should run."""
        return self.pid_file.exists()

    def _matches(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return self.marker in process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def stop_all(detached: Sequence[DetachedProcess], timeout_s: float, progress: Callable[[str], None]) -> None:
    """Send SIGTERM to all processes, and SIGKILL to the rest after `timeout_s` seconds; then delete the pid files."""
    running = [process for each in detached if (process := each.find()) is not None]
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(running, timeout=timeout_s)
    if stubborn:
        progress(f"still running after {timeout_s:.0f} s, killing: {', '.join(str(p.pid) for p in stubborn)}")
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, immortal = psutil.wait_procs(stubborn, timeout=KILL_TIMEOUT_S)
    if immortal:
        raise TimeoutError(f"processes {[p.pid for p in immortal]} survived SIGKILL for {KILL_TIMEOUT_S:.0f} s")
    for each in detached:
        each.pid_file.unlink(missing_ok=True)


POLL_S = 0.1


@contextmanager
def exclusive(path: Path, timeout_s: float, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`. Raises StackError if another process holds it for more than `timeout_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline is None:
                    progress(f"another command uses {path.parent}; waiting until it ends")
                    deadline = time.monotonic() + timeout_s
                if time.monotonic() >= deadline:
                    raise StackError(
                        f"{path} is still held by another command after {timeout_s:.0f} s; wait for it or end it"
                    ) from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


# Below the range that Linux and macOS use for outgoing connections, so that no client has a broker's port when the
# broker restarts.
CHOICE = range(20_000, 32_000)
TRIES = 1000


def pick_ports(count: int, base_port: int) -> list[int]:
    """Return `count` ports: consecutive from `base_port`, or free ones if it is 0."""
    if base_port:
        return list(range(base_port, base_port + count))
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(TRIES):
            port = random.SystemRandom().choice(CHOICE)
            if port not in chosen and held.enter_context(_bind(port)) is not None:
                chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise StackError(f"no {count} free ports on {HOST} between {CHOICE.start} and {CHOICE.stop}; give --port")


def check_free(ports: Iterable[int]) -> None:
    """Raise StackError if a program listens on one of the ports."""
    for port in ports:
        with _bind(port) as bound:
            if bound is None:
                raise StackError(
                    f"port {port} on {HOST} is in use by another program; stop that program, or choose other ports "
                    "with --port (0 picks free ones for a new --data-dir)"
                )


@contextlib.contextmanager
def _bind(port: int) -> Iterator[socket.socket | None]:
    """Yield a socket bound to the port, or None if it is in use."""
    with socket.socket() as candidate:
        # Connections of an earlier broker in TIME_WAIT do not count; a listener does.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, port))
        except OSError:
            yield None
        else:
            yield candidate
