"""Runs demonstrations as processes for tests, and inspects them from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.quick_loop import CALM
from tests.waiting import until
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.query import ask

STEPS = 4
GROUPS = 4
GROUP_SIZE = 8
DEADLINE_S = 1200.0
SMALL = [
    *CALM,
    "midtrain.steps=80",
    # With half of the layers it has learnt as much after these steps.
    "midtrain.model.layers=2",
    "corpus.documents=3000",
    "feed.eval_tasks=8",
    "feed.eval_every=0",
    f"run.groups_per_step={GROUPS}",
    f"feed.group_size={GROUP_SIZE}",
    "run.skip_no_signal=false",
    "trainer.publish.anchor_every=3",
    # Threads that wait for each other would use the cores of other tests that run at the same time.
    "midtrain.threads=1",
    "demo.start_timeout_s=600",
    "demo.stall_timeout_s=600",
    # A killed replica may take minutes to restart if other tests run at the same time; its episodes wait for it.
    "feed.deadline_s=600",
    "feed.eval_deadline_s=600",
    "rollout.episode_timeout_s=600",
]
"""Settings of a quick demonstration, whose model sometimes answers."""
TIMEOUT_S = 2400.0
"""Limit of one test, which may wait for two demonstrations while other tests run at the same time."""
LOOK_S = 2.0
GONE_S = 60.0
"""A killed process is there until the kernel has run it once more."""

ABOUT_USERS = {
    "arms",
    "feedback_to_served",
    "gate",
    "gate_evidence",
    "gate_timeline",
    "online_accounting",
    "outcomes_by_reason",
    "reward_by_arm",
    "selection",
    "signal_coverage",
}
"""The named queries that return no rows for a run without users."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A demonstration that has ended."""

    summary: dict
    connections: dict[str, set[str]]
    """Remote TCP addresses by role, seen while it ran."""
    listening: dict[str, set[str]]
    """Addresses on which a role listened, by role."""
    commands: set[str]
    killed: set[str]
    """Roles killed while it ran."""
    said: str
    """Its standard output and standard error."""
    processes_left: list[str]

    @property
    def directory(self) -> Path:
        return Path(self.summary["data_dir"])

    @property
    def sink(self) -> SinkSettings:
        return SinkSettings(path=str(self.directory / "clickhouse"))

    @contextmanager
    def open_tables(self) -> Iterator[Finished]:
        """Keep the tables open: otherwise their engine is started again for each query."""
        with closing(connect(self.sink)):
            yield self

    def rows(self, sql: str) -> list[dict]:
        answer = ask(self.sink, sql)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]

    def sampled_and_trained_alike(self) -> bool:
        """Return whether tokens sampled at the first version have the trainer's logprobs."""
        (row,) = self.rows("SELECT metrics['mismatch/max_abs_dlogp'] AS worst FROM train_steps WHERE step = 1")
        return row["worst"] < 1e-3

    @contextmanager
    def open_log(self) -> Iterator[str]:
        """Start the Kafka of the demonstration again on its data; yields its address."""
        stack = LocalStack(StackSettings(data_dir=self.directory / "kafka", heap_mb=320))
        try:
            yield stack.up().bootstrap
        finally:
            stack.down()

    def connected(self, *servers: str) -> tuple[set[str], set[str]]:
        """Return the addresses to which roles other than `servers` connected, and those on which no server listens and
        which no settings file names."""
        settings = "".join(path.read_text() for path in self.directory.glob("settings*.toml"))
        seen = set().union(*(found for role, found in self.connections.items() if role not in servers))
        foreign = seen.difference(*(self.listening.get(role, ()) for role in servers))
        return seen, {each for each in foreign if f'"{each}"' not in settings and f'//{each}"' not in settings}

    def newest_anchor(self) -> Path:
        anchors = self.directory.glob("store/*/anchors/main/v*")
        return max(anchors, key=lambda path: int(path.name[1:]))


def demo_command(data_dir: Path, settings: Sequence[str], *arguments: str) -> list[str]:
    assignments = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "tidemill", "demo", "--data-dir", str(data_dir)]
    return [*command, *assignments, *arguments]


def run_demonstration(data_dir: Path, settings: Sequence[str], *arguments: str, kill_after: str = "") -> Finished:
    """Run a demonstration to its end and inspect its processes meanwhile.

    Args:
        kill_after: a pattern; when the demonstration's output matches it, every running role is killed.
    """
    output, log = data_dir / "summary.json", data_dir / "demo.log"
    command = demo_command(data_dir, settings, "--json", str(output), *arguments)
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    connections: dict[str, set[str]] = {}
    listening: dict[str, set[str]] = {}
    killed: set[str] = set()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            look(process.pid, connections, listening)
            if kill_after and not killed and re.search(kill_after, log.read_text()):
                # Not their engine cores, which may have the command line of the role.
                roles = descendants(process.pid, recursive=False)
                running = {role: child for child in roles if (role := role_of(child))}
                for child in running.values():
                    child.kill()
                killed = set(running)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert process.returncode == 0, f"status {process.returncode}\n{log.read_text()}{role_logs(data_dir)}"
    with suppress(AssertionError):  # a test reports what is left
        until(lambda: not belonging_to(data_dir), deadline_s=GONE_S, pause_s=0.5)
    summary, left = json.loads(output.read_text()), belonging_to(data_dir)
    return Finished(summary, connections, listening, set(connections), killed, log.read_text(), left)


def descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def role_of(process: psutil.Process) -> str:
    """Return the command of a Tidemill process; empty for other processes, and for one that has just ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    return words[3] if words[1:3] == ["-m", "tidemill"] else ""


def belonging_to(data_dir: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(str(data_dir) in word for word in words) and process.pid != os.getpid():
            found.append(" ".join(words))
    return found


def role_logs(data_dir: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in data_dir.rglob("logs/*.log"))


def look(pid: int, connections: dict[str, set[str]], listening: dict[str, set[str]]) -> None:
    """Add the addresses of the roles' connections, and those on which they listen."""
    for process in descendants(pid):
        try:
            role, found = role_of(process), process.net_connections("tcp")
        except psutil.Error:
            continue
        if role:
            connections.setdefault(role, set()).update(f"{c.raddr.ip}:{c.raddr.port}" for c in found if c.raddr)
            served = (c.laddr for c in found if c.status == psutil.CONN_LISTEN)
            listening.setdefault(role, set()).update(f"{address.ip}:{address.port}" for address in served)
