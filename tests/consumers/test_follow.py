"""The follower: it reads on while a move is under way, puts aside what it cannot use, and ends with what failed."""

import asyncio
import threading

import pytest

from tests.records import build
from tidemill.consumers.replica.subscriber import LONGEST_S, Patience, follow
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import SkipDelta, Tick

SKIP = build(SkipDelta, run_id="r", version=1)


def located(record, error=""):
    return ConsumedRecord(Topic.MANIFESTS, 0, 0, 0, None, b"", record, error)


class Log:
    """Batches of records, one a poll; empty polls after them."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def poll(self, timeout_s, max_records):
        if self.batches:
            return self.batches.pop(0)
        threading.Event().wait(timeout_s)
        return []


class Subscriber:
    """Notes what it is given; its moves wait for `gate`."""

    def __init__(self, stop, enough):
        self.stop, self.enough, self.received, self.advances = stop, enough, [], 0
        self.gate = asyncio.Event()

    def receive(self, record):
        self.received.append(record)
        if len(self.received) == self.enough:
            self.gate.set()

    async def advance(self):
        self.advances += 1
        await asyncio.wait_for(self.gate.wait(), 20)
        if len(self.received) >= self.enough:
            self.stop.set()


def test_records_are_read_while_a_move_is_under_way():
    async def run():
        stop = asyncio.Event()
        subscriber = Subscriber(stop, enough=3)
        log = Log([located(SKIP)], [located(SKIP), located(SKIP)])
        await asyncio.wait_for(follow(subscriber, log, lambda *_: None, stop, poll_interval_s=0.01), 30)
        return subscriber

    subscriber = asyncio.run(run())
    assert subscriber.received == [SKIP] * 3 and subscriber.advances == 1


def test_what_cannot_be_used_is_put_aside_and_the_rest_is_followed():
    buried = []

    async def run():
        stop = asyncio.Event()
        subscriber = Subscriber(stop, enough=1)
        log = Log([located(None, "no record"), located(Tick("s", 0)), located(SKIP)])
        following = follow(subscriber, log, lambda _, reason: buried.append(reason), stop, poll_interval_s=0.01)
        await asyncio.wait_for(following, 30)

    asyncio.run(run())
    assert buried == ["no record", "a Tick is not followed by a replica"]


@pytest.mark.parametrize("which", ["acting", "checking"])
def test_a_failure_ends_the_follower_with_its_reason(which):
    class Failing(Subscriber):
        async def advance(self):
            if which == "acting":
                raise RuntimeError("the engine is gone")

    def check():
        if which == "checking":
            raise RuntimeError("the engine is gone")

    async def run():
        stop = asyncio.Event()
        following = follow(Failing(stop, 1), Log(), lambda *_: None, stop, check=check, poll_interval_s=0.01)
        await asyncio.wait_for(following, 30)

    with pytest.raises(RuntimeError, match="the engine is gone"):
        asyncio.run(run())


def test_patience_doubles_up_to_a_limit_and_starts_anew():
    patience, now, waits = Patience(), 0.0, []
    assert patience.may_try(now)
    for _ in range(9):
        patience.failed(now)
        assert not patience.may_try(now)
        begun = now
        while not patience.may_try(now):
            now += 0.25
        waits.append(now - begun)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == LONGEST_S
    patience.succeeded()
    assert patience.may_try(now)
    patience.failed(now)
    assert patience.may_try(now + 0.5)
