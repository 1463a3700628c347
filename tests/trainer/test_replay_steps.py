"""Recorded steps made again from the log: the same weights, other settings, a breakpoint, and nothing written."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.documents import wait_for_ends
from tests.trainer.conftest import fingerprint_of, settings_of, tiny_model
from tests.trainer.run_log import run_of, write_groups
from tidemill.compose.cli import app
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import TrainStep
from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.history import NotRepeatableError, read_steps
from tidemill.trainer.replay.staleness import read_groups
from tidemill.trainer.replay.steps import (
    Halt,
    ReplayedStep,
    StepReplay,
    write_halt,
    write_metrics,
)
from tidemill.trainer.run import run
from tidemill.trainer.trained_weights import TrainedWeights

STEPS = 5
RUN = run_of("trained", STEPS)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of five steps, with checkpoints at the second and later."""

    kafka: KafkaSettings
    store: StoreSettings
    settings: TrainerSettings
    steps: list[TrainStep]

    def replay(self, **changes: object) -> StepReplay:
        settings = self.settings.model_copy(update=changes)
        return StepReplay(self.kafka, RUN, self.store, settings)

    def ends(self) -> dict[tuple[Topic, int], int]:
        with LogReader(self.kafka, Topic) as reader:
            return reader.end_offsets()

    def checkpoint(self, step: int) -> Path:
        return Path(self.store.root) / f"{RUN.run_id}/checkpoints/{RUN.branch}/step-{step:08d}.safetensors"


@pytest.fixture(scope="module")
def trained(kafka, tiny_checkpoint, tmp_path_factory) -> Trained:
    log = kafka.fresh(1)
    write_groups(log, range(2 * STEPS), [RUN.run_id])
    kl, publish = KlSettings(coefficient=0.01), PublishSettings(anchor_every=3)
    settings = settings_of(model=tiny_checkpoint, kl=kl, checkpoint_every=2, publish=publish)
    store = StoreSettings(root=str(tmp_path_factory.mktemp("trained")))
    run(log, RUN, store, settings, threading.Event())
    wait_for_ends(log, Topic.MANIFESTS)
    return Trained(log, store, settings, read_steps(log, RUN.run_id))


@pytest.fixture
def moved(trained: Trained, tmp_path: Path) -> Trained:
    """The same run with copies of the model and the store that a test may damage."""
    shutil.copytree(trained.settings.model, tmp_path / "model")
    shutil.copytree(trained.store.root, tmp_path / "store")
    settings = trained.settings.model_copy(update={"model": str(tmp_path / "model")})
    return replace(trained, settings=settings, store=StoreSettings(root=str(tmp_path / "store")))


def made(replay: StepReplay, first: int, last: int, **options: object) -> list[ReplayedStep]:
    with replay:
        return list(replay.run(first, last, **options))


def test_the_same_inputs_give_the_same_weights_from_the_start_and_from_a_checkpoint(trained, monkeypatch):
    # Only a breakpoint needs whole weights: each rank would need memory for all of a large model.
    monkeypatch.setattr(TrainedWeights, "whole", None)
    before = trained.ends()
    whole = made(trained.replay(), 1, STEPS)
    assert [step.fingerprint for step in whole] == [step.fingerprint for step in trained.steps]
    assert all(step.same for step in whole) and len({step.fingerprint for step in whole}) == STEPS
    assert [step.metric_changes() for step in whole] == [{}] * STEPS
    # Step 4 begins at version 3, which has no checkpoint: step 3 is repeated first, from the checkpoint of step 2.
    (fourth,) = made(trained.replay(), 4, 4)
    assert (fourth.record.step, fourth.same) == (4, True)
    assert trained.ends() == before


def test_without_its_model_a_run_is_replayed_from_the_anchor_of_version_0(moved):
    shutil.rmtree(moved.settings.model)
    assert [step.same for step in made(moved.replay(), 1, 2)] == [True, True]


def test_other_settings_are_refused_or_are_a_counterfactual_from_the_same_start(trained):
    changed = trained.settings.model_copy(update={"optimizer": OptimizerSettings(learning_rate=2e-3)})
    with pytest.raises(NotRepeatableError, match=r"step 4 was trained with other settings.*as --what-if"):
        made(trained.replay(optimizer=changed.optimizer), 4, 4)
    other = made(trained.replay(), 4, 5, what_if=changed)
    assert [step.same for step in other] == [False, False]
    assert other[0].outcome.learning_rate == 2e-3
    # The first step begins at the recorded weights: only values after its update differ.
    assert "loss" not in other[0].metric_changes() and "loss" in other[1].metric_changes()
    same = made(trained.replay(), 4, 5, what_if=trained.settings)
    assert [step.same for step in same] == [True, True]


def test_a_breakpoint_shows_the_data_of_a_step(trained, tmp_path):
    folders: list[Path] = []

    def write(halt: Halt) -> None:
        assert trained.steps[1].fingerprint == fingerprint_of(halt.weights())
        folders.append(write_halt(tmp_path / "out", halt))
        with pytest.raises(FileExistsError, match="give another --out"):
            write_halt(tmp_path / "out", halt)

    (third,) = made(trained.replay(), 3, 3, halt=write)
    (folder,) = folders
    third.outcome.metrics["not finite"] = math.nan
    write_metrics(folder, third)
    assert json.loads((folder / "step.json").read_text())["step"] == 3
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [group["place"]["group_id"] for group in groups] == [entry.group_id for entry in third.record.inputs]
    (segment,) = groups[0]["rollouts"][0]["segments"]
    assert len(segment["token_ids"]) == len(segment["logprobs"]) == len(segment["loss_mask"]) > 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["recorded"]["fingerprint"] == metrics["replayed"]["fingerprint"] == third.fingerprint
    assert metrics["replayed"]["not finite"] is None, "a NaN is no JSON"
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.bfloat16)
    stored = load_file(folder / "weights" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_weights_that_differ_from_the_recorded_ones_are_reported(moved, tmp_path):
    path = moved.checkpoint(2)
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("master/"))
    tensors[name] += 1
    with path.open("rb") as stored:
        size = int.from_bytes(stored.read(8), "little")
        metadata = json.loads(stored.read(size))["__metadata__"]
    save_file(tensors, path, metadata)
    with pytest.raises(RuntimeError, match="the checkpoint of step 2 holds weights"):
        made(moved.replay(), 3, 3)
    tiny_model(seed=9).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError, match="name the checkpoint that it started from"):
        made(moved.replay(model=str(tmp_path / "other")), 1, 1)


def test_missing_steps_are_reported(trained):
    with trained.replay() as replay:
        for first, last in ((1, STEPS + 1), (0, 1), (3, 2)):
            with pytest.raises(ValueError, match=r"are not in the log, which has 1 to 5"):
                list(replay.run(first, last))


def test_a_run_without_steps_is_named_not_its_model(ask):
    for arguments in (("steps", "1"), ("staleness", "--max-policy-lag", 1)):
        result = ask(*arguments, "--run-id", "other", "--set", "trainer.model=no-such-directory")
        assert isinstance(result.exception, ValueError) and "no steps of run 'other'" in str(result.exception)


def test_groups_are_found_by_their_positions(trained):
    here, beyond = (Position("groups", 0, offset) for offset in (1, 99))
    found = read_groups(trained.kafka, {here, beyond}, 30)
    assert {place: group.group_id for place, group in found.items()} == {here: "g1"}


@pytest.fixture
def ask(trained, tmp_path) -> Callable[..., object]:
    """Return a function that runs a replay command with the run's configuration."""
    config = tmp_path / "settings.toml"
    tree = {
        "run": RUN.model_dump(mode="json", exclude_none=True),
        "store": trained.store.model_dump(mode="json"),
        "trainer": trained.settings.model_dump(mode="json", exclude_none=True),
    }
    config.write_text(tomli_w.dumps(tree), "utf-8")
    where = ["--bootstrap", trained.kafka.bootstrap, "--topic-prefix", trained.kafka.topic_prefix]

    def asked(*arguments: object, group: str = "replay"):
        return CliRunner().invoke(app, [group, *map(str, arguments), *where, "--config", str(config)])

    return asked


def test_the_command_line(trained, ask, tmp_path):
    out = tmp_path / "taken-apart"
    result = ask("steps", "2..3", "--break-at", 3, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"step 2: {trained.steps[1].fingerprint} as recorded" in result.output
    assert "identical: 2 of 2" in result.output
    assert {path.name for path in (out / "step-00000003").iterdir()} >= {"step.json", "weights", "metrics.json"}
    what_if = ask("steps", "3", "--what-if", "trainer.optimizer.learning_rate=2e-3", "--json")
    (step,) = json.loads(what_if.stdout)["steps"]
    assert (what_if.exit_code, step["same"], step["recorded"]) == (0, False, trained.steps[2].fingerprint)
    table = ask("steps", "3", "--what-if", "trainer.optimizer.learning_rate=2e-3")
    assert table.exit_code == 0 and "grad_norm" in table.output
    calm = ask("staleness", "--max-policy-lag", 4, "--json")
    assert (calm.exit_code, json.loads(calm.stdout)["first_differing_step"]) == (0, None)
    strict = ask("staleness", "--max-policy-lag", 2)
    assert strict.exit_code == 1 and "first step that differs: 4" in strict.output
    assert "step 4 from version 3: 2 trained, 0 too stale, largest lag 3; out: g6, g7" in strict.output


def test_corrections_are_tried_on_the_steps(trained, ask):
    before = trained.ends()
    result = ask("corrections", "2..4", "--json", group="tune")
    assert result.exit_code == 0, (result.output, result.exception)
    document = json.loads(result.stdout)
    trials = {trial["name"]: trial for trial in document["trials"]}
    assert document["steps"] == [2, 4] and {"none", "TIS (verl, TRL)", "this run"} <= set(trials)
    # TIS with a bound of 2 is the default, and these steps were trained with it.
    own = {**trials["this run"], "name": "", "low": 0.0}
    assert own == {**trials["TIS (verl, TRL)"], "name": ""}
    recorded = [step.metrics["correction/bounded"] for step in trained.steps[1:4]]
    assert own["cut"] == pytest.approx(sum(recorded) / 3, abs=0.02)
    best = document["trials"][0]
    assert f"chosen: {best['name']}: trainer.correction.kind={best['kind']}" in result.stderr
    table = ask("corrections", "3", "--csv", group="tune")
    assert table.stdout.splitlines()[0] == "name,kind,low,high,bias,variance,ess,cut,error"
    assert trained.ends() == before
    changes = ("--set", "trainer.objective=decoupled_ppo", "--set", "trainer.correction.kind=none")
    refused = ask("corrections", "3", *changes, group="tune")
    assert isinstance(refused.exception, ValueError) and "trainer.behaviour_cap" in str(refused.exception)


def test_a_forged_fingerprint_is_found_at_its_step(trained, ask):
    """The third step of the run records the fingerprint of other weights."""
    forged = [replace(step, run_id="forged") for step in trained.steps]
    forged[2] = replace(forged[2], fingerprint="00" * 16)
    forged[3] = replace(forged[3], parent_fingerprint="00" * 16)
    with RecordProducer(trained.kafka, "test") as producer:
        producer.send_acked(Topic.STEPS, [("forged", step) for step in forged])
    result = ask("steps", "1..5", "--run-id", "forged", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["identical"], document["first_differing_step"]) == (1, 2, 3)
    on_the_way = ask("steps", "5", "--run-id", "forged")
    assert isinstance(on_the_way.exception, NotRepeatableError) and "step 3, on the way" in str(on_the_way.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["steps", "3..1"], "is no range of steps"),
        (["steps", "1..2", "--break-at", 3, "--out", "x"], "--break-at 3 is outside of the steps 1 to 2"),
        (["steps", "1", "--break-at", 1], "give --break-at and --out together"),
        (["steps", "1", "--what-if", "run.seed=3"], "only settings of `trainer` change a step"),
        (["steps", "1", "--what-if", "trainer.model=other"], "recorded steps are taken from the weights of their run"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(arguments, told):
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert isinstance(result.exception, ValueError) and told in str(result.exception)
