"""Stalls although there is work, and a main loop that hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log import group
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.guard import IdleTimes, ReadingWatch
from tidemill.schemas.log.liveness import EXIT_HUNG, Deadline

HERE = ("topic", 3)
DEADLINE_S = 180.0


def test_no_progress_with_waiting_records_is_reported_once_per_timeout():
    still: IdleTimes[str] = IdleTimes(10)
    assert still.observe("a", 1, True, 0) is None
    assert still.observe("a", 1, True, 9) is None
    assert still.observe("b", 1, True, 9) is None
    assert still.observe("a", 1, True, 10) == 10
    assert still.observe("a", 1, True, 11) is None
    assert still.observe("a", 1, True, 20) == 10


def test_progress_and_idleness_are_no_stall():
    still: IdleTimes[str] = IdleTimes(10)
    assert all(still.observe("a", n, True, n) is None for n in range(0, 100, 9))
    assert all(still.observe("a", 99, False, n) is None for n in range(100, 200, 9))
    assert still.observe("a", 99, True, 205) is None, "the clock starts when there is something to do"
    still.forget()
    assert still.observe("a", 99, True, 300) is None


def polled(watch: ReadingWatch, begin: float, end: float) -> float:
    """Poll ten times a second. Returns the time of the last due poll."""
    due = begin
    for tenth in range(int(begin * 10), int(end * 10)):
        if watch.due(tenth / 10):
            due = tenth / 10
    return due


def test_a_stall_names_the_partition_its_position_and_its_end():
    watch = ReadingWatch(20.0, 0.0)
    assert not watch.observe(HERE, 5, 9, polled(watch, 0, 6))
    assert not watch.observe(HERE, 5, 9, polled(watch, 6, 24))
    assert "topic[3] is stalled: 4 records wait at offset 5" in watch.observe(HERE, 5, 9, polled(watch, 24, 31))


def test_a_reader_that_is_not_polled_is_not_stalled():
    watch = ReadingWatch(20.0, 0.0)
    watch.observe(HERE, 5, 9, polled(watch, 0, 6))
    assert watch.due(3600.0), "whoever polls was busy for an hour"
    assert not watch.observe(HERE, 5, 9, 3600.0)
    assert not watch.observe(HERE, 5, 9, polled(watch, 3600, 3619))


def test_a_log_that_does_not_answer_is_reported_once_and_so_is_its_return():
    watch = ReadingWatch(20.0, 0.0)
    watch.observe(HERE, 5, 9, polled(watch, 0, 6))
    assert watch.answered(6.0) is None
    assert watch.unanswered(polled(watch, 6, 20)) is None
    assert watch.unanswered(polled(watch, 20, 32)) == pytest.approx(24.0, abs=6.0)
    assert watch.unanswered(polled(watch, 32, 60)) is None
    assert watch.answered(60.0) == pytest.approx(54.0)
    assert not watch.observe(HERE, 5, 9, 60.0), "nothing could be read meanwhile"
    assert watch.answered(61.0) is None


def test_a_partition_that_another_member_had_meanwhile_is_not_stalled():
    member = GroupConsumer(KafkaSettings(bootstrap="127.0.0.1:9"), "test", [Topic.TASKS], client_id="test-member")
    watch, partition = member._guard._watch, TopicPartition(*HERE, 5)
    member._consumer.incremental_assign([partition])
    watch.observe(HERE, 5, 9, 0.0)
    member._revoke(member._consumer, [partition])
    assert not watch.observe(HERE, 5, 9, 3600.0), "it came back an hour later"
    assert watch.observe(HERE, 5, 9, 7200.0)
    member.close()


def test_a_committed_offset_that_the_brokers_do_not_tell_is_an_error_and_not_the_beginning(monkeypatch):
    class Refused(group.Consumer):  # type: ignore[misc]  # the client's class is not typed
        def committed(self, partitions, timeout):
            error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            (tp,) = partitions
            return [SimpleNamespace(topic=tp.topic, partition=tp.partition, offset=-1, error=error)]

    monkeypatch.setattr(group, "Consumer", Refused)
    kafka = KafkaSettings(bootstrap="127.0.0.1:9")
    with (
        closing(GroupConsumer(kafka, "test", [Topic.TASKS], client_id="test-member")) as member,
        pytest.raises(KafkaException, match="authorization"),
    ):
        member._begin(member._consumer, [TopicPartition("tidemill.tasks", 0)])


def test_no_timeout_checks_nothing():
    watch = ReadingWatch(0.0, 0.0)
    assert not any(watch.due(float(n)) for n in range(1000))


def test_a_beat_is_overdue_after_the_timeout_or_what_was_asked_for():
    deadline = Deadline(10.0, 1.0, 0.0)
    assert [deadline.overdue(float(n)) for n in range(1, 10)] == [None] * 9
    assert deadline.overdue(10.0) == 10.0
    deadline.beat(10.0, 60.0)
    assert all(deadline.overdue(float(n)) is None for n in range(11, 70))
    assert deadline.overdue(70.0) == 60.0
    deadline.beat(70.0, 0.5)
    assert [deadline.overdue(float(n)) for n in range(71, 80)] == [None] * 9, "never less than the timeout"


def test_a_process_that_slept_is_not_overdue():
    deadline = Deadline(10.0, 1.0, 0.0)
    assert deadline.overdue(3600.0) is None, "nobody looked for an hour: it was stopped as a whole"
    assert [deadline.overdue(3600.0 + n) for n in range(1, 10)] == [None] * 9
    assert deadline.overdue(3610.0) == 10.0


ROLE = """
import sys, threading, time
from tidemill.schemas.log.liveness import Liveness
with Liveness("the test role", float(sys.argv[1])) as liveness:
    for n in range(10):
        liveness.beat(f"round {n}")
    print("turning", flush=True)
    exec(sys.argv[2])
print("ended", flush=True)
"""


def start(timeout_s: float, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ROLE, str(timeout_s), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def hung() -> list[subprocess.Popen[str]]:
    """Two processes that hang: one waits for a lock, one is in native code that keeps the interpreter."""
    lock, native = "lock = threading.Lock(); lock.acquire(); lock.acquire()", "ctypes.PyDLL(None).sleep(600)"
    return [start(3.0, lock), start(2.0, f"import ctypes; {native}")]


def test_a_process_that_was_stopped_and_goes_on_is_not_hung(hung):
    """It is halted while the hanging processes reach their time limits."""
    paused = start(5.0, "[(liveness.beat(), time.sleep(0.1)) for _ in range(15)]")
    assert paused.stdout is not None
    assert paused.stdout.readline() == "turning\n"
    paused.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    paused.send_signal(signal.SIGCONT)
    out, said = paused.communicate(timeout=DEADLINE_S)
    assert (paused.returncode, out) == (0, "ended\n"), said


def test_a_loop_that_hangs_ends_the_process_and_says_where(hung):
    _, said = hung[0].communicate(timeout=DEADLINE_S)
    assert hung[0].returncode == EXIT_HUNG
    assert "the test role hangs: no progress for" in said
    assert "its last activity: round 9" in said
    assert "most recent call first" in said


def test_native_code_that_keeps_the_interpreter_ends_the_process_too(hung):
    _, said = hung[1].communicate(timeout=DEADLINE_S)
    assert hung[1].returncode != 0
    assert "most recent call first" in said


def test_no_timeout_watches_nothing():
    free = start(0.0, "time.sleep(0.5)")
    assert free.communicate(timeout=DEADLINE_S)[0] == "turning\nended\n"
    assert free.returncode == 0
