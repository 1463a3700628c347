"""Keeps the roles of a run alive, like a process manager, and injects faults into them.

A role that ends without a request is started again at once, for any reason; a role that repeatedly ends by itself
soon after its start is a crash loop, which is an error. Remaining processes of a killed role's process group are
killed before the role is started again. Each process of a role has its own log file.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tidemill.compose.processes import TIDEMILL, Role, Supervisor

MOST_CRASHES = 6
"""More processes of a role in a row that end early by themselves are a crash loop."""
HEALTHY_S = 45.0
"""A process that ran longer did not end early."""
BACKOFF_S = 1.0
"""Wait before a restart of a role that ended by itself; it grows with each further end."""
TRACKER = "resource_tracker"
"""Text in the command line of the helper processes that Python starts for ranks with shared memory."""
DISK_MARGIN = 16 * 1024
"""Bytes that a role may still write to its own log when its disk is full, so that it can report the error."""


class CrashLoop(RuntimeError):
    """Raised if a role repeatedly ends by itself; the message contains the end of its log."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The command that starts a role."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = TIDEMILL
    """Arguments of Python before the role's own."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of a role that ended."""

    name: str
    status: int
    """Exit status; below 0 for a signal."""
    by_itself: bool
    """Whether it ended without being killed."""
    last_words: str
    """The last line of its log."""
    during: str = ""
    """The kind of fault that lasted when it ended; empty if none did."""


@dataclass(slots=True)
class _Kept:
    spec: RoleSpec
    role: Role | None = None
    doomed: bool = False
    """Whether the keeper killed it and has not yet seen its end."""
    crashes: int = 0
    not_before: float = 0.0
    began: float = 0.0
    began_s: float = 0.0
    full: bool = False
    """Whether its disk is full, for this process and the next ones."""


class Keeper:
    """Keeps roles alive, with a supervisor.

    Args:
        may_end: roles whose work is done when they end with status 0.
        later: roles that wait for `let_begin`.
    """

    def __init__(
        self, supervisor: Supervisor, specs: Sequence[RoleSpec], may_end: Collection[str], later: Collection[str] = ()
    ) -> None:
        self._supervisor = supervisor
        self._kept = {spec.name: _Kept(spec) for spec in specs}
        self._may_end = frozenset(may_end)
        self._later = set(later)
        self.done: set[str] = set()
        """Roles that ended because their work was done."""
        self.starts_s: defaultdict[str, list[float]] = defaultdict(list)
        """When the processes of each role were started, in seconds since the epoch."""

    def mend(self, excused: Collection[str] = ()) -> list[Ended]:
        """Start the roles that do not run, and return the processes that ended since the last call.

        Raises CrashLoop, except for roles in `excused`, which have a reason to end by themselves.
        """
        found = [ended for kept in self._kept.values() if (ended := self._reap(kept)) is not None]
        for ended in found:
            kept = self._kept[ended.name]
            if kept.crashes > MOST_CRASHES and ended.name not in excused:
                raise CrashLoop(f"{ended.name} ended {kept.crashes} times by itself; last: {ended.last_words}")
        for name, kept in self._kept.items():
            due = name not in self.done | self._later and time.monotonic() >= kept.not_before
            if kept.role is None and due:
                self._start(kept)
        return found

    def let_begin(self, name: str) -> None:
        """Allow a role of `later` to start."""
        self._later.discard(name)

    def kill(self, name: str) -> bool:
        """Send SIGKILL to the role's process; return whether one ran."""
        kept = self._kept[name]
        sent = self._signal(kept, signal.SIGKILL)
        kept.doomed |= sent
        return sent

    def kill_rank(self, name: str, number: int) -> bool:
        """Send SIGKILL to one of the role's ranks; return whether it had several."""
        ranks = self.ranks(name)
        if len(ranks) < 2:
            return False
        ranks[number % len(ranks)].kill()
        self._kept[name].doomed = True
        return True

    def ranks(self, name: str) -> list[psutil.Process]:
        """Return the ranks of a role: its processes without children; none while the role ends after a kill."""
        kept, found = self._kept[name], list[psutil.Process]()
        if kept.doomed or kept.role is None or kept.role.process.poll() is not None:
            return found
        for process in sorted(psutil.Process(kept.role.process.pid).children(recursive=True), key=lambda one: one.pid):
            with suppress(psutil.NoSuchProcess):
                if not process.children() and TRACKER not in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def pause(self, name: str) -> bool:
        """Send SIGSTOP; return whether a process ran."""
        return self._signal(self._kept[name], signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Send SIGCONT."""
        self._signal(self._kept[name], signal.SIGCONT)

    def set_disk(self, name: str, *, full: bool) -> None:
        """Let the role's files grow no further, except its log for the last error, or let them grow again. Restarts do
        not change this."""
        kept = self._kept[name]
        kept.full = full
        _allow_growth(kept)

    def pid(self, name: str) -> int | None:
        """Return the process id of a role; None while it has none."""
        role = self._kept[name].role
        return role.process.pid if role is not None else None

    def began_s(self, name: str) -> float:
        """Return when the role's last process was started, in seconds since the epoch; infinite if it is not a role."""
        return self._kept[name].began_s if name in self._kept else math.inf

    def stop(self) -> None:
        """Ask every role to end, and restart none."""
        for name in reversed(self._kept):
            self.retire(name)

    def retire(self, name: str) -> None:
        """Ask a role to end, and do not restart it."""
        kept = self._kept[name]
        if kept.role is not None:
            self._supervisor.stop(kept.role.name)
            kept.role = None
        self.done.add(name)

    def _signal(self, kept: _Kept, number: signal.Signals) -> bool:
        if kept.role is None or kept.role.process.poll() is not None:
            return False
        os.kill(kept.role.process.pid, number)
        return True

    def _start(self, kept: _Kept) -> None:
        kept.began, kept.began_s = time.monotonic(), time.time()
        starts = self.starts_s[kept.spec.name]
        starts.append(kept.began_s)
        name = f"{kept.spec.name}.{len(starts):03d}"
        kept.role = self._supervisor.start(name, kept.spec.arguments, kept.spec.environment, kept.spec.program)
        if kept.full:
            _allow_growth(kept)

    def _reap(self, kept: _Kept) -> Ended | None:
        role = kept.role
        if role is None or (status := role.process.poll()) is None:
            return None
        # Stopping an ended role also kills its orphans.
        self._supervisor.stop(role.name, grace_s=0)
        kept.role, doomed, kept.doomed = None, kept.doomed, False
        name = kept.spec.name
        ended = Ended(name, status, not doomed, _last_words(role.log))
        if status == 0 and not doomed and name in self._may_end:
            self.done.add(name)
        elif not doomed:
            healthy = time.monotonic() - kept.began > HEALTHY_S
            kept.crashes = 1 if healthy else kept.crashes + 1
            kept.not_before = time.monotonic() + BACKOFF_S * (kept.crashes - 1)
        return ended


def _allow_growth(kept: _Kept) -> None:
    """Set the limit on the size of a role's files: limited if its disk is full."""
    role = kept.role
    if role is None or role.process.poll() is not None:
        return
    _, hard = resource.prlimit(role.process.pid, resource.RLIMIT_FSIZE)
    room = role.log.stat().st_size + DISK_MARGIN if kept.full else hard
    resource.prlimit(role.process.pid, resource.RLIMIT_FSIZE, (room, hard))


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if any(map(str.isalnum, line))]
    return lines[-1].strip()[-300:] if lines else ""
