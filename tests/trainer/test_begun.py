"""A planned step without a record: it is taken on the planned inputs if possible, otherwise it is planned again."""

import logging
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.documents import delete
from tests.records import build
from tests.trainer.conftest import make_trainable, settings_of, tiny_model
from tests.trainer.run_log import Killed, decide, erase, run_of, serve, write_groups, written
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateVerdict, Manifest, StepPlan, TrainStep
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import OnlineSettings, TrainerSettings
from tidemill.trainer.history import read_history
from tidemill.trainer.run import TrainingRun, run
from tidemill.trainer.session import Session
from tidemill.trainer.step import Learner
from tidemill.trainer.trained_weights import TrainedWeights


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Topics that the tests of the module share; each test has its own run in them."""
    return kafka.fresh(1)


@pytest.fixture
def settings(tiny_checkpoint: str) -> TrainerSettings:
    return settings_of(model=tiny_checkpoint, publish=PublishSettings(skips=()))


@pytest.fixture
def online_settings(settings) -> TrainerSettings:
    online = OnlineSettings(enabled=True, require_admission=False)
    return settings.model_copy(update={"online": online})


@pytest.fixture
def train(log, run_id, tmp_path, monkeypatch):
    """Return a function that trains up to a step; with `begin`, it stops after that step's plan."""
    store = StoreSettings(root=str(tmp_path / "store"))

    def train(settings: TrainerSettings, steps: int, begin: bool = False) -> None:
        with monkeypatch.context() as patched:
            if begin:
                patched.setattr(Session, "take", stop_before(steps))
            with pytest.raises(Killed) if begin else nullcontext():
                run(log, run_of(run_id, steps), store, settings, threading.Event())

    return train


def stop_before(step: int):
    take = Session.take

    def stopped(self, plan, batch):
        if plan.step == step:
            raise Killed
        return take(self, plan, batch)

    return stopped


def names(step: TrainStep | StepPlan) -> list[str]:
    return [entry.group_id for entry in step.inputs]


def test_a_planned_step_is_taken_on_its_inputs_even_if_a_new_plan_would_choose_others(
    log, run_id, settings, train
) -> None:
    """A group that closed earlier arrives after the plan. A new plan would take it first."""
    write_groups(log, range(4, 7), [run_id])
    train(settings, 1, begin=True)
    assert read_history(log, run_id) == ([], written(log, StepPlan, run_id)[0])
    write_groups(log, range(1), [run_id])
    train(settings, 2)
    first, second = written(log, TrainStep, run_id)
    assert (names(first), names(second)) == (["g4", "g5"], ["g0", "g6"])
    plans = written(log, StepPlan, run_id)
    assert [(plan.step, plan.inputs) for plan in plans] == [(1, first.inputs), (2, second.inputs)]
    assert read_history(log, run_id) == ([first, second], None)
    assert plans[0].trainer != plans[1].trainer
    assert (first.seed, first.exclusions) == (plans[0].seed, plans[0].exclusions)
    assert first.incarnation == plans[0].incarnation == written(log, Manifest, run_id)[0].incarnation != ""


def test_changed_settings_plan_the_step_again_with_a_log_message(log, run_id, settings, train, caplog) -> None:
    write_groups(log, range(2), [run_id])
    train(settings, 1, begin=True)
    changed = settings.model_copy(update={"length_divisor": 3.0})
    with caplog.at_level(logging.WARNING):
        train(changed, 1)
    assert "step 1 was planned before the stop, and is planned again: it was planned with other settings" in caplog.text
    (step,) = written(log, TrainStep, run_id)
    hashes = [settings.arithmetic_hash(), changed.arithmetic_hash()]
    assert [plan.config_hash for plan in written(log, StepPlan, run_id)] == hashes
    assert (step.config_hash, names(step)) == (hashes[1], ["g0", "g1"])


def test_a_step_is_planned_again_without_missing_inputs(log, run_id, settings, train, caplog) -> None:
    write_groups(log, range(4), [run_id])
    train(settings, 1, begin=True)
    with LogReader(log, [Topic.ROLLOUTS]) as reader:
        end = reader.end_offsets()[Topic.ROLLOUTS, 0]
    delete(log, end - 10, topic=Topic.ROLLOUTS)
    with caplog.at_level(logging.WARNING):
        train(settings, 1)
    assert "step 1 was planned before the stop, and is planned again: its inputs can no longer be read" in caplog.text
    (step,) = written(log, TrainStep, run_id)
    assert names(step) == ["g2", "g3"]
    assert {e.group_id: e.reason for e in step.exclusions} == {"g0": "missing_rollout", "g1": "missing_rollout"}
    assert [names(plan) for plan in written(log, StepPlan, run_id)] == [["g0", "g1"], ["g2", "g3"]]


def test_a_step_from_an_abandoned_parent_is_planned_again(log, run_id, online_settings, train, caplog) -> None:
    for number in range(3):
        serve(log, f"b{number}", number, closed_at=number, run_id=run_id)
    train(online_settings, 3, begin=True)
    decide(log, GateVerdict.ROLL_BACK, 1, run_id)
    serve(log, "again", 1, closed_at=3, run_id=run_id)
    with caplog.at_level(logging.WARNING):
        train(online_settings, 3)
    assert "step 3 was planned before the stop, and is planned again: the gate abandoned version 2" in caplog.text
    steps = written(log, TrainStep, run_id)
    assert [(s.parent_version, names(s)) for s in steps] == [(0, ["b0"]), (1, ["b1"]), (1, ["again"])]
    assert steps[2].metrics["online/decisions"] == 1
    planned = [(p.step, p.parent_version, names(p)) for p in written(log, StepPlan, run_id)]
    assert planned[2:] == [(3, 2, ["b2"]), (3, 1, ["again"])]
    assert [(m.version, m.parent) for m in written(log, Manifest, run_id)][-1] == (3, 1)


def test_a_plan_after_a_roll_back_is_taken_from_the_version_rolled_back_to(log, run_id, online_settings, train) -> None:
    for number in range(2):
        serve(log, f"b{number}", number, closed_at=number, run_id=run_id)
    train(online_settings, 2)
    decide(log, GateVerdict.ROLL_BACK, 1, run_id)
    serve(log, "again", 1, closed_at=3, run_id=run_id)
    train(online_settings, 3, begin=True)
    train(online_settings, 3)
    steps = written(log, TrainStep, run_id)
    assert [s.parent_version for s in steps] == [0, 1, 1]
    assert steps[2].parent_fingerprint == steps[0].fingerprint
    assert len(written(log, StepPlan, run_id)) == 3


def test_a_step_with_an_erased_user_is_planned_again(log, run_id, online_settings, train, caplog) -> None:
    serve(log, "left", 0, run_id=run_id)
    train(online_settings, 1, begin=True)
    erase(log, "user-left-1")
    with caplog.at_level(logging.WARNING):
        train(online_settings, 1)
    assert "planned again: a user asked to erase a part of its inputs" in caplog.text
    (step,) = written(log, TrainStep, run_id)
    assert {e.group_id: e.reason for e in step.exclusions} == {"left-1": "erased"}
    assert step.metrics["online/members"] == 3


def test_of_several_plans_the_newest_counts(log, run_id, settings, train) -> None:
    write_groups(log, range(4), [run_id])
    train(settings, 1, begin=True)
    (plan,) = written(log, StepPlan, run_id)
    newer = replace(plan, trainer="another", inputs=plan.inputs[:1])
    RecordProducer(log, "test").send_acked(Topic.STEPS, [(run_id, newer), ("other", replace(newer, run_id="other"))])
    assert read_history(log, run_id)[1] == newer
    train(settings, 1)
    assert [names(step) for step in written(log, TrainStep, run_id)] == [["g0"]]


def test_each_step_repeated_on_the_way_back_has_the_whole_timeout(tiny_checkpoint, tmp_path, monkeypatch) -> None:
    """Otherwise a trainer that goes back over many steps would end as hung, and again after each start."""
    settings, batch = settings_of(model=tiny_checkpoint), StepBatch([make_trainable("a")], [])
    checkpoints = CheckpointStore(str(tmp_path), "run", "main", keep=1)
    weights = TrainedWeights(settings, Learner(tiny_model(), settings, None), checkpoints)
    weights.restore(0)
    session = Session(run_of(), weights, None, None, steps=None, step=0)
    steps = []
    for number in range(1, 4):
        before = session.place.fingerprint
        session.compute(build(TrainStep, step=number), batch)
        hashes = {"config_hash": session.config_hash, "parent_fingerprint": before}
        steps.append(build(TrainStep, step=number, fingerprint=session.place.fingerprint, **hashes))
    inputs = nullcontext(SimpleNamespace(of=lambda _: batch))
    monkeypatch.setattr("tidemill.trainer.run.RecordedInputs", lambda *_: inputs)
    monkeypatch.setattr("tidemill.trainer.run.read_steps", lambda *_: steps)
    training = TrainingRun(KafkaSettings(), "run", settings, session, None, None, None, None, stored=0)
    training.go_back(1, 3)
    assert (session.place.version, session.place.step) == (1, 3), "before its loop a trainer has no watchdog"
    beats = []
    training._liveness = SimpleNamespace(beat=lambda activity, within_s: beats.append((activity, within_s)))
    training.go_back(2, 3)
    assert beats == [(f"step {n}, repeated on the way back to version 2", settings.step_timeout_s) for n in (1, 2)]
