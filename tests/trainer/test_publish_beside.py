"""Versions published during the next step: the weights stay the same, and the order of records survives a stop."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.conftest import settings_of
from tests.trainer.run_log import run_of, write_groups, written
from tests.waiting import until
from tidemill.kernels.weights.commit import VersionLog
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.records import Manifest, StepPlan, TrainStep
from tidemill.trainer import trained_weights
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.run import run
from tidemill.trainer.step import Learner

STEPS = 4
CHECKPOINT_EVERY = 2
RUNS = ("waiting", "beside", "failing", "scarce-2", "scarce-3")
SCARCE = 3
"""Number of steps for which the runs `scarce` have groups."""


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Groups for every run, two per step, in one partition so that all runs read them in the same order."""
    settings = kafka.fresh(1)
    write_groups(settings, range(2 * SCARCE), RUNS, size=2)
    write_groups(settings, range(2 * SCARCE, 2 * STEPS), RUNS[:-2], size=2)
    return settings


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The directory of the runs' checkpoints."""
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def train(log, root, tiny_checkpoint) -> Callable[..., None]:
    """Return a function that trains a run to its last step."""
    settings = settings_of(model=tiny_checkpoint, checkpoint_every=CHECKPOINT_EVERY, publish=PublishSettings(skips=()))

    def train(run_id: str, *, beside: bool = True) -> None:
        changed = settings.model_copy(update={"publish_beside": beside})
        run(log, run_of(run_id, STEPS), StoreSettings(root=str(root)), changed, threading.Event())

    return train


@pytest.fixture(scope="module")
def waiting(log, train) -> list[TrainStep]:
    """The steps of a trainer that waits for each publication."""
    train("waiting", beside=False)
    return written(log, TrainStep, "waiting")


def names(step: TrainStep) -> list[str]:
    return [entry.group_id for entry in step.inputs]


class Lost(Exception):
    """Simulates that the log refuses a manifest."""


def lost_after(monkeypatch, version: int, condition: Callable[[], bool]) -> None:
    """Let the manifest of `version` fail as soon as a condition is true."""
    write = VersionLog.write

    def late(self, mark, *others):
        if mark.version != version:
            return write(self, mark, *others)
        until(condition, "the plan of the next step")
        raise Lost

    monkeypatch.setattr(VersionLog, "write", late)


def test_the_records_equal_those_of_a_trainer_that_waits(log, train, waiting, monkeypatch) -> None:
    """Each manifest is delayed until the next step is computed, which would block a trainer that waits. Every second
    version has a checkpoint, and checkpoints wait for the manifest. Costs are measured with a clock that moves only
    when a step is computed."""
    computed, writing, recorded, write, learn = [], [], {}, VersionLog.write, Learner.train

    def learnt(self, groups, step, *others):
        if (step - 1) % CHECKPOINT_EVERY:
            until(lambda: step - 1 in writing, f"version {step - 1} is being published")
        made = learn(self, groups, step, *others)
        computed.append(step)
        return made

    def late(self, mark, *others):
        writing.append(mark.version)
        if mark.version % CHECKPOINT_EVERY:
            until(lambda: mark.version + 1 in computed, f"step {mark.version + 1} waits for version {mark.version}")
        recorded[mark.version] = [step.step for step in written(log, TrainStep, "beside")]
        return write(self, mark, *others)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "train", learnt)
        patched.setattr(VersionLog, "write", late)
        patched.setattr(trained_weights, "time", SimpleNamespace(monotonic=lambda: float(len(computed))))
        train("beside")
    assert recorded == {v: list(range(1, v + 1)) for v in range(STEPS + 1)}, "no step is recorded before its parent"
    beside = written(log, TrainStep, "beside")
    for one, other in zip(waiting, beside, strict=True):
        assert (one.fingerprint, one.parent_version, one.lag) == (other.fingerprint, other.parent_version, other.lag)
        assert one.metrics["loss"] == other.metrics["loss"]
        assert one.metrics["publish/loop_seconds"] == one.metrics["publish/seconds"] > 0
    versions = [
        [(m.version, m.parent, m.fingerprint) for m in written(log, Manifest, name)] for name in ("waiting", "beside")
    ]
    assert versions[0] == versions[1] and len(versions[0]) == STEPS + 1
    held_back = [step.metrics for step in beside if step.parent_version % CHECKPOINT_EVERY]
    assert [(cost["publish/seconds"], cost["publish/loop_seconds"]) for cost in held_back] == [(1.0, 0.0)] * 2


def test_a_version_that_is_not_published_ends_the_run_before_the_next_record(log, train, waiting, monkeypatch) -> None:
    """The next step is already planned. After a restart, the run equals that of a trainer that was never stopped."""
    with monkeypatch.context() as patched:
        lost_after(patched, 3, lambda: len(written(log, StepPlan, "failing")) == 4)
        with pytest.raises(Lost):
            train("failing")
    assert [s.step for s in written(log, TrainStep, "failing")] == [1, 2, 3]
    assert [m.version for m in written(log, Manifest, "failing")] == [0, 1, 2]
    train("failing")
    failing = written(log, TrainStep, "failing")
    assert [s.fingerprint for s in failing] == [s.fingerprint for s in waiting]
    assert [names(s) for s in failing] == [names(s) for s in waiting]
    assert [p.step for p in written(log, StepPlan, "failing")] == list(range(1, STEPS + 1))
    assert [m.version for m in written(log, Manifest, "failing")] == list(range(STEPS + 1))


@pytest.mark.parametrize(("version", "checkpoints"), [(2, []), (SCARCE, [2])])
def test_a_lost_manifest_ends_a_saving_or_waiting_run(train, root, monkeypatch, version, checkpoints) -> None:
    """A run resumed from a checkpoint would not publish its version, so an unpublished version has no checkpoint."""
    lost_after(monkeypatch, version, lambda: True)
    with pytest.raises(Lost):
        train(f"scarce-{version}")
    assert CheckpointStore(str(root), f"scarce-{version}", "main", 9).steps() == checkpoints
