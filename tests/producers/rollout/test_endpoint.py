"""The OpenAI endpoint of the rollout worker: the `openai` client unchanged, hostile requests, keys, disconnects."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.producers.rollout.agents import last, policy_of
from tests.waiting import until_async
from tidemill.producers.environments.base import Endpoint
from tidemill.producers.rollout.endpoint import LARGEST_BODY, AgentEndpoint
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import BadResponse

if TYPE_CHECKING:
    import openai  # each process of the suite imports this file, and one of them uses it

pytestmark = pytest.mark.anyio

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
HELLO = [{"role": "user", "content": "hello"}]


def echo(context: str) -> str:
    return f"you said {last(context)}"


def calling(context: str) -> str:
    """Call the tool once, then answer with its result."""
    if "<|im_start|>tool" in context:
        return f"it is {last(context, 'tool')}"
    return 'let me see <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@asynccontextmanager
async def rollout(say: Callable[[str], Any] = echo, **limits: Any) -> AsyncIterator[tuple[RolloutPolicy, Endpoint]]:
    async with AgentEndpoint() as endpoint:
        policy = policy_of(say, endpoint.open, **limits)
        yield policy, policy.endpoint


def client_of(at: Endpoint) -> openai.AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=at.base_url, api_key=at.api_key)


@asynccontextmanager
async def http(at: Endpoint) -> AsyncIterator[Callable[..., Any]]:
    """Give a function that sends a request and returns its status and JSON."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {at.api_key}"}) as session:

        async def send(path: str, body: Any = None, method: str = "POST", **more: Any) -> tuple[int, Any]:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            async with session.request(method, at.base_url + path, data=data, **more) as response:
                text = await response.text()
                return response.status, json.loads(text) if text.startswith("{") else text

        yield send


async def test_the_openai_client_talks_and_contexts_grow() -> None:
    async with rollout() as (policy, at), client_of(at) as client:
        messages: list[Any] = list(HELLO)
        for _ in range(3):
            made = await client.chat.completions.create(model="any", messages=messages)
            messages += [made.choices[0].message, {"role": "user", "content": "again"}]
        assert [m.content for m in messages[1::2]] == ["you said hello", "you said again", "you said again"]
        assert made.model == "any" and made.choices[0].finish_reason == "stop"
        assert made.usage is not None and made.usage.completion_tokens == len("you said again") + 1
        [context] = policy.contexts.all
        assert len(context.turns) == 3 and made.usage.total_tokens == len(context.ids)
        assert [m["content"] for m in policy.conversation[-2:]] == ["again", "you said again"]
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_stream_has_the_same_content() -> None:
    async with rollout() as (policy, at), client_of(at) as client:
        told = await client.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [each async for each in told]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "you said hello"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len("you said hello") + 1
        assert len(policy.turns) == 1


async def said_of(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> dict[str, Any]:
    """Return the assistant's message, built from the events if it is streamed."""
    if not stream:
        made = await client.chat.completions.create(model="m", **asked)
        return made.choices[0].message.model_dump(exclude_none=True)
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    async for event in await client.chat.completions.create(model="m", stream=True, **asked):
        delta = event.choices[0].delta
        message["role"] = delta.role or message["role"]
        message["content"] += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.index == len(message["tool_calls"])
            message["tool_calls"].append(call.model_dump(include={"id", "type", "function"}))
    return message if message["tool_calls"] else {k: message[k] for k in ("role", "content")}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(stream: bool) -> None:
    async with rollout(calling) as (policy, at), client_of(at) as client:
        messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        said = await said_of(client, stream, messages=messages, tools=[ADD])
        [call] = said["tool_calls"]
        assert said["content"] == "let me see" and call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
        said = await said_of(client, stream, messages=messages, tools=[ADD])
        assert said == {"role": "assistant", "content": "it is 5"}
        assert len(policy.contexts.all) == 1, "the second request goes on from the first"


async def test_sampling_of_the_agent_is_dropped() -> None:
    async with rollout() as (policy, at), client_of(at) as client:
        made = await client.chat.completions.create(
            model="m", messages=HELLO, seed=1, temperature=0, top_p=0.1, stop=["said"], user="u",
            presence_penalty=1, extra_body={"repetition_penalty": 3, "guided_regex": "x"},
        )  # fmt: skip
        assert made.choices[0].message.content == "you said hello"
        short = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=3)
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("you", "length")
        assert not policy.failure


BAD_FIELDS: list[tuple[str, Any]] = [
    ("n", 2),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("response_format", {"type": "json_object"}),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [{"role": "boss", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [3]),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]),
    ("tools", [{"type": "function"}]),
    ("tools", [ADD, ADD]),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_completion_tokens", "many"),
    ("logprobs", True),
    ("stream", "yes"),
    ("stream_options", 3),
    ("model", 3),
]


async def test_an_unsupported_option_is_refused_by_name_and_the_next_request_is_answered() -> None:
    async with rollout() as (policy, at), http(at) as send:
        for field, value in BAD_FIELDS:
            body = {"model": "m", "messages": HELLO, "stream": field == "stream_options", field: value}
            status, answer = await send("/chat/completions", body)
            assert status == 400 and field in answer["error"]["message"], (field, value, answer)
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["param"] in (field, "stream")
        assert not policy.turns and not policy.failure
        status, answer = await send("/chat/completions", {"messages": HELLO})
        assert status == 200 and answer["choices"][0]["message"]["content"] == "you said hello"


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b'"hello"',
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
]


async def test_invalid_bodies_are_refused() -> None:
    async with rollout() as (policy, at), http(at) as send:
        for body in BAD_BODIES:
            for path in ("/chat/completions", "/outcome"):
                status, answer = await send(path, body)
                assert status == 400 and answer["error"]["message"], body[:40]
                assert answer["error"]["param"] is None, "no field is at fault"
        pair = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\\\ud800"}]}'
        status, answer = await send("/chat/completions", pair)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "you said \U0001f600 \\ud800")
        assert policy.posted is None


async def test_a_body_that_is_too_large_also_if_compressed() -> None:
    async with rollout() as (policy, at), http(at) as send:
        large = json.dumps({"messages": [{"role": "user", "content": "x" * LARGEST_BODY}]}).encode()
        status, answer = await send("/chat/completions", large)
        assert status == 413 and str(LARGEST_BODY) in answer["error"]["message"]
        status, _ = await send("/chat/completions", gzip.compress(large), headers={"content-encoding": "gzip"})
        assert status == 413
        assert not policy.failure and (await send("/chat/completions", {"messages": HELLO}))[0] == 200


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "id", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
_fields = st.dictionaries(
    st.sampled_from(
        ["messages", "tools", "tool_choice", "n", "stream", "max_tokens", "model", "rewards", "metrics", "x"]
    ),
    _json_values,
    max_size=5,
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["/chat/completions", "/outcome"]), _fields), max_size=10))
def test_any_json_is_answered_and_the_next_valid_request_too(requests: list[tuple[str, dict[str, Any]]]) -> None:
    async def play() -> None:
        async with rollout(max_turns=1000) as (policy, at), http(at) as send:
            for path, body in requests:
                status, answer = await send(path, body)
                assert status in (200, 400) and isinstance(answer, dict | str), (path, body, answer)
            policy.posted, policy._closed = None, False
            assert (await send("/chat/completions", {"messages": HELLO}))[0] == 200

    asyncio.run(play())


async def test_keys() -> None:
    """A key is valid only for its own rollout, until the episode ends."""
    import openai

    async with AgentEndpoint() as endpoint:
        one, two = policy_of(echo, endpoint.open), policy_of(lambda _: "two", endpoint.open)
        assert one.endpoint.base_url == two.endpoint.base_url and one.endpoint.api_key != two.endpoint.api_key
        assert one.endpoint == one.endpoint
        async with client_of(one.endpoint) as first, client_of(two.endpoint) as second:
            said = [await c.chat.completions.create(model="m", messages=HELLO) for c in (first, second)]
            assert [s.choices[0].message.content for s in said] == ["you said hello", "two"]
            assert len(one.turns) == len(two.turns) == 1
            one.closed = True
            endpoint.close(one)
            with pytest.raises(openai.AuthenticationError, match="over"):
                await first.chat.completions.create(model="m", messages=HELLO)
            assert len(one.turns) == 1
            await second.chat.completions.create(model="m", messages=HELLO)
        wrong = [
            "Bearer x",
            two.endpoint.api_key,
            "",
            f"Basic {two.endpoint.api_key}",
            f"Bearer {two.endpoint.api_key}x",
        ]
        async with aiohttp.ClientSession() as session:
            for header in wrong:
                for path in ("/chat/completions", "/outcome", "/models", "/other"):
                    at = two.endpoint.base_url + path
                    async with session.post(at, json={"messages": HELLO}, headers={"authorization": header}) as made:
                        assert made.status == 401 and (await made.json())["error"]["code"] == "invalid_api_key"


async def test_an_unused_endpoint_opens_no_port() -> None:
    async with AgentEndpoint() as endpoint:
        endpoint.close(policy_of(echo, endpoint.open))
        assert endpoint._serving is None


async def test_other_paths() -> None:
    async with rollout() as (_, at), http(at) as send:
        for method, path in (("GET", "/chat/completions"), ("POST", "/models"), ("POST", "/embeddings"), ("GET", "")):
            status, answer = await send(path, method=method)
            assert status == 404 and f"no {method}" in answer["error"]["message"]


async def test_a_full_context() -> None:
    import openai

    async with rollout(max_context_tokens=120) as (policy, at), client_of(at) as client:
        messages: list[Any] = list(HELLO)
        with pytest.raises(openai.BadRequestError) as error:
            for _ in range(9):
                made = await client.chat.completions.create(model="m", messages=messages)
                messages += [made.choices[0].message, {"role": "user", "content": "x" * 30}]
        assert error.value.code == "context_length_exceeded"
        assert policy.turns and policy.full and not policy.failure


async def test_a_failed_generation() -> None:
    import openai

    def broken(_context: str) -> str:
        raise BadResponse("no logprobs")

    async with rollout(broken) as (policy, at), client_of(at) as client:
        for _ in range(2):  # the second call is not sampled: the rollout has failed
            with pytest.raises(openai.InternalServerError, match="no logprobs") as error:
                await client.chat.completions.create(model="m", messages=HELLO)
            assert error.value.status_code == 502
            assert error.value.response.request.headers["x-stainless-retry-count"] == "0"
        assert "no logprobs" in policy.failure and len(policy.session.contexts) == 1


async def test_an_internal_fault_is_a_server_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_context: str) -> str:
        raise KeyError("a defect")

    async with rollout(broken) as (policy, at), http(at) as send:
        status, answer = await send("/chat/completions", {"messages": HELLO})
        assert status == 500 and "a defect" in answer["error"]["message"]
        assert "a defect" in policy.failure, "the agent may go on as if nothing was; the rollout has failed"
    assert "a defect" in caplog.text


async def test_too_many_calls() -> None:
    async with rollout(max_turns=2) as (policy, at), http(at) as send:
        statuses = [(await send("/chat/completions", {"messages": HELLO}))[0] for _ in range(4)]
        assert statuses == [200, 200, 502, 502] and "max_turns" in policy.failure


def one_that_never_answers() -> tuple[asyncio.Event, Callable[[str], Any]]:
    """Return an event that is set when the policy is asked, and its turns: none."""
    asked = asyncio.Event()

    async def never(_context: str) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    return asked, never


async def test_a_client_that_disconnects_cancels_its_generation() -> None:
    asked, never = one_that_never_answers()
    async with rollout(never) as (policy, at), http(at) as send:
        request = asyncio.create_task(send("/chat/completions", {"messages": HELLO}))
        await until_async(asked.is_set)
        request.cancel()
        await until_async(lambda: policy.session.cancelled)
        assert "cancelled" in policy.failure


async def test_the_end_of_the_episode_cancels_generations_and_fails_nothing() -> None:
    asked, never = one_that_never_answers()
    async with AgentEndpoint() as endpoint:
        policy = policy_of(never, endpoint.open)
        async with http(policy.endpoint) as send:
            request = asyncio.create_task(send("/chat/completions", {"messages": HELLO}))
            await until_async(asked.is_set)
            policy.closed = True
            endpoint.close(policy)
            status, answer = await asyncio.wait_for(request, 180)
        assert status == 401 and "over" in answer["error"]["message"]
        assert policy.session.cancelled == 1 and not policy.failure


async def test_concurrent_calls() -> None:
    async with rollout() as (policy, at), client_of(at) as client:
        asked = [[{"role": "user", "content": f"helper {n}"}] for n in range(40)]
        made = await asyncio.gather(*(client.chat.completions.create(model="m", messages=a) for a in asked))
        assert [m.choices[0].message.content for m in made] == [f"you said helper {n}" for n in range(40)]
        assert len(policy.contexts.all) == 40 and len({m.id for m in made}) == 40


RESULT = {"rewards": {"correct": 1, "style": 0.25}, "success": True, "metrics": {"steps": 3}}


async def test_a_posted_result() -> None:
    async with rollout() as (policy, at), http(at) as send, client_of(at) as client:
        await send("/chat/completions", {"messages": HELLO})
        assert await client.post("/outcome", cast_to=object, body=RESULT) == {"reward": 1.25}
        score = policy.posted
        assert policy.has_result.is_set() and not score.fault() and score.total == 1.25
        assert [(r.name, r.value, r.weight) for r in score.rewards] == [("correct", 1.0, 1.0), ("style", 0.25, 1.0)]
        assert score.success is True and score.metrics == {"steps": 3.0}
        status, answer = await send("/outcome", RESULT)
        assert status == 400 and "already" in answer["error"]["message"]
        status, answer = await send("/chat/completions", {"messages": HELLO})
        assert status == 400 and "posted" in answer["error"]["message"]
        assert len(policy.turns) == 1 and not policy.failure


BAD_RESULTS: list[Any] = [
    {},
    {"rewards": {}},
    {"rewards": 1.0},
    {"rewards": [1.0]},
    {"rewards": {"a": "1"}},
    {"rewards": {"a": True}},
    {"rewards": {"a": None}},
    {"rewards": {"": 1}},
    {"rewards": {"a" * 65: 1}},
    {"rewards": {str(n): 1 for n in range(65)}},
    {"rewards": {"a": 10**400}},
    {"rewards": {"a": 1}, "success": 1},
    {"rewards": {"a": 1}, "metrics": {"b": "x"}},
    {"rewards": {"a": 1}, "more": 1},
]


async def test_invalid_results_are_refused() -> None:
    async with rollout() as (policy, at), http(at) as send:
        bodies = [json.dumps(each).encode() for each in BAD_RESULTS]
        bodies += [b'{"rewards": {"a": %s}}' % number for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999")]
        for body in bodies:
            status, answer = await send("/outcome", body)
            assert status == 400 and policy.posted is None, (body[:60], answer)
        assert (await send("/outcome", RESULT))[0] == 200


async def test_turns_that_are_not_trained_are_part_of_no_segment() -> None:
    policy = policy_of(echo)
    user = [{"role": "system", "content": "play a user"}, *HELLO]
    asked = await policy.chat(user, trained=False)
    said = await policy.chat([{"role": "user", "content": asked.content}])
    again = await policy.chat([*user, asked.message, {"role": "user", "content": said.content}], trained=False)
    assert again.content == "you said you said you said hello"
    [context] = policy.contexts.all
    assert len(context.turns) == 1 and len(policy.turns) == 3
    assert policy.conversation[-1]["content"] == "you said you said hello"
