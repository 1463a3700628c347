"""The demonstration's numbers of learning from users are a fold over the log; satisfaction is what users report."""

from __future__ import annotations

import io
import json
import math
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.records import build
from tests.streams.gate.gate_support import Product, bench
from tidemill.compose.config import Act, load_settings
from tidemill.compose.demo.acts import newest_report, rate_of
from tidemill.compose.demo.command import RECIPES
from tidemill.compose.demo.people import Satisfaction, UserActivity
from tidemill.compose.demo.plan import CONFIG_NAME, ONLINE_CONFIG_NAME, DemoPlan
from tidemill.compose.demo.state import REWARDED, HeldOut, LoopState, OnlineState
from tidemill.compose.demo.summary import summarise_online
from tidemill.compose.demo.view import online_screen
from tidemill.schemas.gate_decisions import EVIDENCE
from tidemill.schemas.records import (
    Feedback,
    GateDecision,
    GateVerdict,
    Interaction,
    Manifest,
    OnlineBatch,
    OnlineMember,
    Outcome,
    Record,
    SignalKind,
    StepExclusion,
    StepInput,
    TrainStep,
    WeightAck,
)

RUN = "run"
SECOND = 1_000_000


def interaction(name: str, at_s: float = 1.0) -> Interaction:
    return build(Interaction, interaction_id=name, served_at=int(at_s * SECOND))


def vote(event: str) -> Feedback:
    return build(Feedback, event_id=event, interaction_id="i0", kind=SignalKind.THUMB, value=1.0)


def outcome(name: str, exclusion: str = "", revision: int = 0) -> Outcome:
    return build(Outcome, interaction_id=name, exclusion=exclusion, revision=revision)


def batch(names: list[str]) -> OnlineBatch:
    members = [build(OnlineMember, interaction_id=name, feedback_at=2 * SECOND) for name in names]
    return build(OnlineBatch, batch_id="b0", members=members)


def step(version: int, batches: list[str], without: list[str] = []) -> TrainStep:  # noqa: B006 - never changed
    inputs = [StepInput(name, "online-batches", 0, 0) for name in batches] + [StepInput("g", "groups", 0, 0)]
    exclusions = [StepExclusion(name, "interactions", 0, 0, "erased", 1) for name in without]
    return build(TrainStep, step=version, inputs=inputs, exclusions=exclusions)


def decision(verdict: GateVerdict, version: int, at_s: float, **numbers: float) -> GateDecision:
    return GateDecision(RUN, "main", verdict, version, "why", "gate", numbers, int(at_s * SECOND))


def manifest(version: int) -> Manifest:
    return build(Manifest, version=version, fingerprint=f"print-{version}")


def ack(replica: str, version: int, at_s: float, fingerprint: str = "") -> WeightAck:
    shown = fingerprint or f"print-{version}"
    return build(WeightAck, replica_id=replica, version=version, fingerprint=shown, at=int(at_s * SECOND))


def log() -> list[Record]:
    """Return records in which v0 is promoted; v1 learns from users, is benched, compared and promoted."""
    return [
        manifest(0),
        decision(GateVerdict.PROMOTE, 0, 0.5),
        ack("stable-0", 0, 0.6),
        *(interaction(f"i{n}") for n in range(4)),
        vote("e0"),
        vote("e0"),
        vote("e1"),
        outcome("i0"),
        outcome("i1"),
        outcome("i2", "no_signal"),
        outcome("i3", "bot"),
        outcome("i0", revision=1),
        batch(["i0", "i1"]),
        step(1, ["b0"]),
        manifest(1),
        decision(GateVerdict.CANARY, 1, 5.0, share=0.0),
        ack("canary-0", 1, 6.0),
        decision(GateVerdict.CANARY, 1, 7.0, share=0.5),
        decision(GateVerdict.PROMOTE, 1, 9.0),
        ack("stable-0", 1, 10.0),
    ]


def folded(records: list[Record]) -> OnlineState:
    state = OnlineState(LoopState(RUN), frozenset({"stable-0"}), frozenset({"canary-0"}))
    for record in records:
        state.observe(record)
    return state


def test_the_numbers():
    state = folded(log())
    assert len(state.interactions) == len(state.endings) == 4
    assert (state.rewarded, state.exclusions(), state.corrections, state.votes) == (2, {"bot": 1, "no_signal": 1}, 1, 2)
    assert (state.learnt_batches, state.learnt_versions, state.branch.served) == (1, [1], [0, 1])
    assert state.verdicts() == {"canary": 2, "promote": 2}
    assert state.endings["i0"] == REWARDED
    assert state.fingerprints_equal()
    seen = UserActivity(1, 4, 0, {}, [Satisfaction(1, 3, 4, 4)])
    assert online_screen(state, seen, 6, 1.0) and online_screen(folded([]), None, 6, 1.0)


def test_feedback_to_served_begins_at_the_signal_and_ends_when_users_are_given_the_version():
    state = folded(log())
    assert state.to_a_share_s() == [5.0, 5.0]
    assert state.to_everyone_s() == [8.0, 8.0]
    benched = [r for r in log() if not (isinstance(r, GateDecision) and (r.numbers or r.at == 9 * SECOND))]
    assert folded([*benched[:-1]]).to_a_share_s() == []


def test_an_interaction_that_the_trainer_excluded_is_not_trained():
    records = [step(1, ["b0"], without=["i1"]) if isinstance(r, TrainStep) else r for r in log()]
    assert folded(records).to_everyone_s() == [8.0]


def test_a_version_that_was_skipped_is_served_with_its_descendant():
    records = [r for r in log() if not (isinstance(r, WeightAck | GateDecision) and r.version == 1)]
    later = [step(2, []), decision(GateVerdict.PROMOTE, 2, 11.0), ack("stable-0", 2, 12.0)]
    assert folded([*records, *later]).to_everyone_s() == [10.0, 10.0]


@pytest.mark.parametrize("seed", range(5))
def test_duplicates_change_nothing(seed: int):
    records = [record for record in log() if not (isinstance(record, Outcome) and record.revision)]
    twice = sorted([*enumerate(records), *enumerate(records)], key=lambda pair: pair[0])
    state, doubled = folded(records), folded([record for _, record in twice])
    assert (state.endings, state.votes, state.learnt_batches) == (
        doubled.endings,
        doubled.votes,
        doubled.learnt_batches,
    )
    shuffled = [record for record in records if isinstance(record, Interaction | Outcome | Feedback)]
    random.Random(seed).shuffle(shuffled)
    assert folded(shuffled).endings == state.endings


def test_other_runs_and_replicas_are_ignored():
    state = folded([replace(r, run_id="other") if hasattr(r, "run_id") else r for r in log()])
    assert (
        not state.votes
        and not state.interactions
        and not state.endings
        and not state.decisions
        and not state.fingerprints_equal()
    )
    assert folded([ack("replica-0", 1, 1.0)]).serving == {}


@pytest.mark.parametrize("bad", [ack("stable-0", 1, 10.0, "another"), ack("stable-0", 0, 10.0)])
def test_a_false_proof_and_a_stable_replica_behind_are_noticed(bad: WeightAck):
    assert not folded([*log()[:-1], bad]).fingerprints_equal()


def test_a_trial_is_decided_when_anything_ends_it():
    records = log()
    tried = next(place for place, record in enumerate(records) if getattr(record, "numbers", None))
    assert not folded(records[: tried + 1]).decided(1)
    assert folded([*records[: tried + 1], decision(GateVerdict.HOLD, 0, 9.0)]).decided(1)
    assert folded(records).decided(1) and not folded(records).decided(2)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (decision(GateVerdict.CANARY, 1, 1.0, share=0.0), "v1 is benched"),
        (decision(GateVerdict.CANARY, 1, 1.0, share=0.5), "v1 is compared among 50% of the users"),
        (decision(GateVerdict.REJECT, 1, 1.0), "reject v1: why"),
        (decision(GateVerdict.ADMIT, 1, 1.0), "promote v0: why"),
    ],
)
def test_the_stage_is_the_last_decision(last: GateDecision, said: str):
    assert folded([decision(GateVerdict.PROMOTE, 0, 0.5), last]).stage() == said
    assert folded([]).stage() == "no decision yet"


def test_the_rate_counts_the_last_seconds():
    state = folded([interaction(f"i{n}", at_s=n / 10) for n in range(400)])
    assert state.interactions_per_s == pytest.approx(10.0, rel=0.05)
    assert folded([]).interactions_per_s == folded([interaction("i")]).interactions_per_s == 0.0


def test_the_summary_takes_satisfaction_from_users_and_the_rest_from_the_log():
    before, after = Satisfaction(0, 1, 4, 4), Satisfaction(1, 3, 4, 5)
    state = folded(log())
    summary = summarise_online(state, before=before, after=after, thumbs_shuffled=False, seconds=9.0)
    assert (summary["satisfaction_before"], summary["satisfaction_after"]) == (0.25, 0.6)
    assert summary["satisfaction_answers"] == 4
    assert (summary["promotions"], summary["online_batches"], summary["interactions"]) == (1, 1, 4)
    assert summary["rewarded"] + sum(summary["exclusions"].values()) == summary["interactions"]
    assert (summary["feedback_to_served_s"]["p50"], summary["feedback_to_everyone_s"]["p95"]) == (5.0, 8.0)
    nothing = summarise_online(folded([]), before=None, after=None, thumbs_shuffled=True, seconds=0.0)
    assert (nothing["satisfaction_answers"], nothing["promotions"], nothing["thumbs_shuffled"]) == (0, 0, True)


def test_decisions_on_evidence_are_counted_apart():
    tried = [decision(GateVerdict.CANARY, version, 5.0, share=0.5) for version in (1, 2, 3, 4)]
    ends = [
        decision(GateVerdict.PROMOTE, 1, 6.0, **{EVIDENCE: 1.0}),
        decision(GateVerdict.REJECT, 2, 6.0, **{EVIDENCE: 1.0}),
        decision(GateVerdict.PROMOTE, 3, 6.0, **{EVIDENCE: 0.0}),
    ]
    state = folded(
        [decision(GateVerdict.PROMOTE, 0, 0.5), *(r for pair in zip(tried, ends, strict=False) for r in pair)]
    )
    state.observe(tried[-1])
    summary = summarise_online(state, before=None, after=None, thumbs_shuffled=False, seconds=1.0)
    assert (summary["trials_decided"], summary["decided_on_evidence"], summary["evidence_share"]) == (3, 2, 0.6667)
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(online_screen(state, None, 6, 1.0))
    assert "2 of 3 versions tried" in screen.export_text()


def test_skill_is_shown_with_its_noise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LoopState, "held_out", lambda self: [HeldOut(0, 441, 512, 128), HeldOut(1, 102, 128, 32)])
    summary = summarise_online(folded(log()), before=None, after=None, thumbs_shuffled=False, seconds=1.0)
    assert (summary["held_out_before_online"], summary["held_out_after_online"]) == (0.8613, 0.7969)
    assert summary["held_out_online_rollouts"] == 128
    usual = 1.96 * math.sqrt(0.8613 * 0.1387 / 512 + 0.7969 * 0.2031 / 128)
    assert summary["held_out_online_noise"] == pytest.approx(usual, rel=0.02)
    monkeypatch.setattr(LoopState, "held_out", lambda self: [HeldOut(0, 0, 16, 4), HeldOut(1, 0, 0, 4)])
    summary = summarise_online(folded(log()), before=None, after=None, thumbs_shuffled=False, seconds=1.0)
    assert (summary["held_out_online_rollouts"], summary["held_out_online_noise"]) == (0, pytest.approx(0.51, abs=0.02))


@pytest.mark.parametrize(("candidate", "verdict"), [(0.5, "promote"), (0.6, "promote"), (0.1, "reject")])
def test_the_recipes_gate_decides_on_the_evidence_of_its_users(candidate: float, verdict: str):
    settings = load_settings(RECIPES["ledger"])
    product = Product(settings.gate)
    product.publish(0)
    product.write(bench(0, 48, 64))
    product.publish(1)
    product.write(bench(1, 48, 64))
    assert product.last().numbers["share"] == settings.gate.share
    product.traffic(candidate, 0.5, (1, 0), most=settings.users.ordinary)
    made = product.last()
    assert (made.verdict.value, made.version, made.numbers[EVIDENCE]) == (verdict, 1, 1.0)


def test_the_newest_whole_report_of_the_users_is_read(tmp_path: Path):
    log = tmp_path / "users.log"
    assert newest_report(log) is None
    first, second = (UserActivity(n, n, 0, {"thumb": n}, [Satisfaction(0, n, n, n)]) for n in (1, 2))
    lines = ["2026 INFO starting", json.dumps(asdict(first)), json.dumps(asdict(second)), "2026 INFO bye", '{"conv']
    log.write_text("\n".join(lines), "utf-8")
    assert newest_report(log) == second
    assert rate_of(second, 0) == Satisfaction(0, 2, 2, 2) and rate_of(second, 1) is rate_of(None, 0) is None


def test_the_plan_writes_no_secret_and_turns_learning_from_users_on_for_the_second_act(tmp_path: Path):
    given = {"product": {"pseudonym_key": "p" * 40}, "users": {"api_key": "k" * 40}}
    plan = DemoPlan.of(load_settings(None, {"demo": {"data_dir": str(tmp_path), "online_batches": 3}, **given}))
    plan.write_config()
    secrets = list(plan.product_environment().values())
    for name in (CONFIG_NAME, ONLINE_CONFIG_NAME):
        text = (plan.directory / name).read_text()
        assert "****" not in text and not [secret for secret in secrets if secret.strip('[]"') in text]
    simulated, online = (load_settings(plan.directory / name) for name in (CONFIG_NAME, ONLINE_CONFIG_NAME))
    assert not simulated.trainer.online.enabled and online.trainer.online.enabled
    assert online.rollout.replicas == online.router.pools.canary != online.router.pools.stable
    assert online.users.router.endswith(str(online.router.port))
    assert online.run.max_steps == simulated.run.max_steps + 3, "the last step, as `audit --complete` takes it"
    assert f"run.max_steps={online.run.max_steps + 1}" in dict(plan.online_roles())["feed-online"]
    assert plan.acts == (Act.ONE, Act.TWO)
    assert not repr(plan).count(plan.api_key)


def test_simultaneous_demonstrations_share_no_port_unless_set(tmp_path: Path):
    for sink, port in (({}, 0), ({"http_port": 8124}, 8124)):
        plan = DemoPlan.of(load_settings(None, {"demo": {"data_dir": str(tmp_path / str(port))}, "sink": sink}))
        plan.write_config()
        assert load_settings(plan.directory / CONFIG_NAME).sink.http_port == port


def test_the_log_s_passwords_reach_the_roles_only_by_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.username": "ada",
        "sasl.password": "hush",
        "ssl.key.password": "h2",
        "ssl.key.pem": "h3",
        "sasl.oauthbearer.client.secret": "h4",
    }
    given = {"demo": {"data_dir": str(tmp_path)}, "kafka": {"client_options": options}}
    plan = DemoPlan.of(load_settings(None, given))
    plan.write_config()
    for name in (CONFIG_NAME, ONLINE_CONFIG_NAME):
        read = load_settings(plan.directory / name).kafka.client_options
        assert read == {name: options[name] for name in ("security.protocol", "sasl.username")}
    for name, value in plan.role_environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings(plan.directory / CONFIG_NAME).kafka.client_options == options


def test_the_roles_read_the_plan_s_settings_also_if_the_environment_sets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TIDEMILL_RUN__MAX_STEPS", "7")
    monkeypatch.setenv("tidemill_run__run_id", "mine")
    monkeypatch.setenv("TIDEMILL_STORE", '{"root": "elsewhere"}')
    monkeypatch.setenv("TIDEMILL_TRACEBACK", "1")
    given = {"demo": {"data_dir": str(tmp_path), "online_batches": 3}, "sink": {"password": "hush"}}
    plan = DemoPlan.of(load_settings(None, {**given, "product": {"clock_skew_s": 5}}))
    plan.write_config()
    environment = plan.role_environment()
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    read = load_settings(plan.directory / ONLINE_CONFIG_NAME)
    assert (read.run.run_id, read.run.max_steps) == (plan.settings.run.run_id, 7 + 3)
    assert read.store.root == str(plan.directory / "store") and read.product.clock_skew_s == 5
    assert read.sink.password.get_secret_value() == "hush"
    assert os.environ["TIDEMILL_TRACEBACK"] == "1" and "PATH" in environment


def test_act_two_alone_needs_a_model(tmp_path: Path):
    settings = load_settings(None, {"demo": {"data_dir": str(tmp_path / "new"), "act": "two"}})
    with pytest.raises(ValueError, match="--model"):
        DemoPlan.of(settings)
    assert not (tmp_path / "new").exists()
