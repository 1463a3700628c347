"""OpenEnv servers: their protocol over a small server, their faults, and the action of each turn."""

import asyncio
import json
import re
import socket
import time
from dataclasses import replace
from itertools import islice

import pytest
from aiohttp import web

from tests.producers.environments.openenv_server import OpenEnvServer, observed
from tests.waiting import until
from tidemill.producers.environments.base import (
    ContextFull,
    EnvironmentFailed,
    Reply,
    Split,
    TaskError,
    TaskQuery,
    split_of,
)
from tidemill.producers.environments.check import ScriptedPolicy, task_of
from tidemill.producers.environments.find import UnknownEnvironment, options_json
from tidemill.producers.environments.openenv import MOST_BYTES, OpenEnv

pytestmark = pytest.mark.anyio

FAMILY = OpenEnv()


@pytest.fixture(scope="module")
def server():
    with OpenEnvServer() as running:
        yield running


def opened(server, **options):
    return FAMILY.member(server.url).open({"timeout_s": 100, **options})


def drawn(environment, count=1, seed=0):
    return list(islice(environment.tasks(TaskQuery(seed)), count))


def played(environment, draft, *texts, most=64, **more):
    policy = ScriptedPolicy(texts, most, **more)
    score = asyncio.run(environment.play(task_of(environment, "openenv", draft), policy))
    return score, policy


def number_of(draft):
    return draft.asks.removeprefix("Guess ")


def reason(environment, draft, *texts):
    with pytest.raises(EnvironmentFailed) as raised:
        played(environment, draft, *texts)
    return str(raised.value)


def test_a_conversation_is_steps_and_their_observations(server):
    environment = opened(server, success_at=0.5)
    (draft,) = drawn(environment)
    score, policy = played(environment, draft, "1", number_of(draft))
    assert score.total == 0.75 and score.success is True and score.metrics == {"steps": 2.0, "done": 1.0}
    assert [(message["role"], message["content"]) for message in policy.conversation] == [
        ("user", draft.asks),
        ("assistant", "1"),
        ("user", "Wrong"),
        ("assistant", number_of(draft)),
    ]
    assert played(environment, draft, "1")[0].total == -1.5


def test_the_reward_is_the_sum_or_the_last(server):
    (draft,) = drawn(opened(server))
    for options, total, success in (
        ({}, 0.5, None),
        ({"success_at": 0.5}, 0.5, True),
        ({"success_at": 0.6}, 0.5, False),
        ({"reward": "last", "success_at": 1}, 1.0, True),
    ):
        score, _ = played(opened(server, **options), draft, "1", "2", number_of(draft))
        assert (score.total, score.success) == (total, success) and not score.fault()


def test_turns_are_bounded(server):
    environment = opened(server, turns=3)
    (draft,) = drawn(environment)
    score, policy = played(environment, draft, "no", most=3)
    assert draft.max_turns == len(policy.requests) == 3 and score.metrics == {"steps": 3.0, "done": 0.0}


def test_a_full_context_keeps_the_rewards_so_far(server):
    class Short(ScriptedPolicy):
        async def chat(self, messages, **more):
            if len(messages) > 4:
                raise ContextFull("no room")
            return await super().chat(messages, **more)

    environment = opened(server, success_at=0.5)
    (draft,) = drawn(environment)
    score = asyncio.run(environment.play(task_of(environment, "openenv", draft), Short(["no"], 64)))
    assert score.total == -0.5 and score.success is False and score.metrics["done"] == 0.0


def test_tasks_are_the_servers_first_observations_for_their_seeds(server):
    environment = opened(server)
    drafts = drawn(environment, 40)
    assert drawn(environment, 40) == drafts and drawn(environment, 2, seed=1) != drafts[:2]
    assert all(re.fullmatch(r"Guess \d+", draft.asks) for draft in drafts)
    assert {split_of(draft.asks) for draft in drafts} == set(Split)
    assert len({draft.payload for draft in drafts}) == 40


async def test_tasks_are_drawn_within_a_running_loop(server):
    found = drawn(opened(server), 2)
    assert found == drawn(opened(server), 2)


def test_numbered_tasks_are_drawn_once_each(server):
    environment = opened(server, task_parameter="index", task_count=20, reset={"seed": 3, "split": "train"})
    parameters = [json.loads(draft.payload)["parameters"] for draft in drawn(environment, 100)]
    assert sorted(each["index"] for each in parameters) == list(range(20))
    assert all(each["seed"] == 3 and each["split"] == "train" for each in parameters)
    assert [each["index"] for each in parameters] != list(range(20))


def test_a_server_that_ignores_seeds_is_reported():
    with OpenEnvServer(seeded=False) as server:
        draft = drawn(opened(server), 2)[1]
        assert "begins otherwise than when the task was drawn; set repeatable = false" in reason(
            opened(server), draft, "1"
        )
        environment, connections = opened(server, repeatable=False), server.connections
        (free,) = drawn(environment)
        assert server.connections == connections and json.loads(free.asks) == json.loads(free.payload)["parameters"]
        assert played(environment, free, "1")[0].metrics["done"] == 1.0


def test_a_turn_may_be_the_action_itself(server):
    environment = opened(server, turn="json", action={"metadata": {"by": "tidemill"}})
    (draft,) = drawn(environment)
    right = json.dumps({"guess": number_of(draft)})
    score, policy = played(environment, draft, "{", "[1]", '{"guess": 7}', '{"guess": "no"}', right)
    answers = [message["content"] for message in policy.conversation if message["role"] == "user"][1:]
    assert answers[:2] == ["error: the turn is no JSON object"] * 2
    assert answers[2].startswith('error: the server refuses the action: {"message": "Invalid message"')
    assert answers[3] == "Wrong" and score.total == 0.75
    assert server.received[-2]["data"] == {"metadata": {"by": "tidemill"}, "guess": number_of(draft)}


class Caller:
    """A policy that makes the calls of its script and then returns a text."""

    def __init__(self, *turns, malformed=()):
        self._turns, self._malformed = list(turns), malformed
        self.seen = []

    async def chat(self, messages, *, tools=(), max_tokens=None):
        self.seen, self.tools, turn = messages, tools, self._turns.pop(0)
        if isinstance(turn, str):
            return Reply({"role": "assistant", "content": turn}, "stop", self._malformed)
        calls = [
            {"id": f"call{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(turn)
        ]
        return Reply({"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls", self._malformed)


def called(environment, draft, policy):
    return asyncio.run(environment.play(task_of(environment, "openenv", draft), policy))


def test_tools_of_the_server_are_offered_and_called(server):
    environment = opened(server, turn="tools")
    assert environment.needs_tools and not opened(server).needs_tools
    (draft,) = drawn(environment)
    policy = Caller([("look", "{}"), ("look", "[]"), ("leap", "{}"), ("look", "{")], "Done.")
    score = called(environment, draft, policy)
    assert [tool["function"]["name"] for tool in policy.tools] == ["look"]
    tool_answers = [message["content"] for message in policy.seen if message["role"] == "tool"]
    assert tool_answers == [
        number_of(draft),
        "error: the arguments are no JSON object",
        "error: there is no tool 'leap'; there are look",
        "error: the arguments are no JSON object",
    ]
    assert score.total == 0.0 and score.metrics["steps"] == 1.0


def test_a_text_without_a_call_ends_the_episode_or_is_an_action(server):
    (draft,) = drawn(opened(server))
    ended = called(opened(server, turn="tools"), draft, Caller([("look", "{}")], "It is 7."))
    assert ended.metrics == {"steps": 1.0, "done": 1.0}
    acted = called(opened(server, turn="tools", action_field="guess"), draft, Caller("1", number_of(draft)))
    assert acted.total == 0.75 and acted.metrics == {"steps": 2.0, "done": 1.0}


def test_a_malformed_call_is_answered(server):
    environment = opened(server, turn="tools")
    (draft,) = drawn(environment)
    policy = Caller("<tool_call>{", [("look", "{}")], malformed=("<tool_call>{",))
    with pytest.raises(IndexError):  # the script has no more turns
        called(environment, draft, policy)
    assert policy.seen[2]["content"] == "error: this is no tool call that can be read: <tool_call>{"


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        (None, "TypeError"),
        ([{"description": "no name"}], "KeyError"),
        ([{"name": "two words", "input_schema": {}}], "must be 1 to 64 letters"),
        ([7], "TypeError"),
    ],
)
def test_tools_that_cannot_be_offered_fail_the_rollout(tools, complaint):
    with OpenEnvServer(tools=tools) as server:
        (draft,) = drawn(opened(server))
        said = reason(opened(server, turn="tools"), draft, "x")
        assert "the server's tools cannot be offered" in said and complaint in said


def test_observations_as_text():
    cases = [
        ({"text": "Hello", "metadata": {"a": 1}}, "", "Hello"),
        ({"metadata": {"question": "1 + 1"}}, "", '{"question": "1 + 1"}'),
        ({"board": [[1, 2]], "note": "\u00e9", "metadata": {}}, "", '{"board": [[1, 2]], "note": "\u00e9"}'),
        ({"board": [[1, 2]], "note": "x"}, "board", "[[1, 2]]"),
        ({"board": [[1, 2]], "note": "x"}, "note", "x"),
        ({}, "", "{}"),
    ]
    for observation, field, shown in cases:
        with OpenEnvServer(faults={"reset": sending(observed(observation, 0))}) as server:
            assert drawn(opened(server, observation_field=field))[0].asks == shown
    with (
        OpenEnvServer(faults={"reset": sending(observed({"a": "b"}, 0))}) as server,
        pytest.raises(TaskError, match=r"an observation has no field 'text'; it has \['a'\]"),
    ):
        drawn(opened(server, observation_field="text"))


def test_a_system_message_is_first(server):
    environment = opened(server, system="Be brief.")
    (draft,) = drawn(environment)
    _, policy = played(environment, draft, number_of(draft))
    assert [message["role"] for message in policy.conversation] == ["system", "user", "assistant"]


def test_an_episode_that_is_done_at_its_reset_needs_no_turn():
    with OpenEnvServer(faults={"reset": sending(observed({"text": "over"}, 1, True))}) as server:
        environment = opened(server)
        score, policy = played(environment, drawn(environment)[0], "x")
        assert score.total == 1.0 and not policy.requests


def sending(answer):
    async def send(socket):
        await (socket.send_str(answer) if isinstance(answer, str) else socket.send_json(answer))

    return send


async def hang(socket):
    await asyncio.sleep(30)


async def leave(socket):
    await socket.close()


async def abort(socket):
    socket._req.transport.abort()


async def binary(socket):
    await socket.send_bytes(b"\x00")


FAULTS = {
    "closes": (leave, "CLOSE in place of an answer to step"),
    "is killed": (abort, "CLOSED in place of an answer to step"),
    "sends bytes": (binary, "BINARY in place of an answer to step"),
    "sends no JSON": (sending("nonsense"), "its answer to step is no JSON"),
    "sends a nested text": (sending("[" * 100_000), "its answer to step is no JSON"),
    "sends a list": (sending("[1, 2]"), r"its answer to step is [1, 2]"),
    "sends another type": (sending({"type": "state", "data": {}}), 'its answer to step is {"type": "state"'),
    "sends no data": (sending({"type": "observation"}), "its answer to step is"),
    "sends a text as data": (sending({"type": "observation", "data": "x"}), "its answer is no observation: data"),
    "sends no observation": (sending({"type": "observation", "data": {}}), "observation: Field required"),
    "sends a list as observation": (sending(observed([1], 0)), "observation: Input should be a valid dictionary"),
    "sends a reward of text": (sending(observed({"text": "x"}, "1.0")), "reward"),
    "sends NaN": (sending(json.dumps(observed({"text": "x"}, float("nan")))), "finite number"),
    "sends infinity": (sending(json.dumps(observed({"text": "x"}, float("inf")))), "finite number"),
    "sends no done": (sending(observed({"text": "x"}, 0, "yes")), "done: Input should be a valid boolean"),
    "raises": (
        sending({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}),
        "step failed: boom (EXECUTION_ERROR)",
    ),
    "sends an error of its own": (sending({"type": "error", "data": "boom"}), 'its answer to step is {"type": "error"'),
    "sends too much": (sending("x" * (MOST_BYTES + 1)), "ERROR in place of an answer to step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_answer_of_the_server_fails_only_that_rollout(fault):
    act, complaint = FAULTS[fault]
    with OpenEnvServer(faults={"step": act}) as server:
        environment = opened(server)
        (draft,) = drawn(environment)
        said = reason(environment, draft, "1")
        assert complaint in said and said.startswith(server.url)
        server.faults = {}
        assert played(environment, draft, number_of(draft))[0].total == 1.0


def test_an_action_that_the_server_refuses_fails_the_rollout(server):
    (draft,) = drawn(opened(server))
    assert "the server refuses the action" in reason(opened(server, action_field="word"), draft, "1")


@pytest.mark.parametrize("kind", ["step", "reset"])
def test_a_server_that_hangs_fails_drawing_and_playing(kind):
    with OpenEnvServer() as server:
        (draft,) = drawn(opened(server))
        server.faults, environment = {kind: hang}, opened(server, timeout_s=2)
        complaint = f"{server.url}: no answer to {kind} within 2 s"

        def drawing():
            with pytest.raises(TaskError) as raised:
                drawn(environment)
            return str(raised.value)

        # A slow machine may need the two seconds for an earlier answer.
        until(lambda: complaint in reason(environment, draft, "1"))
        if kind == "reset":
            until(lambda: complaint in drawing())
        server.faults = {}
        assert played(opened(server), draft, number_of(draft))[0].total == 1.0


@pytest.mark.parametrize("fault", ["closes", "sends no JSON", "raises"])
def test_a_reset_that_fails_fails_drawing_and_playing(fault):
    with OpenEnvServer() as server:
        (draft,) = drawn(opened(server))
        environment = opened(server)
        server.faults = {"reset": FAULTS[fault][0]}
        complaint = FAULTS[fault][1].replace("step", "reset")
        assert complaint in reason(environment, draft, "1")
        with pytest.raises(TaskError, match=re.escape(complaint)):
            drawn(environment)


def test_a_server_that_is_down_fails_drawing_and_playing():
    with OpenEnvServer() as server:
        environment = opened(server)
        (draft,) = drawn(environment)
    assert "Cannot connect" in reason(environment, draft, "1")
    assert "no connection: Cannot connect" in reason(opened(server, action_field="guess"), draft, "1")
    with pytest.raises(TaskError, match="no connection: Cannot connect"):
        drawn(environment)


def test_a_server_that_accepts_and_sends_nothing_fails():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = FAMILY.member(f"http://127.0.0.1:{silent.getsockname()[1]}").open({"timeout_s": 0.3})
        with pytest.raises(TaskError, match=r"no connection within 0\.3 s"):
            drawn(environment)


def test_another_server_at_the_address_fails():
    with OpenEnvServer() as server:
        elsewhere = FAMILY.member(f"{server.url}/other").open({})
        with pytest.raises(TaskError, match="no connection: 404"):
            drawn(elsewhere)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}, "of a, b"),
        ({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, "set action_field"),
        ({"properties": {"n": {"type": "string"}}}, "set action_field"),
        ({"properties": [1]}, "it describes no action"),
        ("text", "it describes no action"),
        (web.Response(text="nonsense", content_type="application/json"), "JSONDecodeError"),
        (web.Response(text="<p>", content_type="text/html"), "ContentTypeError"),
        (web.Response(status=500), "500"),
    ],
)
def test_actions_whose_text_is_not_known_fail_with_the_fields(schema, complaint):
    with OpenEnvServer(schema=schema) as server:
        (draft,) = drawn(opened(server))
        assert complaint in reason(opened(server), draft, "1")
        assert played(opened(server, action_field="guess"), draft, number_of(draft))[0].total == 1.0


def lost_together(environment, drafts):
    """Whether episodes of these tasks, played at the same time with wrong answers, have their score."""

    async def together():
        tasks = [task_of(environment, "openenv", draft) for draft in drafts]
        return await asyncio.gather(*(environment.play(task, ScriptedPolicy(["1"], 64)) for task in tasks))

    return [score.total for score in asyncio.run(together())] == [-1.5] * len(drafts)


def test_sessions_are_bounded_and_closed():
    with OpenEnvServer() as own:
        environment = opened(own, sessions=3)
        drafts = drawn(environment, 12)

        assert lost_together(environment, drafts)
        assert own.most_open == 3
        until(lambda: own.open == 0)


def test_an_episode_waits_for_a_full_server():
    with OpenEnvServer(capacity=1) as server:
        environment = opened(server, sessions=4)
        drafts = drawn(environment, 4)

        assert lost_together(environment, drafts) and server.most_open == 1
        server.capacity = 0
        environment = opened(server, wait_s=0)
        assert "no room" in reason(environment, drafts[0], "1")
        server.capacity = 1
        assert played(environment, drafts[0], "1")[0].total == -1.5


def test_a_cancelled_episode_closes_its_session():
    with OpenEnvServer(faults={"step": hang}) as server:
        environment = opened(server)
        (draft,) = drawn(environment)

        async def cancelled():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await environment.play(task_of(environment, "openenv", draft), ScriptedPolicy(["1"], 64))

        began = time.monotonic()
        asyncio.run(cancelled())
        assert time.monotonic() - began < 40


def test_names_are_addresses():
    assert FAMILY.member("http://localhost:1/").name == "openenv:http://localhost:1"
    kind = FAMILY.member("https://example.test/env")
    assert (kind.isolation, kind.network) == ("loop", True)
    for name in ("", "localhost:8000", "http://", "ftp://host", "http://host/?a=1", "http://host/#a", "file:///etc"):
        with pytest.raises(UnknownEnvironment, match="name a running server by its address"):
            FAMILY.member(name)
    assert [each.name for each in FAMILY.members()] == ["http://HOST:PORT"]


def test_invalid_options_are_refused(server):
    assert options_json(opened(server, turns="3").options) == '{"timeout_s":100.0,"turns":3}'
    assert opened(server, action='{"a": [1]}', reset={"b": 2}).options.action == {"a": [1]}
    for options in (
        {"turns": 0},
        {"turn": "speech"},
        {"timeout_s": 0},
        {"success_at": "nan"},
        {"action": "[1]"},
        {"action": "x"},
        {"colour": "red"},
    ):
        with pytest.raises(TaskError):
            opened(server, **options)


@pytest.mark.parametrize("payload", ["", "{", "{}", '{"parameters": [], "opening": ""}', '{"parameters": {}}', "[1]"])
def test_a_payload_of_another_kind_is_refused(server, payload):
    environment = opened(server)
    (draft,) = drawn(environment)
    other = replace(task_of(environment, "openenv", draft), payload=payload)
    with pytest.raises(TaskError, match="payload is no task of OpenEnv"):
        asyncio.run(environment.play(other, ScriptedPolicy([""], 2)))
    assert played(environment, draft, number_of(draft))[0].total == 1.0
