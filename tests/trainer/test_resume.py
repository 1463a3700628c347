"""Resuming after a stop at any point: the same versions as an uninterrupted run, nothing trained twice or skipped."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.trainer.conftest import settings_of, tiny_model
from tests.trainer.run_log import run_of, write_groups, written
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.fenced_producer import FencedProducer
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Manifest, Mismatch, Staleness, TrainStep
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.checkpoint import CheckpointStore, TrainerCheckpointError
from tidemill.trainer.choices import ServingFormat
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.history import NotRepeatableError
from tidemill.trainer.log_input import LogInput
from tidemill.trainer.resume import open_session
from tidemill.trainer.run import commit_name, run
from tidemill.trainer.session import step_seed
from tidemill.trainer.trained_weights import TrainedWeights, make_learner

GROUPS = 10
STEPS = 5


@pytest.fixture
def log(kafka) -> KafkaSettings:
    """A log with ten groups, in one partition so that all runs read them in the same order."""
    settings = kafka.fresh(1)
    write_groups(settings, range(GROUPS), ("straight", "stopped"))
    return settings


@pytest.fixture
def settings(tiny_checkpoint: str) -> TrainerSettings:
    kl, publish = KlSettings(coefficient=0.01), PublishSettings(anchor_every=3)
    return settings_of(model=tiny_checkpoint, kl=kl, checkpoint_every=2, publish=publish)


@pytest.fixture
def store(tmp_path) -> StoreSettings:
    return StoreSettings(root=str(tmp_path / "store"))


class Crashed(Exception):
    """Simulates that the process is killed at this point."""


def train_until(log, settings, store, run_id: str, steps: int, checkpoints: bool = True) -> None:
    """Train `steps` more steps and abandon the session, as a kill would, without a last checkpoint."""
    asked = run_of(run_id, STEPS)
    held = CheckpointStore(store.root, run_id, asked.branch, settings.keep_checkpoints)
    producer = RecordProducer(log, "test")
    commits = FencedProducer(log, "test", commit_name(log, asked))
    publisher = WeightPublisher.open(log, asked, store, settings.publish, base_model=settings.model, manifests=commits)
    weights = TrainedWeights(settings, make_learner(settings), held, publisher)
    opened = open_session(log, asked, settings, producer, publisher, held, commits, weights)
    session, builder = opened.session, opened.builder
    with LogInput(log, settings, builder, producer, session.vocab_size) as source:
        for _ in range(steps):
            session.train(next_batch(session, builder, source))
            if checkpoints and session.place.step % settings.checkpoint_every == 0:
                session.checkpoint(builder.progress())


def next_batch(session, builder, source, polls: int = 600) -> StepBatch:
    for _ in range(polls):
        source.poll(0.1, session.place.version)
        batch = builder.close(session.place.version)
        if batch is not None:
            return batch
    raise AssertionError("no batch in time")


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(log, settings, store, monkeypatch) -> None:
    run(log, run_of("straight", STEPS), store, settings, threading.Event())

    train_until(log, settings, store, "stopped", 3)
    with monkeypatch.context() as patched:
        patched.setattr(WeightPublisher, "publish", crash_after_version_3(WeightPublisher.publish))
        with pytest.raises(Crashed):
            train_until(log, settings, store, "stopped", 1)
    assert len(written(log, TrainStep, "stopped")) == 4
    assert [m.version for m in written(log, Manifest, "stopped")] == [0, 1, 2, 3]
    run(log, run_of("stopped", STEPS), store, settings, threading.Event())

    straight = written(log, TrainStep, "straight")
    stopped = written(log, TrainStep, "stopped")
    assert [s.step for s in stopped] == list(range(1, STEPS + 1))
    assert [s.fingerprint for s in stopped] == [s.fingerprint for s in straight]
    assert len({s.fingerprint for s in straight}) == STEPS
    trained = [entry.group_id for step in stopped for entry in step.inputs]
    assert trained == [f"g{n}" for n in range(GROUPS)]
    versions = {m.version: m.fingerprint for m in written(log, Manifest, "stopped")}
    assert versions == {m.version: m.fingerprint for m in written(log, Manifest, "straight")}
    assert list(versions) == list(range(STEPS + 1))
    check_records(log, straight)


def crash_after_version_3(publish):
    """A kill between the record of step 4 and its manifest."""

    def patched(self, version, tensors, **options):
        if version > 3:
            raise Crashed
        return publish(self, version, tensors, **options)

    return patched


def check_records(log: KafkaSettings, straight: list[TrainStep]) -> None:
    for before, after in pairwise(straight):
        assert after.parent_fingerprint == before.fingerprint
        assert after.parent_version == before.version
    assert [s.seed for s in straight] == [step_seed(7, s.step) for s in straight]
    staleness = written(log, Staleness, "straight")
    assert {(s.step, s.replica_id) for s in staleness} == {
        (step, f"replica-{i}") for step in range(1, STEPS + 1) for i in range(2)
    }
    for step in straight:
        assert sum(c.tokens for s in staleness if s.step == step.step for c in s.lag) == step.tokens
        assert step.lag[0].lag == step.parent_version
    # All tokens are of version 0: only the first step has tokens of its own weights. Here, each step has one record.
    apart = written(log, Mismatch, "straight")
    assert [(m.step, m.version, m.tokens) for m in apart] == [(s.step, s.parent_version, s.tokens) for s in straight]
    parts = [{each.part for each in m.slices} for m in apart]
    assert parts == [{"all", "engines"}, *[{"all", "lagged"}] * (STEPS - 1)]
    whole = {m.step: m.slices[0] for m in apart}
    assert [whole[s.step].k3 for s in straight] == pytest.approx([s.metrics["mismatch/k3"] for s in straight], rel=1e-4)
    # In the stopped run, a repeated step writes its record again, with the same contents.
    for again in written(log, Mismatch, "stopped"):
        assert again.slices == apart[again.step - 1].slices and again.worst == apart[again.step - 1].worst
    assert {m.step for m in written(log, Mismatch, "stopped")} == set(whole)


def test_an_unrepeatable_step_is_refused_with_advice(log, settings, store) -> None:
    train_until(log, settings, store, "stopped", 1, checkpoints=False)
    changed = settings.model_copy(update={"length_divisor": 3.0})
    with pytest.raises(NotRepeatableError, match=r"other settings.*start once with the original settings"):
        train_until(log, changed, store, "stopped", 1)
    recorded = written(log, TrainStep, "stopped")[0]
    producer = RecordProducer(log, "test")
    producer.send_acked(Topic.STEPS, [("stopped", replace(recorded, step=3))])
    with pytest.raises(NotRepeatableError, match=r"\[1, 3\].*start a new run"):
        train_until(log, settings, store, "stopped", 1)


def test_a_run_keeps_its_serving_format(log, settings, store) -> None:
    changed = settings.model_copy(update={"serving_format": ServingFormat.NVFP4})
    train_until(log, settings, store, "stopped", 0)
    with pytest.raises(VersionError, match="version 0 of run stopped, branch main, is in the log with fingerprint"):
        train_until(log, changed, store, "stopped", 1)
    train_until(log, settings, store, "stopped", 2)
    with pytest.raises(TrainerCheckpointError, match=r"other settings.*start with the run's trainer\.serving_format"):
        train_until(log, changed, store, "stopped", 1)
    manifests = written(log, Manifest, "stopped")
    assert [(m.version, m.serving_format) for m in manifests] == [(0, ""), (1, ""), (2, "")]


def test_a_run_is_not_restarted_from_another_checkpoint(log, settings, store, tmp_path) -> None:
    """The log is unchanged, and the message explains how to continue with the other weights."""
    stop = threading.Event()
    stop.set()
    run(log, run_of("idle", STEPS), store, settings, stop)
    tiny_model(seed=9).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    with pytest.raises(VersionError, match=r"version 0 of run idle, branch main, .* went back to an older checkpoint"):
        run(log, run_of("idle", STEPS), store, settings.model_copy(update={"model": str(tmp_path / "other")}), stop)
    assert len(written(log, Manifest, "idle")) == 1


def test_stop_before_the_first_batch_publishes_only_version_0(log, settings, store) -> None:
    stop = threading.Event()
    stop.set()
    run(log, run_of("idle", STEPS), store, settings, stop)
    manifests = written(log, Manifest, "idle")
    assert [(m.version, m.parent, m.anchor is not None) for m in manifests] == [(0, None, True)]
    assert written(log, TrainStep, "idle") == []
