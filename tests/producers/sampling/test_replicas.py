"""The client of a replica: answers that it accepts, requests that it retries, and answers that it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.producers.conftest import completion_body
from tidemill.producers.config import RolloutSettings
from tidemill.producers.sampling.completion import BadResponse, Sampling, parse_completion
from tidemill.producers.sampling.replicas import ReplicaPool, ReplicaSession, ReplicaUnavailable, open_replica_client
from tidemill.schemas.records import VersionSpan

pytestmark = pytest.mark.anyio

SAMPLING = Sampling(max_tokens=8, temperature=1.0, stop_token_ids=(7,))
HUGE = 10**400


def parsed(body):
    return parse_completion(json.dumps(body).encode(), SAMPLING)


def changed(**changes):
    body = completion_body([5, 6, 7])
    body["choices"][0].update(changes)
    return body


def test_a_completion_is_read():
    found = parsed(completion_body([5, 6, 7], [-1.5, 0.0, -0.25], [[3, 0, 2], [4, 2, 3]], "length"))
    assert found.token_ids == [5, 6, 7] and found.logprobs == [-1.5, 0.0, -0.25]
    assert found.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert found.finish_reason == "length" and found.incarnation == ""


def test_a_completion_names_the_incarnation_of_its_versions():
    assert parsed(changed(weight_incarnation="life")).incarnation == "life"


def test_an_aborted_request_is_not_a_completion():
    with pytest.raises(ReplicaUnavailable):
        parsed(changed(finish_reason="abort"))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"token_ids": []},
        {"token_ids": [5, 6, -1]},
        {"token_ids": [5, 6, 2**32]},
        {"token_ids": [5, 6, True]},
        {"token_ids": [5, 6, 7.0]},
        {"token_ids": list(range(9)), "logprobs": {"token_logprobs": [-1.0] * 9}, "weight_versions": [[0, 0, 9]]},
        {"logprobs": None},
        {"logprobs": []},
        {"logprobs": {"token_logprobs": [-1.0, -1.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, None]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, float("nan")]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, float("-inf")]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, 0.5]}},
        {"logprobs": {"token_logprobs": [-1.0, -1.0, -HUGE]}},
        {"weight_versions": None},
        {"weight_versions": []},
        {"weight_versions": [[0, 0, 2]]},
        {"weight_versions": [[0, 0, 4]]},
        {"weight_versions": [[0, 1, 3]]},
        {"weight_versions": [[0, 0, 2], [1, 1, 3]]},
        {"weight_versions": [[0, 0, 1], [1, 2, 3]]},
        {"weight_versions": [[0, 0, 0], [1, 0, 3]]},
        {"weight_versions": [[0, 2, 3], [1, 0, 2]]},
        {"weight_versions": [[-1, 0, 3]]},
        {"weight_versions": [[HUGE, 0, 3]]},
        {"weight_versions": [["0", 0, 3]]},
        {"weight_versions": [[True, 0, 3]]},
        {"weight_versions": [[0, 0]]},
        {"weight_incarnation": None},
        {"weight_incarnation": 3},
        {"weight_incarnation": "x" * 257},
        {"finish_reason": None},
        {"finish_reason": ["stop"]},
    ],
)
def test_a_wrong_choice_is_refused(changes):
    with pytest.raises(BadResponse):
        parsed(changed(**changes))


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'{"choices":[]}', b'{"choices":[1]}', b"[" * 100_000])
def test_a_wrong_body_is_refused(body):
    with pytest.raises(BadResponse):
        parse_completion(body, SAMPLING)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["token_ids", "logprobs", "weight_versions", "finish_reason", "weight_incarnation"]),
        json_values,
    )
)
def test_hostile_choices_are_refused_or_consistent(changes):
    choice = {
        "token_ids": [1, 2],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "weight_versions": [[0, 0, 2]],
        "finish_reason": "stop",
        **changes,
    }
    try:
        found = parsed({"choices": [choice]})
    except (BadResponse, ReplicaUnavailable):
        return
    covered = [place for span in found.spans for place in range(span.start, span.end)]
    assert covered == list(range(len(found.token_ids))) and len(found.logprobs) == len(found.token_ids)


def test_the_request_contains_every_sampling_option():
    body = json.loads(SAMPLING.request_body([1, 2], None))
    assert body["prompt"] == [1, 2] and body["stop_token_ids"] == [7] and body["return_token_ids"] is True
    assert (body["top_p"], body["top_k"], body["repetition_penalty"], body["logprobs"]) == (1.0, -1, 1.0, 0)
    assert "model" not in body and "seed" not in body
    assert json.loads(Sampling(1, 1.0).request_body([1], "m"))["model"] == "m"


def test_the_pool_spreads_episodes_and_avoids_failing_replicas():
    pool = ReplicaPool(["http://a", "http://b/"], backoff_s=1.0, backoff_limit_s=3.0)
    assert [pool.pick(0.0) for _ in range(4)] == ["http://a", "http://b", "http://a", "http://b"]
    pool.release("http://a")
    assert pool.pick(0.0) == "http://a"
    pool.failed("http://a", now=0.0)
    pool.failed("http://a", now=0.5)
    assert pool.pick(0.9) == "http://b" and pool.pick(0.9) == "http://b"
    assert pool.pick(1.0) == "http://a", "in-flight requests that fail together are one failure"
    pool.failed("http://a", now=1.0)
    pool.failed("http://b", now=1.0)
    assert pool.pick(1.5) is None and pool.next_wake() == 2.0
    pool.failed("http://a", now=3.0)
    assert pool.pick(5.9) == "http://b", "rests no longer than the limit"
    assert pool.pick(6.0) == "http://a"
    pool.succeeded("http://a")
    pool.failed("http://a", now=7.0)
    pool.failed("http://b", now=7.0)
    assert pool.next_wake() == 8.0, "a success is trusted again"


def pool_of(config: RolloutSettings) -> ReplicaPool:
    return ReplicaPool(config.replicas, config.backoff_s, config.backoff_limit_s)


def settings(*addresses, **changes) -> RolloutSettings:
    return RolloutSettings(replicas=list(addresses), backoff_s=0.01, backoff_limit_s=0.05, **changes)


def ask(config: RolloutSettings, prompts=1, within_s=180.0):
    """Return one session's sequential completions, and the session."""

    async def main():
        pool = pool_of(config)
        async with (
            asyncio.timeout(within_s),
            open_replica_client(config) as client,
            ReplicaSession(client, pool) as session,
        ):
            return [await session.complete([1, 2, 3], SAMPLING) for _ in range(prompts)], session

    return asyncio.run(main())


def fixed(body) -> object:
    async def answer(_request, _number):
        return web.json_response(body)

    return answer


def test_a_completion_over_http(new_replica):
    replica = new_replica("r1")
    replica.answer = fixed(completion_body([5, 6, 7]))
    (completion,), session = ask(settings(replica.address))
    assert completion.token_ids == [5, 6, 7]
    assert (session.identity.replica_id, session.identity.region, session.retries) == ("r1", "here", 0)


def test_a_session_keeps_its_replica(new_replica):
    replicas = [new_replica("r1"), new_replica("r2")]
    for replica in replicas:
        replica.answer = fixed(completion_body([5]))
    ask(settings(*[replica.address for replica in replicas]), prompts=5)
    assert sorted(len(replica.requests) for replica in replicas) == [0, 5]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_request_is_retried_after_a_server_error(new_replica, status):
    replica = new_replica()

    async def answer(_request, number):
        return (
            web.json_response(completion_body([5]))
            if number > 3
            else web.Response(status=status, text="engine is dead")
        )

    replica.answer = answer
    _, session = ask(settings(replica.address))
    assert session.retries == 3 and "engine is dead" in session.failures_so_far()


def test_a_failing_replica_is_replaced_by_another(new_replica):
    broken, sound = new_replica("broken"), new_replica("sound")

    async def answer(_request, _number):
        return web.Response(status=500)

    broken.answer, sound.answer = answer, fixed(completion_body([5]))
    _, session = ask(settings(broken.address, sound.address))
    assert session.identity.replica_id == "sound"


def test_a_request_is_retried_after_a_response_cut_short(new_replica):
    replica = new_replica()

    async def answer(request, number):
        if number > 1:
            return web.json_response(completion_body([5]))
        return _Truncated()

    replica.answer = answer
    _, session = ask(settings(replica.address))
    assert session.retries == 1


class _Truncated(web.Response):
    """Announces more bytes than it sends, then closes the connection."""

    def __init__(self):
        super().__init__(body=b'{"choices": [')
        self.headers["content-length"] = "1000"

    async def write_eof(self, data=b""):
        await super().write_eof(data)
        self._req.transport.abort()


def test_a_request_to_a_slow_replica_is_cancelled_and_retried(new_replica):
    replica, never = new_replica(), threading.Event()

    async def answer(_request, number):
        while number == 1 and not never.is_set():
            await asyncio.sleep(0.01)
        return web.json_response(completion_body([5]))

    replica.answer = answer
    _, session = ask(settings(replica.address, request_timeout_s=1))
    never.set()
    # A slow machine may need more than a second for a good answer too.
    assert session.retries == len(replica.requests) - 1 >= 1


def test_a_request_is_retried_until_its_replica_returns(new_replica):
    replica = new_replica()
    replica.answer = fixed(completion_body([5]))
    address = replica.address
    replica.stop()
    back = threading.Timer(0.3, replica.start)
    back.start()
    _, session = ask(settings(address))
    back.join()
    assert session.retries >= 1 and replica.address == address


def test_requests_to_a_lost_replica_are_retried_until_the_callers_deadline(new_replica):
    replica = new_replica()
    address = replica.address
    replica.stop()
    with pytest.raises(TimeoutError):
        ask(settings(address), within_s=0.3)


@pytest.mark.parametrize("answer", [fixed({"choices": []}), fixed([]), fixed({"error": "x"})])
def test_a_wrong_answer_is_not_retried(new_replica, answer):
    replica = new_replica()
    replica.answer = answer
    with pytest.raises(BadResponse, match=r"127\.0\.0\.1"):
        ask(settings(replica.address))
    assert len(replica.requests) == 1


def test_malformed_json_and_client_errors_are_not_retried(new_replica):
    replica = new_replica()

    async def malformed(_request, _number):
        return web.Response(text='{"choices": [')

    async def rejected(_request, _number):
        return web.Response(status=400, text="context too long")

    for answer, reason in ((malformed, "not JSON"), (rejected, "HTTP 400: context too long")):
        replica.answer = answer
        with pytest.raises(BadResponse, match=reason):
            ask(settings(replica.address))


def test_an_invalid_status_is_refused(new_replica):
    replica = new_replica()

    async def single():
        async with open_replica_client(settings(replica.address)) as client:
            return await client.identity(replica.address + "/v1/completions?")

    with pytest.raises((BadResponse, ReplicaUnavailable)):
        asyncio.run(single())


async def test_a_replica_replaced_on_its_port_is_recorded_with_its_new_name(new_replica):
    replica = new_replica("first")
    replica.answer = fixed(completion_body([5]))

    config = settings(replica.address)
    async with open_replica_client(config) as client, ReplicaSession(client, pool_of(config)) as session:
        for name in ("first", "second"):
            replica.replica_id = name
            await session.complete([1], SAMPLING)
            assert session.identity.replica_id == name, "the turn is its own"


async def test_a_deadline_in_the_same_loop_step_as_a_request_timeout_ends_the_wait(new_replica):
    replica, loop = new_replica(), asyncio.get_running_loop()

    async def never(_request, _number):
        await asyncio.sleep(60)
        return web.Response()

    replica.answer = never
    config = settings(replica.address, request_timeout_s=0.3)
    async with open_replica_client(config) as client, ReplicaSession(client, pool_of(config)) as session:
        waiting = asyncio.create_task(asyncio.wait_for(session.complete([1], SAMPLING), 0.3))
        loop.call_later(0.2, time.sleep, 0.3)  # both are due when the loop continues
        ended, _ = await asyncio.wait([waiting], timeout=50)
        waiting.cancel()
    assert ended and isinstance(waiting.exception(), TimeoutError)
