"""Child processes of one command: started with a log file each, watched, and stopped without orphans.

Invariants: a child does not outlive its parent, even when the parent is killed; a child that ends early is an error
that carries the end of its log; stopping asks first (SIGTERM) and insists after a grace period (SIGKILL), on the whole
process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.schemas.shutdown import signals_deferred

GRACE_S = 20.0
LOG_TAIL_LINES = 15
PR_SET_PDEATHSIG = 1
TIDEMILL = ("-m", "tidemill.compose.cli")
"""The command line, as an argument of Python."""


class RoleDied(RuntimeError):
    """A child ended that should have gone on."""


@dataclass(frozen=True, slots=True)
class Role:
    """One child process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Starts, watches and stops the roles of one command."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log_dir = log_dir
        self._environment = {**os.environ, **(environment or {})}
        self._roles: dict[str, Role] = {}
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = TIDEMILL,
    ) -> Role:
        """Start `tidemill ARGUMENTS`, or another Python program, as the role `name`; its output goes to
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
                preexec_fn=_die_with_parent,
            )
            # Before a signal takes effect, so that whoever it ends stops this role as well.
            self._roles[name] = Role(name, process, log)
        return self._roles[name]

    def ended(self, name: str) -> bool:
        """Whether a role has ended well. Raises RoleDied when it failed."""
        role = self._roles[name]
        code = role.process.poll()
        if code not in (None, 0):
            raise RoleDied(f"{name} ended with status {code}; the end of {role.log}:\n{role.tail()}")
        return code == 0

    def check(self, may_end: Sequence[str] = ()) -> None:
        """Raise RoleDied when any role has ended, but for those in `may_end` that ended well."""
        for name, role in self._roles.items():
            if self.ended(name) and name not in may_end:
                raise RoleDied(f"{name} ended early; the end of {role.log}:\n{role.tail()}")

    def stop(self, name: str, grace_s: float = GRACE_S) -> None:
        """Ask a role to end, insist after the grace period, and take what is left of its process group along."""
        role = self._roles.pop(name)
        _signal(role, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            role.process.wait(grace_s)
        _signal_group(role, signal.SIGKILL)
        role.process.wait()

    def stop_all(self) -> None:
        """Stop every role, the last started first."""
        for name in reversed(list(self._roles)):
            self.stop(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()


def _signal(role: Role, number: signal.Signals) -> None:
    if role.process.poll() is None:
        role.process.send_signal(number)


def _signal_group(role: Role, number: signal.Signals) -> None:
    try:
        os.killpg(role.process.pid, number)
    except ProcessLookupError:
        return
