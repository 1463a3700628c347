"""The demonstration's numbers are a fold over the log: order, duplicates and other runs change nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.records import build
from tidemill.compose.cli import main
from tidemill.compose.config import load_settings
from tidemill.compose.demo.command import RECIPES, run_demo
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import percentiles, summarise
from tidemill.compose.demo.view import closing, screen, sparkline
from tidemill.schemas.records import (
    AckStatus,
    CloseReason,
    Group,
    GroupMember,
    LagCount,
    Manifest,
    Mode,
    Outcome,
    RolloutStatus,
    StepInput,
    Task,
    TrainStep,
    WeightAck,
)

RUN = "run"


def member(name: str, reward: float | None, versions: tuple[int, int] = (0, 0)) -> GroupMember:
    done = reward is not None
    return build(GroupMember, rollout_id=name, reward=reward, advantage=0.0 if done else None,
                 status=RolloutStatus.COMPLETED if done else RolloutStatus.FAILED,
                 success=reward == 1.0 if done else None, version_min=versions[0], version_max=versions[1])  # fmt: skip


def group(
    name: str, members: list[GroupMember], mode: Mode = Mode.TRAIN, reason: CloseReason = CloseReason.SIZE
) -> Group:
    return build(Group, group_id=name, mode=mode, closed_by=reason, members=members)


def eval_task(name: str, version: int) -> Task:
    return build(Task, task_id=name, mode=Mode.EVAL, issued_version=version)


def step(number: int, groups: list[str], lag: list[LagCount]) -> TrainStep:
    return build(TrainStep, step=number, inputs=[StepInput(name, "groups", 0, 0) for name in groups], lag=lag)


def manifest(version: int) -> Manifest:
    return build(Manifest, version=version, n_elements=100, n_changed=50, fingerprint=f"print-{version}")


def ack(version: int, status: AckStatus = AckStatus.PROVED, fingerprint: str = "") -> WeightAck:
    return build(WeightAck, version=version, status=status, fingerprint=fingerprint or f"print-{version}",
                 pause_ms=2.0 * version, step_to_served_ms=500)  # fmt: skip


def log() -> list[object]:
    return [
        eval_task("e0", 0),
        eval_task("e1", 1),
        group("e0", [member("e0/0", 1.0), member("e0/1", 0.0)], Mode.EVAL),
        group("e1", [member("e1/0", 1.0), member("e1/1", 1.0), member("e1/2", None)], Mode.EVAL),
        group("t0", [member("t0/0", 1.0, (0, 1)), member("t0/1", 0.0), member("t0/2", None)]),
        group("t0", [member("t0/9", 1.0)], reason=CloseReason.LATE),
        group("t1", [member("t1/0", 0.0)]),
        manifest(0),
        manifest(1),
        step(1, ["t0"], [LagCount(0, 6), LagCount(1, 4)]),
        ack(0, AckStatus.ANCHORED),
        ack(1),
        ack(1),
    ]


def folded(records: list[object]) -> LoopState:
    state = LoopState(RUN)
    for record in records:
        state.observe(record)
    return state


def test_a_group_is_open_from_its_task_until_it_is_closed():
    assert [folded(log()[:seen]).open_groups for seen in (0, 1, 2, 3, 4)] == [0, 1, 2, 1, 0]
    late = group("e0", [member("e0/9", 1.0)], Mode.EVAL, reason=CloseReason.LATE)
    assert folded([eval_task("e0", 0), late]).open_groups == 1


def test_the_numbers():
    state = folded(log())
    assert [(h.version, h.rate, h.rollouts, h.tasks) for h in state.held_out()] == [(0, 0.5, 2, 1), (1, 1.0, 2, 1)]
    assert (state.version, len(state.train_groups())) == (1, 2)
    assert state.lag() == {0: 6, 1: 4}
    assert (state.spanning(), len(state.trained_members())) == (1, 2)
    assert state.fingerprints_equal()
    summary = summarise(state, seed=3, bound=4, data_dir=__file__)
    assert (summary["held_out_before"], summary["held_out_after"]) == (0.5, 1.0)
    assert (summary["max_policy_lag"], summary["policy_lag_bound"], summary["versions"]) == (1, 4, 1)
    assert (summary["pause_ms"]["p50"], summary["step_to_served_s"]["p50"]) == (2.0, 0.5)
    assert closing({**summary, "audit": "sound", "seconds": 9.0}, ["q"])
    assert screen(state, steps=1, bound=4, elapsed_s=1.0, stage="running")


@pytest.mark.parametrize("seed", range(5))
def test_neither_duplicates_nor_the_order_between_topics_matters(seed: int):
    records = log()[:10]
    shuffled = [*records, *records]
    random.Random(seed).shuffle(shuffled)
    first, second = folded(records), folded(shuffled)
    assert first.held_out() == second.held_out() and first.spanning() == second.spanning()


def test_repeated_tasks_and_corrections_count_once():
    correction = build(Outcome, interaction_id="i0", revision=1)
    records = [eval_task("e0", 0), eval_task("e1", 0), correction, replace(correction, revision=2)]
    online = OnlineState(LoopState(RUN), frozenset(), frozenset())
    for record in [*records, *records]:
        online.observe(record)
    assert (online.loop.environments, online.corrections) == ({"ledger": 2}, 2)


def test_other_runs_are_ignored():
    state = folded([replace(record, run_id="other") for record in log()])
    assert state.version == -1 and not state.groups and not state.fingerprints_equal()


@pytest.mark.parametrize(
    "bad",
    [ack(1, fingerprint="another"), replace(ack(1), version=0, serving_version=0, fingerprint="print-0")],
)
def test_unequal_fingerprints_and_a_replica_behind_are_noticed(bad: WeightAck):
    assert not folded([*log()[:-2], bad]).fingerprints_equal()


def test_refusals_are_counted():
    assert folded([*log(), ack(1, AckStatus.REFUSED)]).refusals == 1


def test_sparkline_stays_within_its_bars():
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 9.0]) in ("▁▁▄██", "▁▁▅██")
    assert sparkline([]) == ""


def test_percentiles_of_nothing_are_zero():
    assert percentiles([]) == percentiles([0.0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--environment", "reasoning_gym:chain_summ"], "chain_summ"),
        (["--option", "operators=-"], "operators"),
        (["--set", 'run.environments=[{"name":"ledger","options":{"colour":"red"}}]'], "colour"),
        (["--set", 'run.environments=[{"name":"nobody_has_this"}]'], "nobody_has_this"),
        (["--json", "no/directory/summary.json"], "no directory"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # The entry point runs in this process: four new processes would spend longer on imports than on the refusal.
    command = ["tidemill", "demo", "--recipe", "smollm2", "--data-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*command, *arguments])
    monkeypatch.delenv("TIDEMILL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_chat_is_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    flags = {"demo": {"model": str(tmp_path)}, "kafka": {"bootstrap": "nowhere:9"}}
    settings = load_settings(RECIPES["smollm2"], flags)
    with pytest.raises(FileNotFoundError, match="needs a fast tokenizer's file"):
        run_demo(settings, Console())
