"""Always-valid evidence: exact, within its level if checked after every user, and with the computed power."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.gate.gate_support import arrivals, exact_first_passage, most_observations, peeked_t_test
from tidemill.streams.gate.sequential import (
    BASELINE,
    BETS,
    CANDIDATE,
    Capital,
    Side,
    TwoArms,
    block_shape,
    difference,
    log_ratio,
)

ALPHA = 0.05
observations = st.lists(st.floats(-1, 1, width=32), max_size=30)


def by_hand(values, bound):
    bets = [bet / (1 + bound) for bet in BETS]
    return np.mean([math.prod(1 + bet * (value - bound) for value in values) for bet in bets])


@given(observations, st.floats(-0.9, 0.9))
def test_the_capital_is_the_mean_of_products(values, bound):
    above, below = Capital(bound, Side.ABOVE), Capital(bound, Side.BELOW)
    for value in values:
        above.bet(value)
        below.bet(value)
    assert math.exp(above.log_evidence) == pytest.approx(by_hand(values, bound), rel=1e-9)
    mirrored = by_hand([-value for value in values], -bound)
    assert math.exp(below.log_evidence) == pytest.approx(mirrored, rel=1e-9)
    assert 0 < above.p_value <= 1 and math.log(above.p_value) <= -max(0.0, above.log_evidence) + 1e-9


@pytest.mark.parametrize(("up", "down"), [(0.5, 0.5), (0.3, 0.2), (0.05, 0.4)])
def test_the_expected_capital_is_one_where_the_mean_is_the_bound(up, down):
    """Covers every sequence of six observations, so the test has no randomness."""
    chance = {1.0: up, -1.0: down, 0.0: 1 - up - down}
    for side in Side:
        expected = 0.0
        for values in itertools.product(chance, repeat=6):
            capital = Capital(up - down, side)
            for value in values:
                capital.bet(value)
            expected += math.prod(chance[value] for value in values) * math.exp(capital.log_evidence)
        assert expected == pytest.approx(1.0, abs=1e-12)


@given(observations.filter(bool), st.floats(-1, 1, width=32), st.data())
def test_a_corrected_observation_counts_as_if_it_came_first(values, value, data):
    place = data.draw(st.integers(0, len(values) - 1))
    one, other = Capital(-0.1, Side.BELOW), Capital(-0.1, Side.BELOW)
    for each in values:
        one.bet(each)
    one.correct(values[place], value)
    for each in [*values[:place], value, *values[place + 1 :]]:
        other.bet(each)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-9)


def test_what_would_break_the_guarantee_is_refused():
    capital = Capital(0.0, Side.ABOVE)
    for value in (1.0001, -1.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="outside of"):
            capital.bet(value)
    assert capital.log_evidence == 0.0
    for bound in (-1.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="strictly between -1 and 1"):
            Capital(bound, Side.ABOVE)


def compare(candidate, baseline, share, users, random, margin=0.0):
    """Observe users one by one. Returns whether each capital reached its threshold, and the last one's block count."""
    width = 2.0
    worse, better = Capital(-margin / width, Side.BELOW), Capital(0.0, Side.ABOVE)
    arms = TwoArms(share, difference(width), (worse, better))
    for number, arm in zip(range(users), arrivals(share, random), strict=False):
        arms.observe(arm, str(number), candidate() if arm == CANDIDATE else baseline())
        if worse.p_value <= ALPHA or better.p_value <= ALPHA:
            break
    return worse.p_value <= ALPHA, better.p_value <= ALPHA, arms.blocks


def thumbs(chance, random):
    return lambda: 1.0 if random.random() < chance else -1.0


@pytest.mark.parametrize(("share", "chance"), [(0.5, 0.5), (0.2, 0.8)])
def test_equal_arms_raise_no_more_alarms_than_promised(share, chance):
    random = np.random.default_rng(7)
    runs = [compare(thumbs(chance, random), thumbs(chance, random), share, 800, random) for _ in range(200)]
    for direction in (0, 1):
        assert sum(run[direction] for run in runs) <= ALPHA * 200


def test_a_fixed_horizon_test_fails_if_evaluated_after_every_user():
    """The control: without it, the test above could pass with data in which no test raises an alarm."""
    random = np.random.default_rng(7)
    draw = lambda: np.where(random.random(400) < 0.5, 1.0, -1.0)  # noqa: E731
    alarms = sum(peeked_t_test(draw(), draw()) for _ in range(200))
    assert alarms > 4 * ALPHA * 200


def test_power_equals_the_exact_first_passage_distribution():
    """Blocks of one user of each arm, thumbs up 0.7 against 0.5: the contrast is +1 or -1 with chance 0.35 or 0.15."""
    users, random = 240, np.random.default_rng(3)
    passed, just = exact_first_passage(0.7 * 0.5, 0.3 * 0.5, 0.0, users // 2, ALPHA)
    runs = []
    for _ in range(300):
        capital = Capital(0.0, Side.ABOVE)
        arms = TwoArms(0.5, difference(2.0), (capital,))
        for number in range(users):
            chance = 0.7 if number % 2 == CANDIDATE else 0.5
            arms.observe(number % 2, str(number), thumbs(chance, random)())
            if capital.p_value <= ALPHA:
                runs.append(arms.blocks)
                break
    power = passed[-1]
    assert 0.6 < power < 0.95
    assert len(runs) / 300 == pytest.approx(power, abs=3 * math.sqrt(power * (1 - power) / 300))
    expected = (just * np.arange(len(just))).sum() / power
    assert np.mean(runs) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("up", "down"), [(0.45, 0.05), (0.5, 0.15)])
def test_the_formula_bounds_the_expected_number_of_observations(up, down):
    law = [(1.0, up), (-1.0, down), (0.0, 1 - up - down)]
    most = most_observations(law, 0.0, ALPHA)
    passed, just = exact_first_passage(up, down, 0.0, 150, ALPHA)
    assert passed[-1] > 0.98
    expected = (just * np.arange(151)).sum() + 150 * (1 - passed[-1])
    assert 0.6 * most < expected < most
    assert most_observations([(1.0, 0.5), (-1.0, 0.5)], 0.0, ALPHA) == math.inf


def test_arms_of_any_size_are_matched_in_order():
    assert [block_shape(share) for share in (0.5, 0.2, 0.1, 0.75)] == [(1, 1), (1, 4), (1, 9), (3, 1)]
    seen = []
    capital = Capital(0.0, Side.ABOVE)
    arms = TwoArms(0.34, lambda one, other: seen.append((list(one), list(other))) or 0.0, (capital,))
    for number in range(5):
        arms.observe(BASELINE, f"b{number}", float(number))
    arms.observe(CANDIDATE, "c0", 10.0)
    arms.observe(CANDIDATE, "c1", 11.0)
    assert seen == [([10.0], [0.0, 1.0]), ([11.0], [2.0, 3.0])]
    assert (arms.blocks, arms.count(BASELINE), arms.means()) == (2, 5, (10.5, 2.0))


def test_a_corrected_member_corrects_its_block():
    capital, straight = Capital(0.0, Side.ABOVE), Capital(0.0, Side.ABOVE)
    arms = TwoArms(0.5, difference(2.0), (capital,))
    for arm, name, value in ((CANDIDATE, "a", 1.0), (BASELINE, "b", -1.0), (CANDIDATE, "c", 0.5)):
        arms.observe(arm, name, value)
    arms.observe(CANDIDATE, "a", -0.5)
    arms.observe(CANDIDATE, "c", 0.25)
    straight.bet((-0.5 - -1.0) / 2.0)
    assert capital.log_evidence == pytest.approx(straight.log_evidence)
    assert arms.mean(CANDIDATE) == pytest.approx(-0.125)


def test_ratios_are_clipped_and_have_no_scale():
    ratio = log_ratio(8.0)
    assert ratio([200.0], [100.0]) == pytest.approx(1 / 3) == pytest.approx(-ratio([100.0], [200.0]))
    assert ratio([1e9], [1.0]) == 1.0
    assert (ratio([0.0], [5.0]), ratio([5.0], [0.0]), ratio([0.0], [0.0])) == (-1.0, 1.0, 0.0)
