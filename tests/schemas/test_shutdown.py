"""Signals set an event, wait until the interrupted block ends, or end the process within a block."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tidemill.schemas.shutdown import STOPS, ended_by_signals, signals_deferred, stop_on_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the previous handlers after the test."""
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_sets_the_event(number: signal.Signals):
    stop = stop_on_signals()
    os.kill(os.getpid(), number)
    assert stop.wait(60)


def test_a_second_interrupt_ends_at_once_and_a_second_termination_does_not():
    stop = stop_on_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(60)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_takes_effect_at_the_end_of_the_block():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("end")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_not_lost_to_an_error_of_the_block():
    stop = stop_on_signals()
    with pytest.raises(ValueError, match="own"), signals_deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.is_set()
        raise ValueError("its own")
    assert stop.wait(60)


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_deferred():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_another_thread_leaves_the_handlers_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def look() -> None:
        with signals_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_ends_the_process_within_the_block_and_only_there(number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        signal.raise_signal(number)
    assert ended.value.code == 0 and signal.getsignal(number) is before
