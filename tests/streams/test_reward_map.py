"""The signal-to-reward map: each rule of it, and that the order of signals never matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import SignalKind
from tidemill.streams.join.config import JoinSettings, RewardMap, SignalRule, TargetRate
from tidemill.streams.join.reward_map import Signal, map_version, reward_of, standing
from tidemill.streams.runner.worker import feedback_join

THUMB, RETRY, UNDO = SignalKind.THUMB, SignalKind.RETRY, SignalKind.UNDO
KEPT, MADE, ASKED = SignalKind.EDIT_KEPT_SOON, SignalKind.EDIT_MADE, SignalKind.QUESTION_ASKED
LATENCY, TOOL_ERROR = SignalKind.LATENCY, SignalKind.TOOL_ERROR


def signal(kind, value, event_id="e", observed_at=1, corrects=None) -> Signal:
    return Signal(event_id, kind, value, observed_at, corrects)


def rule(weight=1.0, **changes) -> SignalRule:
    return SignalRule(horizon_s=10, weight=weight, **changes)


def reward(rules, *signals, **changes):
    return reward_of(RewardMap(rules=rules, **changes), signals).reward


def test_the_reward_is_the_weighted_sum():
    rules = {THUMB: rule(0.5), RETRY: rule(-0.25)}
    result = reward_of(RewardMap(rules=rules), [signal(RETRY, 1.0, "b"), signal(THUMB, 1.0, "a")])
    assert result.reward == 0.25
    assert [(signal.event_id, contribution) for signal, contribution in result.uses] == [("a", 0.5), ("b", -0.25)]


def test_the_reward_stays_within_bounds():
    rules = {THUMB: rule(3.0)}
    assert reward(rules, signal(THUMB, 1.0)) == 1.0
    assert reward(rules, signal(THUMB, -1.0)) == -1.0
    assert reward(rules, signal(THUMB, -1.0), low=-2, high=2) == -2.0


@pytest.mark.parametrize(
    ("reading", "value", "read"),
    [
        ("linear", 0.3, 0.3),
        ("clipped", 0.9, 0.75),
        ("clipped", 0.1, 0.25),
        ("threshold", 0.5, 0.75),
        ("threshold", 0.49, 0.25),
    ],
)
def test_readings(reading, value, read):
    rules = {KEPT: rule(reading=reading, threshold=0.5, low=0.25, high=0.75)}
    assert reward(rules, signal(KEPT, value)) == read


def test_no_signal_gives_the_reward_of_the_setting_or_none():
    assert reward({THUMB: rule()}) is None
    assert reward({THUMB: rule()}, no_signal=-0.25) == -0.25
    assert reward({THUMB: rule()}, signal(RETRY, 1.0)) is None


def test_a_measured_zero_is_a_reward():
    assert reward({KEPT: rule()}, signal(KEPT, 0.0)) == 0.0


def test_reports_about_every_answer_alone_give_no_reward():
    rules = {ASKED: rule(-0.6), LATENCY: rule(-0.01, alone=False), THUMB: rule()}
    assert reward(rules, signal(ASKED, 0.0, "a"), signal(LATENCY, 2.0, "b")) is None
    assert reward(rules, signal(ASKED, 0.0, "a"), signal(LATENCY, 2.0, "b"), signal(THUMB, 1.0, "c")) == 0.98


def test_by_default_a_broken_tool_call_and_a_question_lower_the_reward():
    assert reward_of(RewardMap(), [signal(TOOL_ERROR, 1.0)]).reward == -1.0
    assert reward_of(RewardMap(), [signal(ASKED, 1.0), signal(MADE, 0.0, "m")]).reward == -0.6
    assert reward_of(RewardMap(), [signal(MADE, 1.0), signal(LATENCY, 3.0, "l")]).reward is None


def test_the_latest_vote_of_a_kind_counts():
    rules = {THUMB: rule()}
    assert reward(rules, signal(THUMB, 1.0, "b", 5), signal(THUMB, -1.0, "a", 6)) == -1.0
    assert reward(rules, signal(THUMB, 1.0, "b", 5), signal(THUMB, -1.0, "a", 5)) == 1.0


def test_corrections_replace_and_withdraw():
    first = signal(THUMB, 1.0, "a", 9)
    assert reward({THUMB: rule()}, first, signal(THUMB, -1.0, "b", 2, corrects="a")) == -1.0
    assert reward({THUMB: rule()}, first, signal(THUMB, None, "b", 2, corrects="a")) is None
    chain = [first, signal(THUMB, -1.0, "b", 2, corrects="a"), signal(THUMB, None, "c", 3, corrects="b")]
    assert reward({THUMB: rule()}, *chain) is None


def test_a_correction_of_another_kind_corrects_nothing():
    rules = {THUMB: rule(), RETRY: rule(-0.5)}
    assert reward(rules, signal(THUMB, 1.0, "a"), signal(RETRY, 1.0, "b", corrects="a")) == 0.5


def test_observed_includes_signals_without_weight():
    result = reward_of(RewardMap(rules={THUMB: rule()}), [signal(THUMB, 1.0), signal(LATENCY, 3.0, "l")])
    assert result.observed == {"thumb": 1.0, "latency": 3.0}
    assert [signal.kind for signal, _ in result.uses] == [THUMB]


def target(*signals):
    rules = {THUMB: rule(0.0), TOOL_ERROR: rule(-0.5)}
    return reward_of(RewardMap(rules=rules, target_rate=TargetRate(rate=0.25)), signals)


def test_target_rate():
    assert target(signal(KEPT, 1.0, "k"), signal(MADE, 1.0, "m")).reward == 0.75
    assert target(signal(KEPT, 0.2, "k"), signal(MADE, 1.0, "m")).reward == -0.25
    assert target(signal(MADE, 1.0)).reward == -0.25
    assert target(signal(MADE, 0.0)).reward == 0.0
    assert target(signal(THUMB, 1.0)).reward is None
    assert target(signal(MADE, 1.0, "m"), signal(TOOL_ERROR, 1.0, "t")).reward == -0.75


@given(st.floats(0.05, 0.95), st.floats(0.0, 1.0))
def test_at_the_target_rate_showing_more_gains_nothing(rate, accepted):
    settings = RewardMap(rules={}, target_rate=TargetRate(rate=rate))
    shown = signal(MADE, 1.0, "m")
    yes = reward_of(settings, [shown, signal(KEPT, 1.0, "k")]).reward
    no = reward_of(settings, [shown]).reward
    assert accepted * yes + (1 - accepted) * no == pytest.approx(accepted - rate, abs=1e-12)


EVENTS = st.builds(
    Signal,
    event_id=st.sampled_from("abcdef"),
    kind=st.sampled_from([THUMB, RETRY]),
    value=st.sampled_from([1.0, -1.0, None]),
    observed_at=st.integers(1, 3),
    corrects=st.sampled_from([None, None, "a", "b", "c"]),
)


@given(st.lists(EVENTS, unique_by=lambda event: event.event_id), st.randoms())
def test_the_order_of_signals_does_not_matter(signals, random):
    settings = RewardMap(rules={THUMB: rule(), RETRY: rule(-0.5)})
    shuffled = list(signals)
    random.shuffle(shuffled)
    assert reward_of(settings, signals) == reward_of(settings, shuffled)
    assert standing(signals) == standing(shuffled)


def test_the_version_depends_only_on_the_content_of_the_map():
    assert map_version(RewardMap()) == map_version(RewardMap())
    rules = {THUMB: rule(1.0)}
    versions = [
        map_version(RewardMap(rules=rules)),
        map_version(RewardMap(rules={THUMB: rule(0.5)})),
        map_version(RewardMap(rules=rules, no_signal=0.0)),
        map_version(RewardMap(rules=rules, target_rate=TargetRate())),
        map_version(RewardMap(rules=rules, name="other")),
    ]
    assert len(set(versions)) == len(versions)
    assert versions[-1].startswith("other-")
    reordered = RewardMap(rules={RETRY: rule(), THUMB: rule()})
    assert map_version(reordered) == map_version(RewardMap(rules={THUMB: rule(), RETRY: rule()}))


def test_a_map_with_thumbs_alone_gets_a_note():
    (note,) = RewardMap(rules={THUMB: rule(), LATENCY: rule(0.0)}).notes()
    assert "thumbs are the only reward" in note
    assert RewardMap().notes() == []


def test_the_notes_of_a_map_are_logged(caplog: pytest.LogCaptureFixture):
    feedback_join(RunSettings(), JoinSettings(map=RewardMap(rules={THUMB: rule()})))
    assert "thumbs are the only reward" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rules": {}}, "no kind of signal has weight"),
        ({"low": 1.0, "high": 1.0}, "must be below"),
        ({"no_signal": 2.0}, "outside of the bounds"),
        ({"no_signal": float("nan")}, "finite number"),
        ({"target_rate": {"rate": 0.25}}, "count twice"),
        ({"target_rate": {"rate": 1.0}}, "less than 1"),
        ({"rules": {"thump": {"horizon_s": 1}}}, "thump|Input should be"),
        ({"rules": {"thumb": {"horizon_s": 0, "weight": 1}}}, "greater than 0"),
        ({"rules": {"thumb": {"horizon_s": 1, "weight": float("inf")}}}, "finite"),
        ({"rules": {"thumb": {"horizon_s": 1, "weight": 1, "low": 2}}}, "is above high"),
        ({"weights": {}}, "Extra inputs"),
    ],
)
def test_unusable_maps_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        RewardMap(**fields)
