"""A restarted trainer refuses a log, a checkpoint or settings that do not fit each other."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.records import build
from tests.trainer.conftest import make_trainable, settings_of, tiny_model
from tests.trainer.run_log import Killed, run_of, write_groups, written
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Manifest, TrainStep
from tidemill.trainer.batch_builder import BatchBuilder, StepBatch
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.choices import ServingActivations, ServingFormat
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.history import NotRepeatableError
from tidemill.trainer.online_queue import OnlineQueue, WeightLine
from tidemill.trainer.run import TrainingRun, run
from tidemill.trainer.session import Session
from tidemill.trainer.step import Learner
from tidemill.trainer.trainable import TopicProgress
from tidemill.trainer.trained_weights import TrainedWeights


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """A log with the groups of two steps for the run of each test."""
    settings = kafka.fresh(1)
    write_groups(settings, range(4), ("unrepeatable", "kept", "saved"))
    return settings


@pytest.fixture
def settings(tiny_checkpoint: str) -> TrainerSettings:
    kl, publish = KlSettings(coefficient=0.01), PublishSettings(anchor_every=3)
    return settings_of(model=tiny_checkpoint, kl=kl, publish=publish)


@pytest.fixture
def train(log, tmp_path):
    """Return a function that trains a run up to a step; without steps, it only publishes version 0."""
    store = StoreSettings(root=str(tmp_path / "store"))

    def train(run_id: str, settings: TrainerSettings, steps: int) -> None:
        stop = threading.Event()
        if not steps:
            stop.set()
        run(log, run_of(run_id, max(steps, 1)), store, settings, stop)

    return train


def test_an_unrepeatable_step_is_refused_with_advice(log, settings, train, monkeypatch) -> None:
    """The step is recorded and has no checkpoint."""

    def crash(*_given: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Session, "_finish", crash)
        train("unrepeatable", settings, 1)
    changed = settings.model_copy(update={"length_divisor": 3.0})
    with pytest.raises(NotRepeatableError, match=r"other settings.*start once with the original settings"):
        train("unrepeatable", changed, 2)
    (recorded,) = written(log, TrainStep, "unrepeatable")
    with RecordProducer(log, "test") as producer:
        producer.send_acked(Topic.STEPS, [("unrepeatable", replace(recorded, step=3))])
    with pytest.raises(NotRepeatableError, match=r"\[1, 3\].*start a new run"):
        train("unrepeatable", settings, 2)


def test_a_run_keeps_its_serving_format(log, settings, train) -> None:
    changed = settings.model_copy(update={"serving_format": ServingFormat.NVFP4})
    train("kept", settings, 0)
    with pytest.raises(VersionError, match="version 0 of run kept, branch main, is in the log with fingerprint"):
        train("kept", changed, 1)
    train("kept", settings, 2)
    with pytest.raises(RuntimeError, match=r"other settings.*start with the run's trainer\.serving_format"):
        train("kept", changed, 3)
    manifests = written(log, Manifest, "kept")
    assert [(m.version, m.serving_format) for m in manifests] == [(0, ""), (1, ""), (2, "")]


def test_a_run_keeps_its_serving_activations(log, settings, train) -> None:
    """They change no weight, but replicas would refuse the next version."""
    settings = settings.model_copy(update={"serving_format": ServingFormat.NVFP4})
    changed = settings.model_copy(update={"serving_activations": ServingActivations.NVFP4})
    train("rounded", changed, 0)
    with pytest.raises(
        VersionError, match=r"version 0 is sampled with trainer\.serving_activations nvfp4, now it is no"
    ):
        train("rounded", settings, 0)
    train("rounded", changed, 0)
    assert [m.serving_activations for m in written(log, Manifest, "rounded")] == ["nvfp4"]


def test_a_run_is_not_restarted_from_another_checkpoint(log, settings, train, tmp_path) -> None:
    """A stop before the first batch leaves only version 0. The message explains how to continue with other weights."""
    train("idle", settings, 0)
    manifests = written(log, Manifest, "idle")
    assert [(m.version, m.parent, m.anchor is not None) for m in manifests] == [(0, None, True)]
    tiny_model(seed=9).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    with pytest.raises(VersionError, match=r"version 0 of run idle, branch main, .* went back to an older checkpoint"):
        train("idle", settings.model_copy(update={"model": str(tmp_path / "other")}), 0)
    assert written(log, Manifest, "idle") == manifests
    assert written(log, TrainStep, "idle") == []


def test_a_checkpoint_is_not_continued_with_another_model(log, settings, train, tmp_path) -> None:
    """The weights are those of the checkpoint, but the reference would be another one."""
    train("saved", settings, 2)
    tiny_model(seed=9).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    with pytest.raises(VersionError, match=r"version 0 of run saved has .*: start with the model that the run began"):
        train("saved", settings.model_copy(update={"model": str(tmp_path / "other")}), 2)
    train("saved", settings, 2)


def test_a_checkpoint_of_another_log_is_replaced_when_the_run_reaches_its_step(tmp_path) -> None:
    """Otherwise the next start would refuse it as damaged or of another run."""
    settings, of_run = settings_of(), run_of("run")
    store = CheckpointStore(str(tmp_path), "run", "main", keep=3)
    weights = TrainedWeights(settings, Learner(tiny_model(), settings, None), store)
    theirs = CheckpointState("run", "main", 1, 1, "of another log", "hash", TopicProgress())
    store.write(theirs, {"master/w": torch.zeros(1)})
    session, line = Session(of_run, weights, None, None, steps=None, step=0), WeightLine("run", "main")
    queues = {"builder": BatchBuilder(of_run, settings), "queue": OnlineQueue(of_run, settings, line)}
    training = TrainingRun(KafkaSettings(), "run", settings, session, **queues, line=line, planned=None, stored=0)
    training._checkpoint()
    assert store.read(1)[0] == theirs, "there is nothing to store before the first step"
    session.compute(build(TrainStep, step=1), StepBatch([make_trainable("a")], []))
    training._checkpoint()
    assert store.read(1)[0].fingerprint == session.place.fingerprint
