"""`tidemill gate` as an operator types it, on a real Kafka: decisions, precedence, and restart after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.consumers.weight_log import TOPICS, WeightLog
from tests.records import build
from tests.streams.gate.gate_support import ack, bench, manifest, outcome
from tests.waiting import until
from tidemill.compose.cli import app
from tidemill.compose.cli.gate_command import print_status
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.gate_decisions import GENERATION
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, GateVerdict
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.controller import Snapshot
from tidemill.streams.gate.role import run

DEADLINE_S = 180.0
SETTINGS = {
    "outcomes_per_user": 1, "min_users": 10, "bench_rollouts": 16, "share": 0.5, "settle_s": 0.0, "max_seconds": 1e6,
    "bench_seconds": 0.001,
}  # fmt: skip


@pytest.fixture(scope="module")
def topics(kafka):
    return kafka.fresh(1, (*TOPICS, Topic.GROUPS, Topic.OUTCOMES))


class Branch:
    """The log of one run, written as replicas, rollout workers and users would write it."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka, self.run = kafka, RunSettings(run_id=uuid.uuid4().hex)
        self.producer = RecordProducer(kafka, "test-gate")
        self._reader = LogReader(kafka, [Topic.GATE])
        self._decisions: list[GateDecision] = []
        self._interactions = 0

    def publish(self, version: int, successes: int) -> None:
        """Write a version, a canary replica's acknowledgement of it, and its bench."""
        self.producer.send_acked(Topic.MANIFESTS, [("main", manifest(version, self.run))])
        self.producer.send_acked(Topic.ACKS, [("canary-1", ack("canary-1", version, now_us(), self.run))])
        self.producer.send_acked(Topic.GROUPS, [("g", bench(version, successes, run=self.run))])

    def users(self, candidate: float, versions: tuple[int, int], count: int, seed: int, baseline: float = 0.5) -> None:
        """Write pairs of users, one for each arm, with these chances of a positive vote."""
        random = np.random.default_rng(seed)
        for _ in range(count):
            for arm, version, chance in (("canary", versions[0], candidate), ("stable", versions[1], baseline)):
                self._interactions += 1
                reward = 1.0 if random.random() < chance else -1.0
                made = replace(outcome(self._interactions, arm, version, now_us(), reward), run_id=self.run.run_id)
                self.producer.send(Topic.OUTCOMES, made, key=made.interaction_id)
        self.producer.flush()

    def decisions(self) -> list[GateDecision]:
        """Return every decision of the run."""
        found = (located.record for located in self._reader.read_to_end())
        self._decisions += (made for made in found if isinstance(made, GateDecision) and made.run_id == self.run.run_id)
        return self._decisions

    def verdicts(self) -> list[tuple[str, int | None]]:
        """Return verdicts and versions, in order."""
        return [(made.verdict.value, made.version) for made in self.decisions()]

    def wait(self, condition: Callable[[list[GateDecision]], bool]) -> list[GateDecision]:
        """Wait for the decisions."""
        until(lambda: condition(self.decisions()), self.verdicts, pause_s=0.05)
        return self._decisions

    def wait_last(self, verdict: GateVerdict, version: int | None) -> GateDecision:
        """Wait until the newest decision has this verdict and version."""
        return self.wait(lambda made: bool(made) and (made[-1].verdict, made[-1].version) == (verdict, version))[-1]

    def wait_compared(self, version: int) -> None:
        """Wait until the canary pool has its share of the users."""
        self.wait(lambda made: bool(made) and made[-1].version == version and made[-1].numbers.get("share") == 0.5)

    def options(self) -> list[str]:
        """Return the options of a command line."""
        return ["--bootstrap", self.kafka.bootstrap, "--topic-prefix", self.kafka.topic_prefix,
                "--run-id", self.run.run_id]  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()
        self.producer.flush()


@pytest.fixture
def branches(topics) -> Iterator[Callable[[], Branch]]:
    """A factory of branches."""
    made: list[Branch] = []
    yield lambda: made.append(Branch(topics)) or made[-1]
    for branch in made:
        branch.close()


@pytest.fixture
def branch(branches):
    return branches()


@contextmanager
def kept(branch: Branch) -> Iterator[None]:
    """Run a gate in this process."""
    stop = threading.Event()
    gate = threading.Thread(target=run, args=(branch.kafka, branch.run, GateSettings(**SETTINGS), stop))
    gate.start()
    try:
        yield
    finally:
        stop.set()
        gate.join(DEADLINE_S)
        assert not gate.is_alive()


@pytest.fixture
def gate(tmp_path) -> Iterator[Callable[[Branch], subprocess.Popen[str]]]:
    """A function that starts `tidemill gate run` on a branch."""
    started: list[subprocess.Popen[str]] = []

    def start(branch: Branch) -> subprocess.Popen[str]:
        settings = [part for key, value in SETTINGS.items() for part in ("--set", f"gate.{key}={value}")]
        log = (tmp_path / f"gate-{len(started)}.log").open("w")
        command = [sys.executable, "-m", "tidemill", "gate", "run", *branch.options(), *settings]
        started.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ask(branch: Branch, *arguments: object):
    return CliRunner().invoke(app, ["gate", *map(str, arguments), *branch.options()])


def test_versions_are_rejected_promoted_and_rolled_back(branch, gate, tmp_path):
    """A worse version is rejected, a better one promoted, its collapse rolled back; then the gate ends on request."""
    process = gate(branch)
    branch.publish(0, 12)
    branch.wait_last(GateVerdict.ADMIT, 0)
    branch.publish(1, 1)
    rejected = branch.wait_last(GateVerdict.REJECT, 1)
    assert "significantly worse" in rejected.reason and rejected.numbers["replicas"] == 1
    branch.publish(2, 12)
    branch.wait_compared(2)
    branch.users(0.1, (2, 0), 60, seed=1)
    worse = branch.wait_last(GateVerdict.REJECT, 2)
    assert worse.numbers["p_worse"] <= 0.05 and worse.numbers["canary/users"] >= 5
    branch.publish(3, 14)
    branch.wait_compared(3)
    branch.users(0.95, (3, 0), 100, seed=2)
    branch.wait_last(GateVerdict.PROMOTE, 3)
    branch.users(0.0, (3, 3), 50, seed=3, baseline=0.0)
    rolled_back = branch.wait_last(GateVerdict.REJECT, 3)
    assert rolled_back.reason.startswith("rolled back to 0")
    assert branch.verdicts() == [
        ("admit", 0), ("canary", 1), ("reject", 1), ("canary", 2), ("canary", 2), ("reject", 2),
        ("canary", 3), ("canary", 3), ("promote", 3), ("roll_back", 0), ("reject", 3),
    ]  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
    log = (tmp_path / "gate-0.log").read_text()
    assert "Traceback" not in log and "WARNING tidemill.streams.gate.role: roll_back 0" in log


def test_a_gate_killed_in_a_comparison_decides_what_it_would_have_decided(branches, gate):
    """Two branches have the same users; the gate of one is a process that is killed during the comparison."""
    undisturbed, killed = branches(), branches()
    process = gate(killed)

    def half(branch: Branch) -> None:
        branch.publish(0, 12)
        branch.wait_last(GateVerdict.ADMIT, 0)
        branch.publish(1, 12)
        branch.wait_compared(1)
        branch.users(0.7, (1, 0), 8, seed=5)

    with kept(undisturbed):
        half(undisturbed)
        undisturbed.users(0.8, (1, 0), 60, seed=6)
        made = [undisturbed.wait_last(GateVerdict.PROMOTE, 1)]
    half(killed)
    process.kill()
    process.wait()
    killed.users(0.8, (1, 0), 60, seed=6)
    process = gate(killed)
    made.append(killed.wait_last(GateVerdict.PROMOTE, 1))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    for branch in (undisturbed, killed):
        assert [verdict for verdict, _ in branch.verdicts()] == ["admit", "canary", "canary", "promote"]
    evidence = [{k: v for k, v in d.numbers.items() if k not in (GENERATION, "seconds_in_stage")} for d in made]
    assert evidence[0] == evidence[1] and made[0].reason == made[1].reason


def test_a_persons_decision_overrides_the_gate(branch, tmp_path):
    log = WeightLog(branch.kafka, branch.run, tmp_path / "store")
    log.grow(1)
    with kept(branch):
        branch.producer.send_acked(Topic.GROUPS, [("g", bench(0, 12, run=branch.run))])
        branch.wait_last(GateVerdict.ADMIT, 0)
        log.grow(2)
        branch.producer.send_acked(Topic.GROUPS, [("g", bench(1, 12, run=branch.run))])
        branch.wait_compared(1)
        held = ask(branch, "hold", "v0", "--reason", "a launch", "--by", "ada", "--json")
        assert held.exit_code == 0 and json.loads(held.stdout)["decision"]["verdict"] == "hold"
        branch.users(0.0, (1, 0), 60, seed=1)
        shown = ask(branch, "status", "--json")
        found = json.loads(shown.stdout)
        assert (found["stage"], found["held_by"]["decided_by"], found["promoted"], found["head"]) == (
            "held",
            "ada",
            0,
            1,
        )
        assert "held by ada (hold 0): a launch" in ask(branch, "status").stdout
        assert ask(branch, "veto", 1, "--reason", "it flatters", "--by", "ada").exit_code == 0
        again = ask(branch, "veto", 1)
        assert isinstance(again.exception, VersionError) and "rejected by ada: it flatters" in str(again.exception)
        assert ask(branch, "release", "--by", "ada").exit_code == 0
        log.grow(3)
        branch.producer.send_acked(Topic.GROUPS, [("g", bench(2, 12, run=branch.run))])
        branch.wait_compared(2)
        branch.users(1.0, (2, 0), 60, seed=2)
        branch.wait_last(GateVerdict.PROMOTE, 2)
        assert ask(branch, "rollback", 0, "--reason", "2 repeats itself").exit_code == 0
        assert [verdict for verdict, _ in branch.verdicts()] == [
            "admit", "canary", "canary", "hold", "reject", "release", "canary", "canary", "promote", "roll_back",
        ]  # fmt: skip
    assert json.loads(ask(branch, "status", "--json").stdout)["promoted"] == 0
    served = ask(branch, "status").stdout
    assert "version 0 is served" in served and "held by" in served


def test_text_of_the_log_does_not_control_the_terminal(capsys):
    held = build(GateDecision, decided_by="ada", verdict=GateVerdict.HOLD, reason="a launch\x1b[2J")
    texts = {"run_id": "r", "branch": "main", "stage": "held", "held_by": held, "serving": {"replica\x1b[2J": 3}}
    numbers = {"at": 0, "candidate": None, "promoted": 3, "head": 3, "admitted": True, "watched": None, "numbers": {}}
    print_status(Snapshot(**texts, **numbers, decisions=[]))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"replica\x1b[2J serves 3" in shown and r"a launch\x1b[2J" in shown


def test_a_branch_without_versions_has_no_state(branch):
    for form in ((), ("--json",), ("--csv",)):
        absent = ask(branch, "status", *form)
        assert isinstance(absent.exception, VersionError) and "has no version on branch main" in str(absent.exception)


def test_the_older_of_two_gates_stops(branch):
    ended: list[Exception] = []
    stop = threading.Event()

    def keep() -> None:
        try:
            run(branch.kafka, branch.run, GateSettings(**SETTINGS), stop)
        except RuntimeError as error:
            ended.append(error)

    first = threading.Thread(target=keep)
    first.start()
    branch.publish(0, 12)
    branch.wait_last(GateVerdict.ADMIT, 0)
    second = threading.Thread(target=keep)
    second.start()
    try:
        deadline, version = time.monotonic() + DEADLINE_S, 0
        while not ended:
            version += 1
            branch.publish(version, 0)
            # The newer gate may repeat a decision of the older gate about an older version.
            branch.wait(lambda made, version=version: any(decision.version == version for decision in made))
            assert time.monotonic() < deadline
        assert "another gate decides" in str(ended[0]) and "this one stops" in str(ended[0])
        first.join(DEADLINE_S)
        assert not first.is_alive() and second.is_alive() and len(ended) == 1
    finally:
        stop.set()
        first.join(DEADLINE_S)
        second.join(DEADLINE_S)


def test_unreadable_records_are_skipped(branch, topics):
    outcomes = Names(topics.topic_prefix).of(Topic.OUTCOMES)
    branch.producer.send_bytes(outcomes, b"no record", key=b"k")
    branch.producer.send_bytes(outcomes, None, key=b"erased")
    branch.producer.flush()
    with kept(branch):
        branch.publish(0, 12)
        branch.wait_last(GateVerdict.ADMIT, 0)
        branch.producer.send_bytes(outcomes, b"no record", key=b"k")
        branch.producer.flush()
        branch.publish(1, 0)
        branch.wait_last(GateVerdict.REJECT, 1)


def test_bad_input_is_answered(branch, topics):
    assert "no version" in str(ask(branch, "hold", "soon").exception)
    assert "has no version" in str(ask(branch, "veto", 3).exception)
    result = CliRunner().invoke(app, ["gate", "status", "--bootstrap", topics.bootstrap, "--set", "gate.share=2"])
    assert "gate.share" in str(result.exception)
