"""The trainer role on two ranks with a log: recorded, published, proved, killed and continued."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.trainer import rank_driver
from tests.trainer.families import make_model
from tests.trainer.run_log import run_of, write_groups, written
from tests.waiting import until
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.commit import read_versions
from tidemill.kernels.weights.rebuild import rebuild
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.records import TrainStep
from tidemill.trainer.choices import StepMachine
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import NotRepeatableError
from tidemill.trainer.replay.steps import StepReplay

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1200
"""For the trainers that torchrun starts, and again for all others: on a busy machine the ranks wait long for others."""
pytestmark = pytest.mark.timeout(3 * LIMIT_S)
STEPS = 4
TRAINER = {
    "kl": {"coefficient": 0.01}, "optimizer": {"learning_rate": 1e-3}, "row_tokens": 128, "checkpoint_every": 2,
    "publish": {"anchor_every": 3, "skips": []}, "device": "cpu", "ranks_timeout_s": 60,
}  # fmt: skip
EXPERTS = {"experts": "grouped_mm", "expert_parallel": 2}
RUNS = ("alone", "torchrun", "killed", "experts", "killed-experts")


@dataclass(frozen=True)
class Log:
    """A log with several runs that trained on the same groups."""

    kafka: KafkaSettings
    root: Path
    model: str
    experts: str

    @property
    def store(self) -> StoreSettings:
        return StoreSettings(root=str(self.root / "store"))

    def trainer(self, run: str) -> dict:
        """Return the trainer's settings of a run."""
        return TRAINER | ({"model": self.experts, **EXPERTS} if "experts" in run else {"model": self.model})

    @property
    def settings(self) -> TrainerSettings:
        return TrainerSettings(**self.trainer("torchrun"))

    def steps(self, name: str) -> list[TrainStep]:
        return written(self.kafka, TrainStep, name)

    def job(self, name: str, run: str, ranks: int, max_steps: int = STEPS, **options: object) -> dict:
        told = {
            "kafka": self.kafka.model_dump(mode="json"), "run": run_of(run, max_steps).model_dump(mode="json"),
            "store": self.store.root, "trainer": self.trainer(run),
        }  # fmt: skip
        return {"name": name, "ranks": ranks, "scenario": "role", "options": told | options}


@pytest.fixture(scope="module")
def log(kafka, tiny_checkpoint, tmp_path_factory) -> Log:
    root = tmp_path_factory.mktemp("ranks_log")
    settings = kafka.fresh(1)
    write_groups(settings, range(2 * STEPS + 2), RUNS)
    make_model("Qwen3Moe").to(torch.bfloat16).save_pretrained(root / "experts")
    made = Log(settings, root, tiny_checkpoint, str(root / "experts"))
    run_and_stop(made, "torchrun")
    jobs = [
        made.job("alone", "alone", 1),
        made.job("killed", "killed", 2, kill=["1", 3], answers_s=0.2),
        made.job("continued", "killed", 2),
        made.job("replayed", "killed", 2, steps=[2, 4]) | {"scenario": "replayed"},
        made.job("then alone", "killed", 1, STEPS + 1),
        made.job("experts", "experts", 2),
        made.job("killed-experts", "killed-experts", 2, kill=["1", 3], answers_s=0.2),
        made.job("continued-experts", "killed-experts", 2),
        made.job("replayed-experts", "killed-experts", 2, steps=[2, 4]) | {"scenario": "replayed"},
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", rank_driver.__name__, str(root / "jobs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    print("\n".join(f"{path.stem}:\n{path.read_text()}" for path in sorted(root.glob("*-?.log"))))
    return made


def run_and_stop(log: Log, run: str) -> None:
    """Train with torchrun until no group is left, then request a stop."""
    with (log.root / f"{run}.log").open("w") as output:
        process = subprocess.Popen(torchrun(log, run), cwd=ROOT, stdout=output, stderr=output)
        try:
            until(lambda: len(log.steps(run)) > STEPS or process.poll() is not None, "steps", LIMIT_S, pause_s=0.5)
            process.send_signal(signal.SIGTERM)
            process.wait(180)
        finally:
            process.kill()
    print((log.root / f"{run}.log").read_text())


def torchrun(log: Log, run: str) -> list[str]:
    """Return the documented command for two ranks, without a limit on steps."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tidemill"]
    told = {"run_id": run, "max_steps": 1000, "bootstrap": log.kafka.bootstrap}
    sets = {
        "kafka.topic_prefix": log.kafka.topic_prefix, "kafka.partitions": 1, "store.root": log.store.root,
        "run.seed": 7, "run.groups_per_step": 2, "run.max_policy_lag": 10,
        **{f"trainer.{k}": json.dumps(v) if isinstance(v, dict) else v for k, v in log.trainer(run).items()},
    }  # fmt: skip
    flags = [text for key, value in told.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return [*start, "train", *flags, *(text for key, value in sets.items() for text in ("--set", f"{key}={value}"))]


def ended(log: Log, name: str) -> list[int]:
    return json.loads((log.root / f"{name}.json").read_text())


@pytest.mark.parametrize("runs", [("torchrun", "killed"), ("experts", "killed-experts")], ids=["dense", "experts"])
def test_two_runs_of_two_ranks_are_bit_equal(log, runs):
    """In the second run of each pair, a rank was killed during step 3 and all ranks were started again."""
    whole, killed = (log.steps(name)[:STEPS] for name in runs)
    assert [step.step for step in whole] == list(range(1, STEPS + 1))
    assert [step.fingerprint for step in whole] == [step.fingerprint for step in killed]
    assert [step.metrics["loss"] for step in whole] == [step.metrics["loss"] for step in killed]
    assert [i.group_id for step in killed for i in step.inputs] == [f"g{n}" for n in range(2 * STEPS)]


@pytest.mark.parametrize("name", ["killed", "killed-experts"])
def test_a_killed_rank_ends_the_job_and_is_named(log, name):
    first, killed = ended(log, name)
    assert (first, killed) == (1, -9)
    assert "RanksLostError: rank 1 is gone or hangs" in (log.root / f"{name}-0.log").read_text()
    assert ended(log, name.replace("killed", "continued")) == [0, 0]


def test_ranks_that_are_asked_to_stop_leave_a_checkpoint(log):
    """A checkpoint of the last step, in addition to those of every second step."""
    folder = log.root / "store/torchrun/checkpoints/main"
    names = {path.name for path in folder.iterdir()}
    assert {f"step-{STEPS + 1:08d}.safetensors", f"step-{STEPS + 1:08d}.rank-1-of-2.safetensors"} <= names
    assert not any(name.endswith(".partial") for name in names)


def test_ranks_and_one_process_train_the_same(log):
    alone, two = log.steps("alone"), log.steps("torchrun")[:STEPS]
    for here, there in zip(alone, two, strict=True):
        assert [i.group_id for i in here.inputs] == [i.group_id for i in there.inputs]
        assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], rel=1e-3)
        assert here.config_hash != there.config_hash
    assert {step.config_hash for step in two} == {log.settings.arithmetic_hash(StepMachine(ranks=2))}


def test_a_run_continues_with_another_number_of_ranks(log):
    """One process continues from the checkpoint of two ranks."""
    assert ended(log, "then alone") == [0]
    last = log.steps("killed")[-1]
    assert (last.step, last.config_hash) == (STEPS + 1, log.settings.arithmetic_hash())


@pytest.mark.parametrize("name", RUNS)
def test_every_version_has_the_weights_of_its_step(log, name):
    """A version that is rebuilt from the log has the fingerprint in the manifest, which equals the recorded one."""
    graph = read_versions(log.kafka, run_of(name, STEPS))
    steps = {step.version: step.fingerprint for step in log.steps(name)}
    assert {version: m.fingerprint for version, m in graph.manifests.items() if version} == steps
    newest = graph.newest
    assert newest is not None
    held = rebuild(log.kafka, graph.path(newest.version), with_tensors(newest).tensors)
    assert sum((fingerprint for _, fingerprint in held.infos.values()), ZERO).hex() == newest.fingerprint


@pytest.mark.parametrize("name", ["replayed", "replayed-experts"])
def test_steps_of_two_ranks_are_repeated_by_two_ranks(log, name):
    assert json.loads((log.root / f"{name}-0.json").read_text()) == {"same": [True, True, True]}


def test_steps_of_two_ranks_are_not_repeated_by_one_process(log):
    message = "step 1 was trained by 2 ranks on a CPU in float32, now by one process on a CPU in float32: give the"
    with StepReplay(log.kafka, run_of("torchrun", STEPS), log.store, log.settings) as replay:  # noqa: SIM117
        with pytest.raises(NotRepeatableError, match=message):
            list(replay.run(1, 1))
