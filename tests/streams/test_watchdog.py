"""The progress watchdog's rule, and the stream settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tidemill.schemas.config import KafkaSettings
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.runner.watchdog import Watchdog

PLACE = ("topic", 0)


def stalls(looks) -> list[str]:
    """Return the watchdog's answer to each check (seconds, ready, position, end or None), with a timeout of 10 s."""
    watchdog = Watchdog(KafkaSettings(), 10.0, lambda: (False, {}), lambda _stall: None)
    return [
        watchdog.stalled(now, (ready, {PLACE: position}), {} if end is None else {PLACE: end})
        for now, ready, position, end in looks
    ]


def test_no_progress_while_records_wait_is_a_stall():
    first, second, third = stalls([(1.0, True, 5, 9), (10.9, True, 5, 9), (11.0, True, 5, 9)])
    assert (first, second) == ("", "")
    assert third.startswith("no progress for 10 s while 4 records wait: the worker is stalled")


@pytest.mark.parametrize(
    "looks",
    [
        [(now, True, now, 1000) for now in range(0, 100, 5)],
        [(now, True, 1000, 1000) for now in range(0, 100, 5)],
        [(now, False, now, None) for now in range(0, 100, 5)],
        [(now, True, 5, None) for now in range(0, 100, 5)],
    ],
    ids=["it reads", "it is at the end", "it recovers", "the broker does not answer"],
)
def test_progress_and_idleness_are_no_stall(looks):
    assert not any(stalls(looks))


def test_a_recovery_without_progress_is_a_stall():
    first, second = stalls([(95.0, False, 95, None), (105.0, False, 95, None)])
    assert (first, "in the recovery of the state" in second) == ("", True)


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValidationError, match="a third of session_timeout_s"):
        StreamSettings(session_timeout_s=6, heartbeat_interval_s=3)
    with pytest.raises(ValidationError, match="extra"):
        StreamSettings.model_validate({"exactly_once": True})


def test_a_transaction_that_the_brokers_would_abort_is_refused():
    StreamSettings(transaction_s=20)
    with pytest.raises(ValidationError, match="transaction_s 12 and commit_interval_s 1 must be at most 10"):
        StreamSettings(runner=RunnerName.TRANSACTIONAL, transaction_s=12)
