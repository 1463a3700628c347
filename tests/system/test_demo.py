"""The whole loop from one command: real Kafka, real vLLM, every role in its own process.

The tests check one short demonstration in which every role is killed once: its summary, its sockets while it runs, its
tables, and its processes after the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from demonstration import (
    ABOUT_USERS,
    DEADLINE_S,
    GROUP_SIZE,
    GROUPS,
    SMALL,
    STEPS,
    TIMEOUT_S,
    Finished,
    belonging_to,
    demo_command,
    descendants,
    role_of,
)

from tests.waiting import until
from tidemill.consumers.sink.query import named_queries, parameters_of, sql_of

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def finished(finished: Finished) -> Iterator[Finished]:
    with finished.open_tables():
        yield finished


def test_the_summary_contains_what_scripts_need(finished: Finished):
    summary = finished.summary
    assert summary["versions"] == STEPS
    assert summary["fingerprints_equal"] is True
    assert summary["refusals"] == 0
    assert summary["audit_sound"] is True and summary["audit"].startswith("sound, ")
    assert 0 <= summary["max_policy_lag"] <= summary["policy_lag_bound"]
    assert summary["groups"] >= STEPS * GROUPS and summary["rollouts_trained"] == STEPS * GROUPS * GROUP_SIZE
    assert 0.0 <= summary["held_out_before"] <= 1.0 and summary["held_out_rollouts"] == 8 * 4
    assert 0 < summary["pause_ms"]["p50"] <= summary["pause_ms"]["p95"]
    assert 0 < summary["step_to_served_s"]["p50"] <= summary["step_to_served_s"]["p95"]
    assert summary["learning_rate"] > 0 and 0 < summary["delta_density"]["p50"] <= 1


def test_every_role_is_a_separate_process_and_is_restarted_when_killed(finished: Finished):
    assert finished.killed == {"sink", "view", "train", "serve", "stream", "rollout", "feed"} <= finished.commands
    assert finished.said.count("was killed by SIGKILL: it is started again in 1 s") >= len(finished.killed)


def test_roles_connect_only_to_the_broker_the_replicas_and_the_sink(finished: Finished):
    """The page asks the sink for its numbers."""
    seen, foreign = finished.connected("serve", "sink")
    assert seen and not foreign


def test_every_rollout_has_one_ending_and_no_held_out_task_was_trained(finished: Finished):
    rows = finished.rows("accounting")
    assert sum(row["rollouts"] for row in rows if row["ending"] == "trained") == finished.summary["rollouts_trained"]
    assert sum(row["trained_twice"] + row["held_out_trained"] for row in rows) == 0
    assert not [row for row in rows if row["ending"] == "more than one ending"]
    trained = "SELECT payload FROM tasks WHERE mode = 'train'"
    shared = f"SELECT count() AS n FROM tasks WHERE mode = 'eval' AND payload IN ({trained})"
    assert finished.rows(shared) == [{"n": 0}]


def test_the_tables_contain_the_records_of_the_topics(finished: Finished):
    (steps,) = finished.rows("SELECT count() AS n, max(version) AS newest FROM train_steps")
    assert steps == {"n": STEPS, "newest": STEPS}
    # A worker that was killed may have written a rollout again, at another offset.
    (rollouts,) = finished.rows("SELECT count() AS n, countDistinct(_partition, _offset) AS places FROM rollouts")
    assert rollouts["n"] == rollouts["places"] >= finished.summary["rollouts_trained"]


@pytest.mark.parametrize("name", sorted(named_queries().keys() - ABOUT_USERS))
def test_the_named_queries_answer(finished: Finished, name: str):
    rows = finished.rows(name)
    # Some queries have no rows in a sound run; those with parameters may need the name of a record, not given here.
    quiet = ("failures", "log_gaps", "log_dead_letters", "log_results", "refusals")
    assert rows or name in quiet or parameters_of(sql_of(name))


def test_sampled_tokens_agree_with_the_trainer_at_the_same_version(finished: Finished):
    assert finished.sampled_and_trained_alike()


def test_nothing_is_left_running(finished: Finished):
    assert finished.processes_left == []


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demonstration_that_is_ended_early_leaves_nothing_running(tmp_path: Path, sent: signal.Signals, status: int):
    with (tmp_path / "demo.log").open("wb") as stream:
        process = subprocess.Popen(demo_command(tmp_path, SMALL), stdout=stream, stderr=stream)
    until(lambda: len({role_of(p) for p in descendants(process.pid)} - {""}) >= 1, "a role", DEADLINE_S)
    # A process that was just forked has the command of its parent until it runs its own.
    until(lambda: len(belonging_to(tmp_path)) >= 4, "the demonstration, its guard, a broker and a role", DEADLINE_S)
    process.send_signal(sent)
    assert process.wait(DEADLINE_S) == status
    assert ("stopping the roles" in (tmp_path / "demo.log").read_text()) == (sent is signal.SIGINT)
    until(lambda: not belonging_to(tmp_path), lambda: belonging_to(tmp_path), DEADLINE_S)


def test_without_java_or_maven_the_choices_are_named_at_once(tmp_path: Path):
    environment = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": ""}
    environment.pop("TIDEMILL_KAFKA__BOOTSTRAP", None)
    command = demo_command(tmp_path / "data", SMALL)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    for choice in ("--bootstrap", "docker compose", "nstall"):
        assert choice in done.stderr
    assert not (tmp_path / "data").exists()
