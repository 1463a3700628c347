"""The gateway's pure parts: rate caps, settings, and parsing of JSON."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge.events import Problem, TokenBuckets, parse_json
from tidemill.producers.edge.gateway import Health
from tidemill.producers.feedback.event import LogUnreachable

pytestmark = pytest.mark.anyio

HASH = "a" * 64


def test_a_bucket_grants_its_burst_and_then_its_rate():
    buckets = TokenBuckets(rate=2.0, burst=4)
    assert [buckets.take("ann", 1, 10.0) for _ in range(4)] == [0.0] * 4
    assert buckets.take("ann", 1, 10.0) == 0.5
    assert buckets.take("bob", 4, 10.0) == 0.0
    assert buckets.take("ann", 1, 10.5) == 0.0
    assert buckets.take("ann", 3, 10.5) == 1.5


def test_a_bucket_holds_no_more_than_its_burst_after_any_pause():
    buckets = TokenBuckets(rate=1.0, burst=10)
    buckets.take("ann", 10, 0.0)
    buckets.take("bob", 1, 0.0)
    assert buckets.take("bob", 10, 9.0) == 0.0
    assert buckets.take("bob", 1, 9.0) == 1.0


def test_more_than_a_bucket_ever_holds_is_an_error():
    with pytest.raises(ValueError, match="3 tokens at once"):
        TokenBuckets(1.0, 2).take("ann", 3, 0.0)


STEPS = st.lists(
    st.tuples(st.floats(0, 3), st.sampled_from(["ann", "bob", "eve"]), st.integers(1, 5)), min_size=1, max_size=60
)


@given(STEPS, st.sampled_from([0.5, 1.0, 3.0]), st.integers(5, 8))
def test_no_key_gets_more_than_burst_and_rate_in_any_span_and_the_returned_wait_is_enough(steps, rate, burst):
    buckets, now = TokenBuckets(rate, burst), 0.0
    granted: list[tuple[float, str, int]] = []
    for pause, key, count in steps:
        now += pause
        wait = buckets.take(key, count, now)
        if wait:
            now += wait + 1e-9
            assert buckets.take(key, count, now) == 0.0
        granted.append((now, key, count))
    for key in ("ann", "bob", "eve"):
        mine = [(at, count) for at, who, count in granted if who == key]
        for first in range(len(mine)):
            for last in range(first, len(mine)):
                total = sum(count for _, count in mine[first : last + 1])
                assert total <= burst + rate * (mine[last][0] - mine[first][0]) + 1e-6


def test_a_full_bucket_is_forgotten_and_a_used_one_is_kept():
    buckets = TokenBuckets(rate=1.0, burst=10)
    for number in range(1000):
        buckets.take(f"u{number}", 10, 0.0)
    assert len(buckets._buckets) == 1000
    buckets.take("late", 1, 9.9)
    assert len(buckets._buckets) == 1001
    assert buckets.take("u500", 10, 9.9) > 0
    buckets.take("late", 1, 10.1)
    assert len(buckets._buckets) == 1
    assert buckets.take("u500", 10, 10.1) == 0.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"api_keys": {"a b": HASH}}, "the name 'a b'"),
        ({"api_keys": {"shop": "my-key-in-clear"}}, "shop: not a SHA-256 in hex"),
        ({"api_keys": {"shop": HASH, "web": HASH}}, "two names have the same API key"),
        ({"max_batch": 3000}, "could never be sent"),
        ({"key_rate": 0}, "greater than 0"),
        ({"port": 70_000}, "less than or equal to 65535"),
        ({"secret": "x"}, "Extra inputs"),
    ],
)
def test_unusable_settings_are_refused(values: dict, said: str):
    with pytest.raises(ValidationError, match=said) as refused:
        GatewaySettings(**values)
    assert "my-key-in-clear" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' comes twice"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' comes twice"),
        (b'{"a": 1, "\\u0061": 3}', "'a' comes twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\x00", "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_a_body_that_two_parsers_could_read_differently_is_refused(body: bytes, said: str):
    with pytest.raises(Problem, match=said) as refused:
        parse_json(body)
    assert refused.value.status == 400
    assert len(refused.value.detail) < 200


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_a_problem(body: bytes):
    try:
        parse_json(body)
    except Problem as problem:
        assert problem.status == 400


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_json_is_read_as_it_is(tree):
    assert parse_json(json.dumps(tree).encode()) == tree


class CountedQueue:
    """Replaces the queue, and counts the requests to the broker."""

    def __init__(self) -> None:
        self.asked = 0

    def ask_partitions(self, _timeout_s: float) -> int:
        self.asked += 1
        raise LogUnreachable("no broker")


async def test_a_flood_of_health_checks_asks_the_log_once():
    queue = CountedQueue()

    health = Health(queue)
    found = await asyncio.gather(*(health.wrong() for _ in range(50)))
    assert set(found) == {"no broker of the log answers"}
    assert queue.asked == 1


def test_waiting_whole_seconds_is_waiting_long_enough():
    waits = [Problem(429, "too many", retry_after_s=s).retry_after_s for s in (0.01, 1.0, 1.01, 59.5)]
    assert waits == [1, 1, 2, 60]
