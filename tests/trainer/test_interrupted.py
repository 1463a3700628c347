"""The trainer process is killed at each point of a step, or halted while another one takes over.

A control run trains the same groups without interruption. The interrupted runs have the same steps, versions and policy
lags, bit for bit.
"""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.trainer import interrupted_trainer
from tests.trainer.conftest import make_rollout, settings_of
from tests.trainer.run_log import run_of, write_group, written
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Manifest, Mismatch, Staleness, StepPlan, TrainStep
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.run import run
from tidemill.trainer.session import step_seed

STEPS = 6
GROUPS_PER_STEP = 2
RUNS = ("undisturbed", "killed", "halted")


@pytest.fixture(scope="module")
def settings(tiny_checkpoint) -> TrainerSettings:
    kl, publish = KlSettings(coefficient=0.01), PublishSettings(anchor_every=3, skips=())
    return settings_of(model=tiny_checkpoint, kl=kl, checkpoint_every=2, publish=publish)


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Groups for every run, in one partition so that all runs read them in the same order; some cannot be trained."""
    settings = kafka.fresh(1)
    producer = RecordProducer(settings, "test")
    for number in range(STEPS * GROUPS_PER_STEP + 2):
        equal = number in (3, 8)
        rollouts = [make_rollout(f"g{number}", i, 0.5 if equal else float(i % 2)) for i in range(4)]
        write_group(producer, rollouts, RUNS, closed_at=number)
    return settings


@pytest.fixture(scope="module")
def undisturbed(log, settings, tmp_path_factory) -> list[TrainStep]:
    store = StoreSettings(root=str(tmp_path_factory.mktemp("store")))
    run(log, run_of("undisturbed", STEPS), store, settings, threading.Event())
    return written(log, TrainStep, "undisturbed")


KILLS = [
    ["kill", "before_plan", 1],
    ["kill", "after_plan", 1],
    ["kill", "after_compute", 2],
    ["kill", "after_record", 3],
    ["kill", "before_manifest", 4],
    ["kill", "within_checkpoint", STEPS],
]
HALTS = [
    ["stop", "after_compute", 2],
    ["kill", "before_manifest", 4],
    ["continue"],
    ["stop", "before_manifest", 5],
    ["run"],
    ["continue"],
]


def job(log: KafkaSettings, settings: TrainerSettings, directory: Path, actions: list[list]) -> dict:
    """Return the job with the actions on the run whose name is that of `directory`."""
    config = directory / "tidemill.toml"
    config.write_text(
        f"""
        store.root = "{directory / "store"}"
        run = {{ seed = 7, groups_per_step = {GROUPS_PER_STEP}, max_policy_lag = 10, max_steps = {STEPS} }}
        [trainer]
        row_tokens = 128
        checkpoint_every = 2
        kl.coefficient = 0.01
        optimizer.learning_rate = 1e-3
        publish = {{ anchor_every = 3, skips = [] }}
        """
    )
    arguments = ["--config", str(config), "--bootstrap", log.bootstrap, "--topic-prefix", log.topic_prefix]
    arguments += ["--run-id", directory.name, "--model", settings.model]
    return {"arguments": arguments, "actions": actions, "logs": str(directory)}


@dataclass(frozen=True)
class Interrupted:
    """Two runs whose trainers were interrupted."""

    killed: list[str | int]
    halted: list[str | int]
    logs: dict[str, str]
    """The output of each trainer, by run and action."""


@pytest.fixture(scope="module")
def interrupted(log, settings, tmp_path_factory) -> Interrupted:
    """Both runs; their trainers are forked from one process, so that the libraries are loaded once."""
    root = tmp_path_factory.mktemp("interrupted")
    jobs = []
    for name, actions in (("killed", [*KILLS, ["run"]]), ("halted", HALTS)):
        (root / name).mkdir()
        jobs.append(job(log, settings, root / name, actions))
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, interrupted_trainer.__file__, str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    logs = {f"{path.parent.name}/{path.stem}": path.read_text() for path in sorted(root.glob("*/*.log"))}
    assert done.returncode == 0, done.stderr + "\n".join(logs.values())
    killed, halted = (json.loads(line) for line in done.stdout.splitlines())
    return Interrupted(killed, halted, logs)


def essence(steps: list[TrainStep]) -> list[tuple]:
    """Return the fields of the steps that must not depend on stops."""
    return [
        (
            step.step, step.parent_version, [entry.group_id for entry in step.inputs],
            [(entry.group_id, entry.reason) for entry in step.exclusions], step.seed, step.lag, step.rollouts,
            step.tokens, step.metrics["policy_lag_bound"], step.metrics["loss"], step.fingerprint,
            step.parent_fingerprint,
        )
        for step in steps
    ]  # fmt: skip


def check_run(log: KafkaSettings, run_id: str, undisturbed: list[TrainStep]) -> list[TrainStep]:
    steps = written(log, TrainStep, run_id)
    assert essence(steps) == essence(undisturbed)
    assert len({step.fingerprint for step in steps}) == STEPS
    trained = [entry.group_id for step in steps for entry in step.inputs]
    excluded = [entry.group_id for step in steps for entry in step.exclusions]
    assert sorted(trained + excluded) == sorted(f"g{n}" for n in range(STEPS * GROUPS_PER_STEP + 2))
    for before, after in pairwise(steps):
        assert after.parent_fingerprint == before.fingerprint
    manifests = written(log, Manifest, run_id)
    assert [m.version for m in manifests] == list(range(STEPS + 1)), "each version once"
    assert [m.fingerprint for m in manifests[1:]] == [step.fingerprint for step in undisturbed]
    (incarnation,) = {m.incarnation for m in manifests}
    assert incarnation
    assert {step.incarnation for step in steps} == {incarnation}
    return steps


def test_each_step_has_its_seed_its_staleness_and_its_mismatch(log, undisturbed, interrupted) -> None:
    assert [s.seed for s in undisturbed] == [step_seed(7, s.step) for s in undisturbed]
    assert [s.parent_version for s in undisturbed] == [s.step - 1 for s in undisturbed]
    staleness = written(log, Staleness, "undisturbed")
    assert {(s.step, s.replica_id) for s in staleness} == {
        (step, f"replica-{i}") for step in range(1, STEPS + 1) for i in range(2)
    }
    for step in undisturbed:
        assert sum(c.tokens for s in staleness if s.step == step.step for c in s.lag) == step.tokens
        assert step.lag[0].lag == step.parent_version
    # All tokens are of version 0: only the first step has tokens of its own weights. Here, each step has one record.
    apart = written(log, Mismatch, "undisturbed")
    assert [(m.step, m.version, m.tokens) for m in apart] == [(s.step, s.parent_version, s.tokens) for s in undisturbed]
    parts = [{each.part for each in m.slices} for m in apart]
    assert parts == [{"all", "engines"}, *[{"all", "lagged"}] * (STEPS - 1)]
    recorded = [s.metrics["mismatch/k3"] for s in undisturbed]
    assert [m.slices[0].k3 for m in apart] == pytest.approx(recorded, rel=1e-4)
    # In the interrupted run, a repeated step writes its record again, with the same contents.
    again = written(log, Mismatch, "killed")
    assert {m.step for m in again} == {m.step for m in apart}
    for m in again:
        assert (m.slices, m.worst) == (apart[m.step - 1].slices, apart[m.step - 1].worst)


def test_a_kill_at_any_point_of_a_step_loses_repeats_and_changes_nothing(log, undisturbed, interrupted) -> None:
    assert interrupted.killed == ["killed"] * len(KILLS) + [0], interrupted.logs
    steps = check_run(log, "killed", undisturbed)
    plans = written(log, StepPlan, "killed")
    assert [plan.step for plan in plans] == list(range(1, STEPS + 1)), "a step that was begun is not begun anew"
    assert [plan.inputs for plan in plans] == [step.inputs for step in steps]
    assert len({plan.trainer for plan in plans}) > 1


def test_a_halted_trainer_that_was_replaced_exits_with_the_reason(log, undisturbed, interrupted) -> None:
    """Halted after the step is computed, or after the chunks are sent: neither step nor manifest is written."""
    assert interrupted.halted == ["stopped", "killed", 1, "stopped", 0, 1], interrupted.logs
    check_run(log, "halted", undisturbed)
    name = f"{log.topic_prefix}tidemill-trainer.halted"
    for ended in ("0-stop-after_compute-2", "3-stop-before_manifest-5"):
        # A line of the Kafka client may follow.
        said = interrupted.logs[f"halted/{ended}"].splitlines()[-5:]
        shut_out = f"another process has begun to write as {name}, so this process can write nothing more"
        assert any(line.startswith(f"tidemill: {shut_out}") for line in said), said
