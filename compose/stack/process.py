"""Detached processes with pid files.

A pid file is a hint, not a proof: the process counts only if it carries the marker in its command line, so that a pid
that the kernel gave to another program is never taken, and never signalled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Detached:
    """A process known by a pid file and by a marker, one whole argument of its command line."""

    pid_file: Path
    marker: str

    def start(self, command: Sequence[str], output: Path) -> int:
        """Start `command` in a session of its own, output appended to a file; its pid. The marker must be in it."""
        if self.marker not in command:
            raise ValueError(f"the command lacks its marker {self.marker!r}")
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        out = (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        actions = [null, out, (os.POSIX_SPAWN_DUP2, 1, 2)]
        pid = os.posix_spawn(command[0], list(command), os.environ, file_actions=actions, setsid=True)
        self.pid_file.write_text(f"{pid}\n")
        return pid

    def find(self) -> psutil.Process | None:
        """The running process: the one of the pid file, else any that carries the marker, else None."""
        recorded = self._recorded()
        if recorded is not None and self._matches(recorded):
            return recorded
        return next((process for process in psutil.process_iter() if self._matches(process)), None)

    @property
    def was_started(self) -> bool:
        """Whether a pid file says that the process should be there."""
        return self.pid_file.exists()

    def forget(self) -> None:
        """Remove the pid file of a process that is gone."""
        self.pid_file.unlink(missing_ok=True)

    def _recorded(self) -> psutil.Process | None:
        try:
            return psutil.Process(int(self.pid_file.read_text()))
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return None

    def _matches(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return self.marker in process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def stop_all(detached: Sequence[Detached], timeout_s: float, progress: Callable[[str], None]) -> None:
    """SIGTERM to every process, SIGKILL to those left after `timeout_s` seconds; pid files go with the processes."""
    running = [process for each in detached if (process := each.find()) is not None]
    _signal(running, "terminate")
    _, stubborn = psutil.wait_procs(running, timeout=timeout_s)
    if stubborn:
        progress(f"still running after {timeout_s:.0f} s, killing: {', '.join(str(p.pid) for p in stubborn)}")
    _signal(stubborn, "kill")
    _, immortal = psutil.wait_procs(stubborn, timeout=KILL_TIMEOUT_S)
    if immortal:
        raise TimeoutError(f"processes {[p.pid for p in immortal]} survived SIGKILL for {KILL_TIMEOUT_S:.0f} s")
    for each in detached:
        each.forget()


def _signal(processes: Sequence[psutil.Process], how: str) -> None:
    for process in processes:
        try:
            getattr(process, how)()
        except psutil.NoSuchProcess:
            continue
