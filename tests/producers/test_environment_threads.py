"""The threads of environments: quick calls share one, slow ones get their own, hung ones are given up and counted."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError

import pytest

from tidemill.producers.environment_threads import EnvironmentThreads, Stalled, TooManyStalled


def running() -> int:
    return sum(thread.name == "tidemill-environment" for thread in threading.enumerate())


def settled(count: int) -> None:
    """Wait until as many threads are left."""
    deadline = time.monotonic() + 10
    while running() != count:
        assert time.monotonic() < deadline, running()
        time.sleep(0.01)


def with_threads(body, limit_s=5.0, most_stalled=2):
    async def main():
        threads = EnvironmentThreads(limit_s, most_stalled)
        try:
            return await body(threads)
        finally:
            threads.close()

    before = running()
    try:
        return asyncio.run(main())
    finally:
        settled(before)


def test_quick_calls_share_a_thread_and_answer_in_place():
    async def body(threads):
        names = await asyncio.gather(*[threads.call(lambda i=i: (i, threading.get_ident())) for i in range(500)])
        return names

    found = with_threads(body)
    assert [index for index, _ in found] == list(range(500))
    assert threading.get_ident() not in {ident for _, ident in found}
    assert len({ident for _, ident in found}) < 5


def test_slow_calls_do_not_wait_for_each_other():
    async def body(threads):
        began = time.monotonic()
        await asyncio.gather(*[threads.call(lambda: time.sleep(0.3)) for _ in range(20)])
        return time.monotonic() - began

    assert with_threads(body) < 3.0, "20 calls of 0.3 s, one after the other, take 6 s"


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ZeroDivisionError(), ZeroDivisionError),
        (TimeoutError(), TimeoutError),
        (StopIteration(), RuntimeError),
        (SystemExit(3), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
        (asyncio.CancelledError(), RuntimeError),
        (CancelledError(), CancelledError),
    ],
)
def test_what_a_call_raises_is_raised_at_its_caller_alone(raised, seen):
    def fail():
        raise raised

    async def body(threads):
        with pytest.raises(seen):
            await threads.call(fail)
        return await threads.call(lambda: 5)

    assert with_threads(body) == 5


def test_a_hung_call_is_given_up_and_others_go_on():
    release = threading.Event()

    async def body(threads):
        hung = asyncio.create_task(threads.call(release.wait))
        await asyncio.sleep(0)
        assert [await threads.call(lambda i=i: i) for i in range(3)] == [0, 1, 2], "while the first one hangs"
        with pytest.raises(Stalled, match=r"no answer within 0\.2 s"):
            await hung
        assert threads.stalled == 1
        release.set()
        while threads.stalled:
            await asyncio.sleep(0.01)

    with_threads(body, limit_s=0.2)


def test_a_caller_that_gives_up_first_leaves_a_call_that_is_counted():
    release = threading.Event()

    async def body(threads):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.call(release.wait), 0.05)
        while not threads.stalled:
            await asyncio.sleep(0.01)
        release.set()
        while threads.stalled:
            await asyncio.sleep(0.01)

    with_threads(body, limit_s=0.2)


def test_past_the_number_of_hung_calls_every_call_raises():
    release = threading.Event()

    async def body(threads):
        found = await asyncio.gather(*[threads.call(release.wait) for _ in range(3)], return_exceptions=True)
        assert sorted(type(error).__name__ for error in found) == ["Stalled", "Stalled", "TooManyStalled"]
        with pytest.raises(TooManyStalled, match=r"start this worker again"):
            await threads.call(lambda: 1)
        release.set()

    with_threads(body, limit_s=0.1, most_stalled=2)
