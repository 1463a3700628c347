"""The router over HTTP: each answer is recorded before its end is sent, also if replicas or clients fail."""

import asyncio
import threading

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from tests.producers.router_support import (
    KEY,
    PRODUCT,
    PROMPT,
    TOKENS,
    FakeReplica,
    chat_format,
    chunks,
    decision,
    events,
    rig,
)
from tests.records import build
from tests.waiting import until_async
from tidemill.producers.edge.request_handler import Recorder
from tidemill.producers.outbox import Outbox
from tidemill.producers.product.signing import BadToken, Pseudonyms, Signer
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import HttpSettings
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.records import Interaction, SamplingParameters, VersionSpan

pytestmark = pytest.mark.anyio

ASK = {"prompt": "hello", "max_tokens": 3, "user": "zoe", "metadata": {"session_id": "s1"}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "user": "zoe"}
# Contains letters that are not hexadecimal digits, so that it cannot occur in a hash by chance.
ZOE = Pseudonyms(PRODUCT).of("zoe")


def check_recorded(made, interaction_id, body):
    (segment,) = made.segments
    prompt = PROMPT if "prompt" in body else chat_format().open(body["messages"])
    start = len(prompt)
    assert made.interaction_id == interaction_id and (made.run_id, made.branch) == ("r", "main")
    assert segment.ids().tolist() == prompt + TOKENS and segment.mask().tolist() == [0] * start + [1, 1, 1]
    assert segment.sampled_logprobs().tolist() == [0] * start + [-0.5, -0.5, -0.5]
    assert segment.spans == [VersionSpan(4, start, start + 2), VersionSpan(5, start + 2, start + 3)]
    assert (made.prompt_tokens, made.sampled_tokens, made.version_min, made.version_max) == (start, 3, 4, 5)
    assert (made.user_id, made.arm, made.propensity, made.finish_reason) == (ZOE, "stable", 1.0, "stop")
    assert (made.replica_id, made.region, made.incarnation) == ("s0", "here", "life")
    assert 0 < made.first_token_ms <= made.latency_ms and made.served_at > 1.7e15


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_a_whole_answer_is_recorded_and_signed(path, body):
    async with rig() as router, router.post(body, path) as response:
        answer = await response.json()
        token = answer["tidemill"]["interaction"]
        assert response.status == 200 and response.headers["x-tidemill-interaction"] == token
        (made,) = router.outbox.written
        check_recorded(made, Signer(PRODUCT).verify(token, ZOE), body)
        with pytest.raises(BadToken):
            Signer(PRODUCT).verify(token, Pseudonyms(PRODUCT).of("eve"))
        assert made.consent is False and made.session_id == body.get("metadata", {}).get("session_id", "")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_a_streamed_answer_is_recorded_before_its_last_chunk(path, body):
    async with rig() as router:
        router.outbox.hold = asyncio.Event()
        async with router.post({**body, "stream": True}, path) as response:
            token, seen = response.headers["x-tidemill-interaction"], b""
            while b'"b"' not in seen:
                seen += await response.content.readany()
            await until_async(router.outbox.asked.is_set)
            assert router.outbox.written == [] and b'"c"' not in seen
            router.outbox.hold.set()
            found = events((seen + await response.content.read()).decode())
        *_, last, done = found
        assert last["tidemill"] == {"interaction": token} and done == "[DONE]"
        assert all("tidemill" not in one for one in found[:-2])
        check_recorded(router.outbox.written[0], Signer(PRODUCT).verify(token, ZOE), body)


async def test_a_deadline_during_a_slow_write_does_not_separate_a_record_from_its_answer():
    async with rig(request_timeout_s=1) as router:
        router.outbox.hold = asyncio.Event()
        asking = asyncio.create_task(router.asked(ASK))
        while not router.outbox.asked.is_set():
            if asking.done():  # the replica had no second: this machine is slow
                assert (await asking)[0] == 504
                asking = asyncio.create_task(router.asked(ASK))
            await asyncio.sleep(0.005)
        await asyncio.sleep(1.1)
        router.outbox.hold.set()
        assert (await asking)[0] == 200 and len(router.outbox.written) == 1


async def test_fields_needed_only_for_recording_are_not_sent_to_the_client():
    async with rig() as router:
        _, plain = await router.asked(ASK)
        _, full = await router.asked({**ASK, "logprobs": 0, "return_token_ids": True})
        streamed = await router.streamed(ASK)
    (choice,) = plain["choices"]
    assert choice.keys() == {"index", "text", "finish_reason", "logprobs"} and choice["logprobs"] is None
    assert full["choices"][0]["token_ids"] == TOKENS and full["choices"][0]["logprobs"]
    assert not any("token_ids" in one for chunk in streamed[:-1] for one in chunk["choices"])
    sent = [request["return_token_ids"] for request in router.replicas[0].requests]
    assert sent == [True] * 3 and router.replicas[0].requests[0]["logprobs"] == 0


async def test_the_user_is_recorded_as_a_pseudonym_and_not_sent_to_the_replica():
    async with rig() as router:
        await router.asked(ASK)
    (request,) = router.replicas[0].requests
    assert not {"user", "metadata"} & request.keys() and "zoe" not in str(router.outbox.written[0])


@pytest.mark.parametrize(("said", "recorded"), [("yes", True), ("no", False), (None, True)])
async def test_consent_is_from_the_request_or_the_settings(said, recorded):
    async with rig(consent_default=True) as router:
        await router.asked(ASK, **({"x_tidemill_consent": said} if said else {}))
        assert router.outbox.written[0].consent is recorded


BAD = [
    (b"{", {}, 400, None),
    (b"[]", {}, 400, None),
    (b"[" * 100_000, {}, 400, None),
    ({}, {}, 400, "prompt"),
    ({**ASK, "prompt": ["a", "b"]}, {}, 400, "prompt"),
    ({**ASK, "prompt": [True]}, {}, 400, "prompt"),
    ({**ASK, "n": 2}, {}, 400, "n"),
    ({**ASK, "best_of": 2}, {}, 400, "best_of"),
    ({**ASK, "suffix": "x"}, {}, 400, "suffix"),
    ({**ASK, "echo": True}, {}, 400, "echo"),
    ({**ASK, "seed": 3}, {}, 400, "seed"),
    ({**ASK, "cache_salt": "x"}, {}, 400, "cache_salt"),
    ({**ASK, "user": 5}, {}, 400, "user"),
    ({**ASK, "user": ""}, {}, 400, "user"),
    ({**ASK, "metadata": []}, {}, 400, "metadata"),
    ({**ASK, "metadata": {"session_id": "x" * 300}}, {}, 400, "metadata.session_id"),
    ({**ASK, "stream": "yes"}, {}, 400, "stream"),
    ({**ASK, "logprobs": True}, {}, 400, "logprobs"),
    ({**ASK, "stream_options": {"x": 1}}, {}, 400, "stream_options"),
    ({**ASK, "temperature": 0.7}, {}, 400, "temperature"),
    ({**ASK, "top_p": 0.9}, {}, 400, "top_p"),
    ({**ASK, "prompt": [5] * 20}, {}, 400, "prompt"),
    (ASK, {"x_tidemill_consent": "maybe"}, 400, "x-tidemill-consent"),
    (ASK, {"authorization": "Bearer wrong"}, 401, None),
    (ASK, {"authorization": f"Basic {KEY}"}, 401, None),
    ({**ASK, "prompt": "x" * 3000}, {}, 413, None),
]


async def test_bad_requests_are_answered_in_openais_format_and_reach_no_replica():
    async with rig(max_body_bytes=2000, max_prompt_tokens=10) as router:
        for body, headers, status, parameter in BAD:
            if isinstance(body, bytes):
                body = body[:1900]
            got, answer = await router.asked(body, **headers)
            assert (got, answer["error"]["param"]) == (status, parameter), (body, answer)
            assert answer["error"]["message"] and answer["error"]["type"]
        assert router.replicas[0].requests == [] == router.outbox.written
        assert (await router.asked(ASK))[0] == 200


async def test_a_body_that_does_not_arrive_ends_in_a_timeout():
    async def never():
        yield b'{"prompt"'
        await asyncio.sleep(30)

    async with rig(http=HttpSettings(body_timeout_s=0.3)) as router:
        headers = {"authorization": f"Bearer {KEY}"}
        async with router.session.post("/v1/completions", data=never(), headers=headers) as response:
            assert response.status == 408 and "did not arrive" in (await response.json())["detail"]
        await until_async(lambda: b"tidemill_router_in_flight 0.0" in generate_latest(router.router.metrics))


async def test_a_prompt_that_only_the_replica_can_count_is_refused_before_anything_is_sent():
    async with rig(max_prompt_tokens=2) as router:
        status, answer = await router.asked({**ASK, "stream": True})
        assert status == 400 and answer["error"]["param"] == "prompt" and router.outbox.written == []


async def test_the_replicas_own_refusal_is_passed_on():
    async def told(replica, _request, _body):
        return replica.json({"error": {"message": "too long", "type": "BadRequestError", "param": "prompt"}}, 400)

    async with rig(told=told) as router:
        assert await router.asked(ASK) == (
            400,
            {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}},
        )


async def test_sampling_that_the_logprobs_do_not_describe_is_served_untrained_if_configured():
    async with rig(other_sampling="serve_untrained") as router:
        assert (await router.asked({**ASK, "temperature": 0}))[0] == 200
        (made,) = router.outbox.written
        assert (made.sampled_tokens, made.version_min) == (0, -1)
        assert made.segments[0].ids().tolist() == PROMPT + TOKENS and not any(made.segments[0].mask())
        assert router.replicas[0].requests[0]["temperature"] == 0
        assert made.sampling == SamplingParameters(temperature=0.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_fails_before_its_answer_is_replaced(stream):
    async def told(replica, request, body):
        if replica.replica_id == "s0":
            return replica.json({"error": "starting"}, 503)
        return await replica.stream(request, body) if body["stream"] else replica.whole(body)

    async with rig(stable=2, told=told) as router:
        for _ in range(6):
            async with router.post({**ASK, "stream": stream}) as response:
                assert response.status == 200 and await response.read()
        assert {made.replica_id for made in router.outbox.written} == {"s1"} and len(router.outbox.written) == 6


async def test_a_stream_that_ends_before_its_first_chunk_is_requested_from_another_replica():
    async def told(replica, request, body):
        if replica.replica_id == "s1":
            return await replica.stream(request, body)
        empty = web.StreamResponse()
        await empty.prepare(request)
        return empty

    async with rig(stable=2, told=told) as router:
        assert (await router.streamed(ASK))[-1] == "[DONE]"
        assert [made.replica_id for made in router.outbox.written] == ["s1"]


async def test_the_router_waits_for_a_single_replica_that_returns():
    async def told(replica, _request, body):
        return replica.whole(body) if len(replica.requests) > 2 else replica.json({}, 500)

    async with rig(told=told) as router:
        assert (await router.asked(ASK))[0] == 200 and len(router.outbox.written) == 1


async def test_without_a_replica_the_deadline_ends_the_wait():
    async with rig(request_timeout_s=0.3, pools={"stable": ["http://127.0.0.1:1"]}) as router:
        status, answer = await router.asked(ASK)
        assert status == 504 and answer["error"]["type"] == "timeout_error" and router.outbox.written == []


async def test_an_interrupted_answer_is_recorded_as_failed_and_ends_with_an_error():
    async def told(replica, request, body):
        return await replica.stream(request, body, ends=False)

    async with rig(told=told) as router:
        found = await router.streamed(ASK)
        assert found[-1]["error"]["code"] == 503 and "[DONE]" not in found
        (made,) = router.outbox.written
        assert (made.finish_reason, made.sampled_tokens) == ("failed", 2)
        assert made.segments[0].spans == [VersionSpan(4, 3, 5)]


async def test_a_client_that_disconnects_leaves_a_record_and_ends_the_request_at_the_replica():
    async with rig() as router:
        (replica,) = router.replicas
        replica.go_on.clear()
        async with router.post({**ASK, "stream": True}) as response:
            seen = b""
            while b'"b"' not in seen:
                seen += await response.content.readany()
            response.close()
        await until_async(lambda: router.outbox.written)
        (made,) = router.outbox.written
        assert (made.finish_reason, made.sampled_tokens) == ("abandoned", 2)
        assert made.segments[0].spans == [VersionSpan(4, 3, 5)] and (made.version_min, made.version_max) == (4, 4)
        await until_async(replica.aborted.is_set)


async def test_the_router_waits_for_the_record_of_a_client_that_disconnected():
    """The router ends after `drain`, and with it everything that the log has not acknowledged."""
    async with rig() as router:
        router.outbox.hold = asyncio.Event()
        async with router.post({**ASK, "stream": True}) as response:
            await until_async(router.outbox.asked.is_set)
            response.close()
        await until_async(lambda: router.router.metrics.in_flight._value.get() == 0)
        draining = asyncio.create_task(router.router.drain())
        await asyncio.sleep(0)  # it begins
        assert not draining.done() and router.outbox.written == []
        router.outbox.hold.set()
        await draining
        assert [made.finish_reason for made in router.outbox.written] == ["stop"]


async def test_a_client_that_disconnects_before_an_answer_leaves_no_record():
    async def told(replica, _request, _body):
        try:
            await asyncio.sleep(60)
        finally:
            replica.aborted.set()

    async with rig(told=told) as router:
        (replica,) = router.replicas
        asking = asyncio.create_task(router.asked(ASK))
        await until_async(lambda: replica.requests)
        asking.cancel()
        await until_async(replica.aborted.is_set)
        await until_async(lambda: not router.router.unfinished)
        assert router.outbox.written == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_written_to_the_log_is_not_served(stream):
    async with rig(log_rest_s=600) as router:
        router.outbox.failing = True
        async with router.post({**ASK, "stream": stream}) as response:
            text = await response.text()
        assert "could not be recorded" in text and "[DONE]" not in text and '"c"' not in text
        assert response.status == (200 if stream else 503)
        before = len(router.replicas[0].requests)
        assert (await router.asked(ASK))[0] == 503 and len(router.replicas[0].requests) == before
        async with router.session.get("/healthz") as health:
            assert health.status == 503
        router.outbox.failing = False
        router.router.recorder._rests_until = float("-inf")
        async with router.session.get("/healthz") as health:  # otherwise a load balancer would never send a request
            assert (health.status, (await health.json())["log"]) == (200, "failing")
        assert (await router.asked(ASK))[0] == 200 and len(router.outbox.written) == 1
        async with router.session.get("/healthz") as health:
            assert health.status == 200


class StuckLog:
    """A producer whose first flush waits for `answers`, and then fails."""

    def __init__(self) -> None:
        self.answers, self.sent, self.flushed = threading.Event(), [], 0

    def send(self, _topic: Topic, record: Interaction, *, key: str) -> None:
        self.sent.append(key)

    def flush(self) -> None:
        self.flushed += 1
        if self.flushed == 1:
            assert self.answers.wait(30)
            raise DeliveryError("no broker")


async def test_the_late_failure_of_an_interaction_is_not_that_of_the_next_one():
    log = StuckLog()
    outbox = Outbox(log, Topic.INTERACTIONS, lambda record: record)
    recorder = Recorder(outbox, timeout_s=0.05, rest_s=0.0)
    with pytest.raises(DeliveryError, match="no acknowledgement in time"):
        await recorder.write(build(Interaction, interaction_id="late"))
    assert recorder.failing
    log.answers.set()
    await outbox._sending
    await recorder.write(build(Interaction, interaction_id="next"))
    assert not recorder.failing and log.sent == ["late", "next"]
    outbox.close()


async def test_an_unrecorded_answer_is_served_without_an_interaction_if_configured():
    async with rig(on_log_failure="serve_unrecorded") as router:
        router.outbox.failing = True
        for _ in range(2):
            status, answer = await router.asked(ASK)
            assert status == 200 and "tidemill" not in answer
        found = await router.streamed(ASK)
        assert found[-1] == "[DONE]" and "tidemill" not in found[-2]
        async with router.session.get("/metrics") as metrics:
            assert 'tidemill_router_unrecorded_total{end="served"} 3.0' in await metrics.text()


async def test_the_arm_recorded_is_the_pool_that_answered():
    async with rig(canary=1) as router:
        router.router.canary.observe(decision("canary", 7, share=1.0))
        await router.asked(ASK)
        (made,) = router.outbox.written
        assert (made.arm, made.propensity, made.replica_id) == ("canary", 1.0, "c1")
        router.router.canary.observe(decision("reject", 7))
        await router.asked(ASK)
        assert (router.outbox.written[1].arm, router.outbox.written[1].propensity) == ("stable", 1.0)


async def test_the_stable_pool_answers_if_the_canary_pool_does_not():
    async def told(replica, _request, body):
        return replica.json({}, 500) if replica.replica_id == "c1" else replica.whole(body)

    async with rig(canary=1, told=told) as router:
        router.router.canary.observe(decision("canary", 7, share=0.6))
        for user in range(20):
            assert (await router.asked({**ASK, "user": f"u{user}"}))[0] == 200
        made = router.outbox.written
        assert {one.replica_id for one in made} == {"s0"} and len(made) == 20
        assert {(one.arm, round(one.propensity, 9)) for one in made} == {("stable", 0.4), ("fallback", 0.6)}


async def test_too_many_requests_at_once_are_refused():
    async with rig(max_concurrent_requests=2) as router:
        router.replicas[0].go_on.clear()
        held = [asyncio.create_task(router.streamed(ASK)) for _ in range(2)]
        await until_async(lambda: len(router.router.unfinished) == 2)
        status, answer = await router.asked(ASK)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        router.replicas[0].go_on.set()
        await asyncio.gather(*held)
        assert (await router.asked(ASK))[0] == 200


@pytest.mark.parametrize(
    "damage",
    [
        {"logprobs": {"token_logprobs": [-0.5]}},
        {"logprobs": None},
        {"token_ids": [-1, 2, 3]},
        {"weight_versions": None},
        {"weight_versions": [[4, 0, 1], [5, 2, 3]]},
        {"weight_versions": [[4, 0, 2]]},
        {"weight_incarnation": 5},
        {"finish_reason": None},
    ],
)
async def test_an_inconsistent_answer_is_never_trained(damage):
    async def told(replica, _request, _body):
        choice = {"index": 0, "text": "abc", "logprobs": {"token_logprobs": [-0.5] * 3}, "token_ids": TOKENS,
                  "finish_reason": "stop", "weight_versions": [[4, 0, 3]], "prompt_token_ids": PROMPT}  # fmt: skip
        return replica.json({"choices": [{**choice, **damage}]})

    async with rig(told=told) as router:
        status, _ = await router.asked(ASK)
        assert status in (200, 502)
        assert all(one.finish_reason == "failed" and one.sampled_tokens == 0 for one in router.outbox.written)
        assert len(router.outbox.written) == (status == 200)


async def test_the_models_are_listed_without_the_replicas_paths():
    async with rig() as router:
        async with router.session.get("/v1/models") as refused:
            assert refused.status == 401
        async with router.session.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}) as response:
            assert (await response.json())["data"][0]["id"] == "tidemill"
            assert "secret" not in await response.text()


@pytest.mark.parametrize("listed", [{}, {"data": None}, {"data": ["tidemill"]}, {"data": [None]}])
async def test_an_invalid_list_of_models_is_the_replicas_fault(listed, monkeypatch, caplog):
    async def models(replica, request):
        return replica.json(listed)

    monkeypatch.setattr(FakeReplica, "models", models)

    signed = {"authorization": f"Bearer {KEY}"}
    async with rig() as router, router.session.get("/v1/models", headers=signed) as response:
        assert response.status == 503
    assert "the list of models is not valid" in caplog.text


def test_the_chunks_of_the_fake_replica_are_those_of_a_real_one():
    """A version is reported where it begins and at the end, as in `tests/consumers/test_replica_server.py`."""
    told = [choice["weight_versions"] for chunk in chunks({"prompt": PROMPT, "logprobs": 0})
            for choice in chunk["choices"] if "weight_versions" in choice]  # fmt: skip
    assert told == [[[4, 0, 1]], [[4, 0, 2], [5, 2, 3]]]


@pytest.mark.parametrize("failing", [500, 400, None])
async def test_neither_prompts_nor_users_nor_keys_are_logged(failing, caplog):
    caplog.set_level("DEBUG")

    async def told(replica, request, body):
        if failing and len(replica.requests) == 1:
            return replica.json({"error": {"message": f"bad {body['prompt']}"}}, failing)
        return await replica.stream(request, body, ends=False)

    async with rig(told=told) as router:
        router.outbox.failing = True
        async with router.post({**ASK, "prompt": "a secret", "user": "grace", "stream": True}) as response:
            await response.read()
    assert "secret" not in caplog.text and "grace" not in caplog.text and KEY not in caplog.text
    assert failing == 400 or "tidemill" in caplog.text, "nothing was logged at all"
