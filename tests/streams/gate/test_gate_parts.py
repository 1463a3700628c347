"""The parts of the gate: users as units, the bench's bounds, guardrails' measures, and settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.streams.gate.gate_support import QUICK, RUN, ack, bench, manifest, outcome, said
from tidemill.consumers.weights.chain import Chain, DecisionFollowers, decision
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.records import GateVerdict, Mode, OutcomeExclusion
from tidemill.streams.gate.bench import Bench, BenchResult
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.guardrails import ArmGuards, FrozenGuards, Tolerance, measures
from tidemill.streams.gate.sequential import Capital, Side, TwoArms, difference
from tidemill.streams.gate.trial import PromotionWatch, Users

ALPHA = 0.05


def take(users, arm, name, number, value, at=0, revision=0):
    made = outcome(number, arm, 1, at, value, name, revision=revision)
    return [(s.user_id, s.means()) for s in users.observe(arm, name, made, {"x": value}, at)]


def test_a_user_counts_once_with_the_mean_of_their_first_outcomes():
    users = Users(most=3, window_us=100)
    assert take(users, "canary", "ada", 1, 1.0) == take(users, "canary", "ada", 2, 0.0) == []
    assert take(users, "canary", "ada", 3, 0.5) == [("ada", {"x": 0.5})]
    assert take(users, "canary", "ada", 4, 9.0) == []
    assert take(users, "canary", "ada", 2, 0.75, revision=1) == [("ada", {"x": 0.75})]
    assert take(users, "canary", "ada", 2, 0.0, revision=1) == []
    assert users.settle_all() == []


def test_a_user_counts_at_the_end_of_their_window():
    users = Users(most=3, window_us=100)
    take(users, "canary", "ada", 1, 1.0, at=0)
    take(users, "stable", "bob", 2, 0.0, at=10)
    assert users.advance(99) == []
    assert [settled.user_id for settled in users.advance(100)] == ["ada"]
    assert [(s.arm, s.user_id) for s in users.settle_all()] == [("stable", "bob")]
    assert users.advance(10_000) == []


def test_a_user_belongs_to_the_arm_of_their_first_outcome():
    users = Users(most=2, window_us=100)
    take(users, "canary", "ada", 1, 1.0)
    assert take(users, "stable", "ada", 2, 0.0) == []
    assert take(users, "canary", "ada", 3, 0.0) == [("ada", {"x": 0.5})]


def test_an_erased_user_who_was_counted_does_not_count_again():
    users = Users(most=1, window_us=100)
    assert take(users, "canary", "ada", 1, 1.0) == [("ada", {"x": 1.0})]
    users.forget("ada")
    assert take(users, "canary", "ada", 1, 1.0) == take(users, "canary", "ada", 2, 0.0) == []
    assert take(users, "stable", "ada", 3, 0.0) == users.settle_all() == []


def test_an_erased_user_who_was_not_counted_begins_again():
    users = Users(most=2, window_us=100)
    take(users, "canary", "ada", 1, 1.0, at=0)
    take(users, "canary", "bob", 2, 1.0, at=5)
    users.forget("ada")
    take(users, "stable", "ada", 3, 0.0, at=60)
    assert [settled.user_id for settled in users.advance(110)] == ["bob"]
    assert [(s.arm, s.user_id, s.means()) for s in users.advance(160)] == [("stable", "ada", {"x": 0.0})]


def test_a_promotion_s_watch_counts_each_user_once():
    watch = PromotionWatch(QUICK, 1, 0, {"reward": 0.5})
    for number, revision in ((1, 0), (1, 1), (2, 0)):
        watch.observe(outcome(number, "stable", 1, 10, 0.5, revision=revision), 10)
    assert watch.users == 2


def alarms(by_user, runs=60, people=60, answers=8):
    """Count the A/A tests, with users who differ, in which at least one of two directions raises an alarm."""
    random, found = np.random.default_rng(11), 0
    made = {(person, number): outcome(100 * person + number, str(person % 2), 1, 0, 0.0)
            for person in range(people) for number in range(answers)}  # fmt: skip
    for _ in range(runs):
        capitals = (Capital(0.0, Side.ABOVE), Capital(0.0, Side.BELOW))
        arms, users = TwoArms(0.5, difference(1.0), capitals), Users(answers, 1)
        for person in range(people):
            arm, taste = str(person % 2), float(random.random() < 0.5)
            for number in range(answers):
                if by_user:
                    for settled in users.observe(arm, str(person), made[person, number], {"x": taste}, 0):
                        arms.observe(int(arm), settled.user_id, settled.means()["x"])
                else:
                    arms.observe(int(arm), f"{person}/{number}", taste)
        found += any(capital.p_value <= ALPHA for capital in capitals)
    return found


def test_several_answers_to_one_user_are_not_several_users():
    """The reason why users are the unit: if each answer counts separately, equal arms raise alarms."""
    assert alarms(by_user=True) <= 2 * ALPHA * 60
    assert alarms(by_user=False) > 4 * 2 * ALPHA * 60


def test_bounds_are_those_of_clopper_and_pearson():
    """Values of beta.ppf(0.025, 8, 3) and beta.ppf(0.975, 9, 2)."""
    result = BenchResult(8, 10)
    assert result.lower(0.025) == pytest.approx(0.44390, abs=1e-5)
    assert result.upper(0.025) == pytest.approx(0.97479, abs=1e-5)
    assert BenchResult(0, 20).upper(0.05) == pytest.approx(1 - 0.05 ** (1 / 20), abs=1e-9)
    assert BenchResult(20, 20).lower(0.05) == pytest.approx(0.05 ** (1 / 20), abs=1e-9)
    assert (BenchResult(0, 5).lower(0.1), BenchResult(5, 5).upper(0.1)) == (0.0, 1.0)


@settings(max_examples=40)
@given(st.integers(1, 100), st.data())
def test_bounds_contain_the_observed_rate(rollouts, data):
    result = BenchResult(data.draw(st.integers(0, rollouts)), rollouts)
    assert result.lower(ALPHA) <= result.rate <= result.upper(ALPHA)
    assert not result.is_significantly_worse(result, 0.0, ALPHA)


def test_an_equal_candidate_rarely_fails_and_a_worse_one_does():
    def chance(rate, other, margin, rollouts=16):
        law = [[math.comb(rollouts, k) * p**k * (1 - p) ** (rollouts - k) for k in range(rollouts + 1)]
               for p in (rate, other)]  # fmt: skip
        results = [BenchResult(successes, rollouts) for successes in range(rollouts + 1)]
        pairs = ((a, b) for a, b in itertools.product(results, repeat=2) if a.is_significantly_worse(b, margin, ALPHA))
        return sum(law[0][a.successes] * law[1][b.successes] for a, b in pairs)

    assert chance(0.6, 0.7, 0.1) < ALPHA
    assert chance(0.1, 0.9, 0.1) > 0.9


def test_a_result_is_counted_once():
    tally = Bench(8)
    assert tally.observe(bench(3, 5, 5)) == [] and tally.result(3) is None
    assert tally.observe(bench(3, 5, 5)) == []
    [(version, result)] = tally.observe(bench(3, 1, 5, "second"))
    assert (version, result) == (3, BenchResult(6, 10))
    assert tally.observe(bench(3, 0, 5, "third")) == [] and tally.result(3) == result
    assert tally.observe(replace(bench(4, 9, 9), mode=Mode.TRAIN)) == [] and tally.result(4) is None


def test_every_outcome_is_measured_whether_it_has_a_reward_or_not():
    rewarded = measures(outcome(1, "canary", 1, 0, 3.0, observed={"edit_made": 1.0}), -1.0, 1.0)
    assert (rewarded["reward"], rewarded["edit_rate"], rewarded["tool_error_rate"]) == (1.0, 1.0, 0.0)
    dropped = measures(outcome(1, "canary", 1, 0, None, exclusion="bot", observed={"tool_error": 1.0}), -1.0, 1.0)
    assert "reward" not in dropped and dropped["tool_error_rate"] == dropped["excluded/bot"] == 1.0
    assert sum(dropped[f"excluded/{reason}"] for reason in OutcomeExclusion) == 1.0


TOLERANCE = Tolerance(rate=0.1, ratio=1.5, alpha=ALPHA)


def usual(random, edit=0.7, tokens=100.0):
    answers = {"edit_rate": float(random.random() < edit), "tokens": tokens * random.lognormal(0, 0.5)}
    return answers | {"latency_ms": 500 * random.lognormal(0, 1.0), "question_rate": 0.0, "tool_error_rate": 0.0}


def test_guardrails_keep_their_level_over_all_measures():
    random, rung = np.random.default_rng(2), 0
    for _ in range(40):
        arms, frozen = ArmGuards(0.5, TOLERANCE), FrozenGuards({"edit_rate": 0.7, "tokens": 113.0}, TOLERANCE, 2.0, 0.2)
        for number in range(200):
            arms.observe(number % 2, str(number), usual(random))
            frozen.observe(str(number), usual(random))
        rung += bool(arms.alerts) + bool(frozen.alerts)
    assert rung <= 2 * ALPHA * 40


@pytest.mark.parametrize(("change", "name"), [({"edit": 0.3}, "edit_rate"), ({"tokens": 300.0}, "tokens")])
def test_guardrails_alert_on_a_changed_measure_and_keep_alerting(change, name):
    random = np.random.default_rng(2)
    arms = ArmGuards(0.5, TOLERANCE)
    frozen = FrozenGuards({"edit_rate": 0.7, "tokens": 113.0}, TOLERANCE, 2.0, None)
    for number in range(500):
        moved = usual(random, **change)
        arms.observe(number % 2, str(number), usual(random) if number % 2 else moved)
        frozen.observe(str(number), moved)
    for guards in (arms, frozen):
        [alert] = guards.alerts
        assert alert.name == name and alert.p_value <= ALPHA and f"{name} is" in str(alert)


def test_replicas_that_still_serve_a_vetoed_version_are_named():
    chain = Chain(RUN.run_id, RUN.branch)
    for version in (0, 1):
        chain.observe(manifest(version))
    veto = decision(chain, GateVerdict.REJECT, 1, "it flatters", "ada", at=5)
    following = DecisionFollowers(veto, head=1, recent_us=10)
    following.observe(ack("a", 1, 5))
    following.observe(ack("b", 0, 5))
    assert following.behind == {"a": 1}
    chain.observe(veto)
    with pytest.raises(VersionError, match="rejected by ada: it flatters"):
        decision(chain, GateVerdict.HOLD, 1, "", "bob", at=6)
    with pytest.raises(VersionError, match="version 7 is not on branch"):
        decision(chain, GateVerdict.REJECT, 7, "", "bob", at=6)


def test_a_trial_and_an_admission_do_not_limit_the_stable_pool():
    chain = Chain(RUN.run_id, RUN.branch)
    chain.observe(manifest(0))
    chain.observe(said(GateVerdict.PROMOTE, 0, 1))
    for verdict in (GateVerdict.CANARY, GateVerdict.ADMIT, GateVerdict.REJECT):
        chain.observe(said(verdict, 1, 2))
    assert chain.gate.limit is not None and chain.gate.limit.verdict is GateVerdict.PROMOTE
    chain.observe(said(GateVerdict.RELEASE, None, 3))
    assert chain.gate.limit is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_low": 1.0, "reward_high": 1.0}, "must be above reward_low"),
        ({"margin": 2.0}, "margin 2 must be below"),
        ({"watch_margin": 3.0}, "watch_margin 3 must be below"),
        ({"ignored": {"speed"}}, "speed is not a measure; the measures are: edit_rate"),
        ({"share": 1.0}, "share"),
        ({"alpha": 0.0}, "alpha"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        GateSettings(**values)
