"""The whole loop from one command: real Kafka, real vLLM, every role a process of its own.

One short demonstration is run and looked at from many sides: its summary, its sockets while it runs, its tables, and
what it leaves behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tidemill.consumers.query import ask, named_queries
from tidemill.consumers.sink.config import SinkSettings

STEPS = 5
DEADLINE_S = 420.0
SMALL = [
    "midtrain.steps=30",
    "corpus.documents=2000",
    "feed.eval_tasks=8",
    "feed.eval_every=0",
    "run.skip_no_signal=false",
    "trainer.publish.anchor_every=3",
]


@dataclass(frozen=True, slots=True)
class Finished:
    """A demonstration that has ended."""

    summary: dict
    connections: dict[str, set[str]]
    """Remote TCP addresses by role, seen while it ran."""
    commands: set[str]
    processes_left: list[str]

    def rows(self, sql: str) -> list[dict]:
        path = Path(self.summary["data_dir"]) / "clickhouse"
        answer = ask(SinkSettings(path=str(path)), sql)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def demo_command(data_dir: Path, *arguments: str) -> list[str]:
    assignments = [part for setting in SMALL for part in ("--set", setting)]
    command = [sys.executable, "-m", "tidemill.compose.cli", "demo", "--data-dir", str(data_dir), "--steps", str(STEPS)]
    return [*command, *assignments, *arguments]


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def role_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("tidemill.compose.cli") + 1] if "tidemill.compose.cli" in words else ""


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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    data_dir = tmp_path_factory.mktemp("demo")
    output = data_dir / "summary.json"
    log = data_dir / "demo.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(demo_command(data_dir, "--json", str(output)), stdout=stream, stderr=stream)
    connections: dict[str, set[str]] = {}
    try:
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            look(process.pid, connections)
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert process.returncode == 0, log.read_text() + role_logs(data_dir)
    yield Finished(json.loads(output.read_text()), connections, set(connections), belonging_to(data_dir))


def role_logs(data_dir: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in data_dir.rglob("logs/*.log"))


def look(pid: int, connections: dict[str, set[str]]) -> None:
    for process in descendants(pid):
        try:
            role = role_of(process)
            found = {f"{c.raddr.ip}:{c.raddr.port}" for c in process.net_connections("tcp") if c.raddr}
        except psutil.Error:
            continue
        if role:
            connections.setdefault(role, set()).update(found)


def test_the_summary_holds_what_scripts_need(finished: Finished):
    summary = finished.summary
    assert summary["versions"] == STEPS
    assert summary["fingerprints_equal"] is True
    assert summary["refusals"] == 0
    assert 0 <= summary["max_policy_lag"] <= summary["policy_lag_bound"]
    assert summary["groups"] >= STEPS * 8 and summary["rollouts_trained"] == STEPS * 8 * 16
    assert 0.0 <= summary["held_out_before"] <= 1.0 and summary["held_out_rollouts"] == 8 * 4
    assert 0 < summary["pause_ms"]["p50"] <= summary["pause_ms"]["p95"]
    assert 0 < summary["step_to_served_s"]["p50"] <= summary["step_to_served_s"]["p95"]
    assert summary["learning_rate"] > 0 and 0 < summary["delta_density"]["p50"] <= 1


def test_every_role_is_a_process_of_its_own(finished: Finished):
    assert {"sink", "train", "serve", "stream", "rollout", "feed"} <= finished.commands


def test_no_sockets_between_roles_but_the_broker_and_the_replicas(finished: Finished):
    settings = (Path(finished.summary["data_dir"]) / "settings.toml").read_text()
    seen = set().union(*(addresses for role, addresses in finished.connections.items() if role != "serve"))
    foreign = {address for address in seen if f'"{address}"' not in settings and f'//{address}"' not in settings}
    assert seen and not foreign


def test_every_rollout_has_one_ending_and_no_held_out_task_was_trained(finished: Finished):
    rows = finished.rows("accounting")
    assert sum(row["rollouts"] for row in rows if row["ending"] == "trained") == finished.summary["rollouts_trained"]
    assert sum(row["trained_twice"] + row["held_out_trained"] for row in rows) == 0
    assert not [row for row in rows if row["ending"] == "more than one ending"]
    trained = "SELECT payload FROM tasks WHERE mode = 'train'"
    shared = f"SELECT count() AS n FROM tasks WHERE mode = 'eval' AND payload IN ({trained})"
    assert finished.rows(shared) == [{"n": 0}]


def test_the_tables_hold_what_the_topics_held(finished: Finished):
    (steps,) = finished.rows("SELECT count() AS n, max(version) AS newest FROM train_steps")
    assert steps == {"n": STEPS, "newest": STEPS}
    (rollouts,) = finished.rows("SELECT count() AS n, countDistinct(rollout_id) AS ids FROM rollouts")
    assert rollouts["n"] == rollouts["ids"]


@pytest.mark.parametrize("name", sorted(named_queries()))
def test_the_named_queries_answer(finished: Finished, name: str):
    rows = finished.rows(name)
    assert rows or name == "failures"


def test_sampled_tokens_agree_with_the_trainer_at_the_same_version(finished: Finished):
    (row,) = finished.rows("SELECT metrics['mismatch/max_abs_dlogp'] AS worst FROM train_steps WHERE step = 1")
    assert row["worst"] < 1e-3


def test_nothing_is_left_running(finished: Finished):
    assert finished.processes_left == []


def wait_until(condition: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def test_an_interrupt_stops_everything(tmp_path: Path):
    log = tmp_path / "demo.log"
    with log.open("wb") as stream:
        # A shell's background jobs ignore the interrupt, and what they start inherits that.
        process = subprocess.Popen(
            demo_command(tmp_path),
            stdout=stream,
            stderr=stream,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    wait_until(lambda: len({role_of(p) for p in descendants(process.pid)} - {""}) >= 1, 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    wait_until(lambda: not belonging_to(tmp_path), 10)


def test_without_java_or_maven_the_choices_are_named_at_once(tmp_path: Path):
    environment = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": ""}
    environment.pop("TIDEMILL_KAFKA__BOOTSTRAP", None)
    command = demo_command(tmp_path / "data")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    for choice in ("--bootstrap", "docker compose", "nstall"):
        assert choice in done.stderr
    assert not (tmp_path / "data").exists()
