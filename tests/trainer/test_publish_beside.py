"""Versions published during the next step: the weights stay the same, and the order of records survives a stop."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.trainer.conftest import settings_of
from tests.trainer.run_log import run_of, write_groups, written
from tidemill.kernels.weights.commit import VersionLog
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.records import Manifest, StepPlan, TrainStep
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.run import run
from tidemill.trainer.step import Learner

STEPS = 4
CHECKPOINT_EVERY = 2
RUNS = ("waiting", "beside", "failing", "scarce")
SCARCE = 3
"""Number of steps for which the run `scarce` has groups."""


@pytest.fixture
def log(kafka) -> KafkaSettings:
    """Groups for every run, two per step, in one partition so that all runs read them in the same order."""
    settings = kafka.fresh(1)
    write_groups(settings, range(2 * SCARCE), RUNS, size=2)
    write_groups(settings, range(2 * SCARCE, 2 * STEPS), RUNS[:-1], size=2)
    return settings


@pytest.fixture
def train(log, tiny_checkpoint, tmp_path) -> Callable[..., None]:
    """Return a function that trains a run up to a step."""
    settings = settings_of(model=tiny_checkpoint, checkpoint_every=CHECKPOINT_EVERY, publish=PublishSettings(skips=()))

    def train(run_id: str, *, beside: bool = True, steps: int = STEPS) -> None:
        changed = settings.model_copy(update={"publish_beside": beside})
        run(log, run_of(run_id, steps), StoreSettings(root=str(tmp_path)), changed, threading.Event())

    return train


def names(step: TrainStep) -> list[str]:
    return [entry.group_id for entry in step.inputs]


class Lost(Exception):
    """Simulates that the log refuses a manifest."""


def lost_after(monkeypatch, version: int, until: Callable[[], bool]) -> None:
    """Let the manifest of `version` fail as soon as `until` returns true."""
    write = VersionLog.write

    def late(self, mark, *others):
        if mark.version != version:
            return write(self, mark, *others)
        deadline = time.monotonic() + 120
        while not until() and time.monotonic() < deadline:
            time.sleep(0.02)
        raise Lost

    monkeypatch.setattr(VersionLog, "write", late)


def test_the_records_equal_those_of_a_trainer_that_waits(log, train, monkeypatch) -> None:
    """Each manifest is delayed until the next step is computed, which would block a trainer that waits. Every second
    version has a checkpoint, and checkpoints wait for the manifest."""
    train("waiting", beside=False)
    computed, recorded, write, learn = [], {}, VersionLog.write, Learner.train

    def learnt(self, groups, step, *others):
        made = learn(self, groups, step, *others)
        computed.append(step)
        return made

    def late(self, mark, *others):
        deadline = time.monotonic() + 120
        while mark.version % CHECKPOINT_EVERY and mark.version + 1 not in computed:
            assert time.monotonic() < deadline, f"step {mark.version + 1} waits for version {mark.version}"
            time.sleep(0.02)
        recorded[mark.version] = [step.step for step in written(log, TrainStep, "beside")]
        return write(self, mark, *others)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "train", learnt)
        patched.setattr(VersionLog, "write", late)
        train("beside")
    assert recorded == {v: list(range(1, v + 1)) for v in range(STEPS + 1)}, "no step is recorded before its parent"
    waiting, beside = (written(log, TrainStep, name) for name in ("waiting", "beside"))
    for one, other in zip(waiting, beside, strict=True):
        assert (one.fingerprint, one.parent_version, one.lag) == (other.fingerprint, other.parent_version, other.lag)
        assert one.metrics["loss"] == other.metrics["loss"]
        assert one.metrics["publish/loop_seconds"] == one.metrics["publish/seconds"] > 0
    versions = [
        [(m.version, m.parent, m.fingerprint) for m in written(log, Manifest, name)] for name in ("waiting", "beside")
    ]
    assert versions[0] == versions[1] and len(versions[0]) == STEPS + 1
    held_back = [step.metrics for step in beside if step.parent_version % CHECKPOINT_EVERY]
    assert len(held_back) == 2
    assert all(cost["publish/loop_seconds"] < cost["publish/seconds"] for cost in held_back)


def test_a_version_that_is_not_published_ends_the_run_before_the_next_record(log, train, monkeypatch) -> None:
    """The next step is already planned. After a restart, the run equals that of a trainer that was never stopped."""
    train("waiting", beside=False)
    with monkeypatch.context() as patched:
        lost_after(patched, 3, lambda: len(written(log, StepPlan, "failing")) == 4)
        with pytest.raises(Lost):
            train("failing")
    assert [s.step for s in written(log, TrainStep, "failing")] == [1, 2, 3]
    assert [m.version for m in written(log, Manifest, "failing")] == [0, 1, 2]
    train("failing")
    steps = [written(log, TrainStep, name) for name in ("waiting", "failing")]
    assert [s.fingerprint for s in steps[0]] == [s.fingerprint for s in steps[1]]
    assert [names(s) for s in steps[0]] == [names(s) for s in steps[1]]
    assert [p.step for p in written(log, StepPlan, "failing")] == list(range(1, STEPS + 1))
    assert [m.version for m in written(log, Manifest, "failing")] == list(range(STEPS + 1))


@pytest.mark.parametrize(("version", "checkpoints"), [(2, []), (SCARCE, [2])])
def test_a_lost_manifest_ends_a_saving_or_waiting_run(log, train, monkeypatch, tmp_path, version, checkpoints) -> None:
    """A run resumed from a checkpoint would not publish its version, so an unpublished version has no checkpoint."""
    lost_after(monkeypatch, version, lambda: True)
    with pytest.raises(Lost):
        train("scarce")
    assert CheckpointStore(str(tmp_path), "scarce", "main", 9).steps() == checkpoints
