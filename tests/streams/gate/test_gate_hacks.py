"""Both reward hacks appear with the reward maps that allowed them, raise the alert, and disappear with the right map.

The shares are those on hard tasks after 400 steps; at the start, 71 % of the actions are edits.
"""

from __future__ import annotations

import pytest

from tests.streams.gate.hack_toy import MAPS, course


def last_of(accounting):
    seen = list(course(MAPS[accounting]))
    assert seen[0][0].on_hard["edit"] == pytest.approx(0.71), "every course starts alike"
    rung = {alert.name for _, found in seen for alert in found}
    return seen[-1][0].on_hard, rung


def test_dropping_broken_calls_teaches_broken_calls():
    shares, rung = last_of("broken calls are dropped")
    assert shares["edit"] < 0.03 and shares["broken"] > 0.4
    assert "edit_rate" in rung


def test_questions_without_a_cost_teach_questions():
    shares, rung = last_of("questions are free")
    assert shares["question"] > 0.95
    assert "question_rate" in rung and "tool_error_rate" not in rung


def test_a_complete_reward_map_teaches_edits_and_raises_no_alert():
    shares, rung = last_of("every answer counts")
    assert shares["edit"] > 0.95
    assert rung == set()
