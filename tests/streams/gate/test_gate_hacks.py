"""Both live reward hacks reproduce with the accounting that allowed them, raise the alert, and go with the right one.

The shares are those of hard tasks after 400 steps, from 71 % edits at the start.
"""

from __future__ import annotations

import pytest

from tests.streams.gate.hack_toy import MAPS, course


def last_of(accounting):
    seen = list(course(MAPS[accounting]))
    assert seen[0][0].on_hard["edit"] == pytest.approx(0.71), "every course starts alike"
    rung = {alert.name for _, found in seen for alert in found}
    return seen[-1][0].on_hard, rung


def test_dropping_broken_calls_teaches_to_break_them():
    shares, rung = last_of("broken calls are dropped")
    assert shares["edit"] < 0.03 and shares["broken"] > 0.4
    assert "edit_rate" in rung


def test_free_questions_teach_to_ask():
    shares, rung = last_of("questions are free")
    assert shares["question"] > 0.95
    assert "question_rate" in rung and "tool_error_rate" not in rung


def test_an_accounting_without_an_escape_teaches_to_edit_and_rings_nothing():
    shares, rung = last_of("every answer counts")
    assert shares["edit"] > 0.95
    assert rung == set()
