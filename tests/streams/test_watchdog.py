"""The progress watchdog's rule, and the stream settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.watchdog import Progress, ProgressRule

PLACE = ("topic", 0)


def test_no_progress_while_records_wait_is_a_stall():
    rule = ProgressRule(10.0, 0.0)
    assert rule.observe(1.0, Progress(True, {PLACE: 5}), {PLACE: 9}) is None
    assert rule.observe(10.9, Progress(True, {PLACE: 5}), {PLACE: 9}) is None
    stall = rule.observe(11.0, Progress(True, {PLACE: 5}), {PLACE: 9})
    assert stall is not None
    assert (stall.seconds, stall.waiting) == (10.0, 4)
    assert "4 records wait" in str(stall)


def test_progress_and_idleness_are_no_stall():
    rule = ProgressRule(10.0, 0.0)
    for now in range(0, 100, 5):
        assert rule.observe(now, Progress(True, {PLACE: now}), {PLACE: 1000}) is None
    for now in range(100, 200, 5):
        assert rule.observe(now, Progress(True, {PLACE: 1000}), {PLACE: 1000}) is None


def test_a_long_recovery_is_progress_and_a_stuck_one_is_not():
    rule = ProgressRule(10.0, 0.0)
    for now in range(0, 100, 5):
        assert rule.observe(now, Progress(False, {PLACE: now}), {}) is None
    assert rule.observe(105.0, Progress(False, {PLACE: 95}), {}) is not None


def test_an_unreachable_broker_is_no_stall():
    rule = ProgressRule(10.0, 0.0)
    for now in range(0, 100, 5):
        assert rule.observe(now, Progress(True, {PLACE: 5}), {}) is None


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValidationError, match="a third of session_timeout_s"):
        StreamSettings(session_timeout_s=6, heartbeat_interval_s=3)
    with pytest.raises(ValidationError, match="extra"):
        StreamSettings.model_validate({"exactly_once": True})
