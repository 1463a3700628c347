"""Tasksets of verifiers, end to end: turns, tools, simulated users, judges, programs; and failures of a rollout."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.producers.rollout.agents import last, policy_of, task_of
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import (
    ContextFull,
    Environment,
    EnvironmentFailed,
    GenerationFailed,
    Score,
    TaskError,
    TaskQuery,
)
from tidemill.producers.environments.find import UnknownEnvironment
from tidemill.producers.environments.process import HostedEnvironment
from tidemill.producers.environments.verifiers import Verifiers
from tidemill.producers.sampling.completion import BadResponse

pytestmark = pytest.mark.anyio

TASKSETS = Path(__file__).with_name("tasksets")
ADDRESSES: set[str] = set()
"""Hosts that this process has connected to."""


def noted(event: str, given: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(given[1], tuple):
        ADDRESSES.add(str(given[1][0]))
    if event == "socket.getaddrinfo":
        ADDRESSES.add(str(given[0]))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set HOME for verifiers, which stores files below it and reads it on import; check that no other host is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.syspath_prepend(str(TASKSETS))
        sys.addaudithook(noted)
        yield
    assert {host for host in ADDRESSES if not host.startswith("127.") and host != "localhost"} == set()


def opened(name: str, **options: Any) -> Environment:
    return Verifiers().member(name).open(options)


def drafts(environment: Environment, most: int, seed: int = 0) -> list[Any]:
    return list(islice(environment.tasks(TaskQuery(seed)), most))


async def one(environment: Environment, say: Callable[[str], Any], payload: str = "", **limits: Any) -> tuple[Any, Any]:
    """Return the score or the error of one episode, and its policy."""
    policy = policy_of(say, **limits)
    try:
        task = task_of(payload or drafts(environment, 1)[0].payload)
        return await environment.play(task, policy), policy
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return error, policy
    finally:
        policy.closed = True


def play(environment: Environment, say: Callable[[str], Any], **more: Any) -> tuple[Any, Any]:
    async def whole() -> tuple[Any, Any]:
        try:
            return await one(environment, say, **more)
        finally:
            await environment.close()

    return asyncio.run(whole())


def adder(context: str) -> str:
    """Return the sum that the last user message asks for."""
    found = re.findall(r"(\d+)\+(\d+)", last(context))
    return str(sum(map(int, found[-1]))) if found else "I have said it"


def by_name(score: Score) -> dict[str, tuple[float, float]]:
    return {part.name: (part.value, part.weight) for part in score.rewards}


@asynccontextmanager
async def other_endpoint(answer: Callable[[list[dict[str, str]]], str | int]) -> AsyncIterator[tuple[str, list[Any]]]:
    """An OpenAI endpoint next to the policy, and its received bodies; an answer that is a number is a status."""
    asked: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        said = answer(body["messages"])
        if isinstance(said, int):
            return web.json_response({"error": {"message": "the other endpoint's defect"}}, status=said)
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(whole)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


async def test_one_turn() -> None:
    environment = opened("vf_sums")
    assert environment.isolation == "process" and environment.network and not environment.needs_tools

    score, policy = await one(environment, adder)
    assert by_name(score) == {"correct": (1.0, 1.0), "short": (1.0, 0.5)} and score.success is True
    assert score.metrics["length"] == len(policy.conversation[-1]["content"]) and not score.fault()
    [context] = policy.contexts.all
    assert len(context.turns) == 1 and policy.conversation[0] == {"role": "system", "content": "Add."}
    score, _ = await one(environment, lambda _: "I am afraid that I do not know that")
    assert score.total == 0.0 and score.success is False
    await environment.close()


def test_tasks_are_the_same_for_the_same_query() -> None:
    environment = opened("vf_sums", taskset={"most": 50})
    one, again, other = (drafts(environment, 99, seed) for seed in (1, 1, 2))
    assert one == again != other and sorted(map(str, one)) == sorted(map(str, other)) and len(one) == 50
    assert len({draft.asks for draft in one}) == 50 and all("Add." in draft.asks for draft in one)
    from verifiers.v1 import SystemMessage, TaskData, UserMessage

    from tidemill.producers.environments.verifiers_bridge import asks

    told = [SystemMessage(content="Add."), UserMessage(content="1+1?")]
    texts = {asks(TaskData(idx=n, prompt=p)) for n in (1, 2) for p in (told, told[:1], None, "1+1?")}
    assert len(texts) == 4 and sum("1+1?" in text for text in texts) == 2, "the place in the taskset is not asked"
    endless = opened("vf_judged", others_url="http://127.0.0.1:9/v1")
    assert len({draft.asks for draft in drafts(endless, 5000)}) == 5000


def calculator(context: str) -> str:
    """Call the tool, with errors at first, then answer with its result."""
    results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", context, re.DOTALL)
    a = re.findall(r"tool: (\d+)\+9", context)[-1]
    calls = (
        {"name": "calc_divide", "arguments": {"a": 1}},
        {"name": "calc_add", "arguments": {"a": "one", "b": 9}},
        {"name": "calc_add", "arguments": {"a": int(a), "b": 9}},
    )
    if len(results) == len(calls):
        return f"it is {results[-1]}"
    return f"<tool_call>{json.dumps(calls[len(results)])}</tool_call>"


async def test_tools_of_a_server_that_all_tasks_share() -> None:
    environment = opened("vf_tools")
    assert environment.needs_tools

    tasks = [draft.payload for draft in drafts(environment, 8)]
    played = await asyncio.gather(*(one(environment, calculator, payload) for payload in tasks))
    for score, policy in played:
        assert by_name(score) == {"correct": (1.0, 1.0)} and score.metrics["calls"] == 3.0, score
        [context] = policy.contexts.all
        assert len(context.turns) == 4 and context.tools[0]["function"]["name"] == "calc_add"
        results = [m["content"] for m in policy.conversation if m["role"] == "tool"]
        assert "no tool 'calc_divide'" in results[0] and "valid" in results[1] and results[2].isdigit()
    # A conversation that fills the context is scored without further turns.
    score, policy = await one(environment, calculator, tasks[0], max_context_tokens=560)
    assert by_name(score) == {"correct": (0.0, 1.0)} and policy.full and not policy.failure, score
    assert score.metrics["calls"] < 3
    # An agent that never stops is cut off at its own limit.
    score, policy = await one(environment, lambda _: calculator("tool: 1+9"), tasks[0])
    assert score.metrics["truncated"] == 1.0 and len(policy.turns) == 32
    await environment.close()


def both_sides(context: str) -> str:
    """Answer as a user who asks twice, or as the assistant."""
    if "role-playing a USER" in context:
        asked = context.count("<|im_start|>assistant")
        return "###DONE###" if asked > 2 else f"what is {asked}+7?"
    return adder(context)


def test_a_simulated_user_is_not_trained() -> None:
    environment = opened("vf_sums", env={"id": "user-sim"})
    score, policy = play(environment, both_sides)
    assert {name for name, _ in by_name(score).items()} == {"assistant.correct", "assistant.short"}, score
    assert score.metrics["assistant.user_turns"] == 3.0 and score.metrics["user.truncated"] == 0.0
    assert len(policy.turns) == 5 and len(policy.session.contexts) == 5
    [context] = policy.contexts.all
    assert len(context.turns) == 2
    trained = policy.session.tokenizer.decode(context.ids, skip_special_tokens=False)
    assert "role-playing" not in trained and "DONE" not in trained and "what is 2+7?" in trained


async def test_a_simulated_user_by_another_endpoint() -> None:
    def user(messages: list[dict[str, str]]) -> str:
        return "###DONE###" if len(messages) > 2 else "what is 5+7?"

    async with other_endpoint(user) as (url, asked):
        environment = opened("vf_sums", env={"id": "user-sim"}, others_url=url, others_model="somebody")
        score, policy = await one(environment, adder)
        assert len(score.rewards) == 2, score
        assert len(policy.turns) == 1 and policy.conversation[-1]["content"] == "12"
        assert [body["model"] for body in asked] == ["somebody"] * 2
        await environment.close()

    async with other_endpoint(lambda _: 500) as (url, _):
        environment = opened("vf_sums", env={"id": "user-sim"}, others_url=url)
        error, _ = await one(environment, adder)
        assert "the other endpoint's defect" in str(error)
        await environment.close()


async def test_a_judge_asks_the_other_endpoint() -> None:
    with pytest.raises(TaskError, match=r"taskset\.task\.judge would ask .*others_url"):
        opened("vf_judged")

    def strict(messages: list[dict[str, str]]) -> str:
        return "Yes." if "Is a fish right for Riddle" in messages[0]["content"] else "no"

    async with other_endpoint(strict) as (url, asked):
        environment = opened("vf_judged", others_url=url, others_model="judge")
        scores = [(await one(environment, lambda _, said=said: said))[0] for said in ("a fish", "a bird")]
        assert [score.total for score in scores] == [1.0, 0.0] and asked[0]["model"] == "judge"
        await environment.close()
    async with other_endpoint(lambda _: 500) as (url, _):
        environment = opened("vf_judged", others_url=url)
        error, _ = await one(environment, lambda _: "a fish")
        assert isinstance(error, EnvironmentFailed) and "the other endpoint's defect" in str(error)
        await environment.close()


def test_a_program_with_the_openai_client() -> None:
    score, policy = play(opened("vf_sums", harness="vf_program"), lambda c: "26" if "26" not in c else "27, as I said")
    assert isinstance(score, Score), score
    [context] = policy.contexts.all
    assert len(context.turns) == 3 and "What is" in policy.conversation[0]["content"]


def test_a_harness_of_verifiers() -> None:
    score, policy = play(opened("vf_sums", harness="null"), adder)
    assert by_name(score)["correct"] == (1.0, 1.0) and len(policy.contexts.all) == 1, score


def test_several_trained_agents_share_the_mean_of_their_rewards() -> None:
    said = iter(["I do not know, and have no idea", "7+0"])
    environment = opened("vf_sums", env={"id": "best-of-n", "n": 2}, taskset={"most": 1})
    score, policy = play(environment, lambda _: next(said))
    assert len(score.rewards) == 4 and score.total == pytest.approx(0.75) and score.success is False, score
    assert {part.name for part in score.rewards} == {
        f"agent{n}.{name}" for n in (1, 2) for name in ("correct", "short")
    }
    assert len(policy.contexts.all) == 2 and score.metrics["agent1.pass_at_n"] == 1.0


async def test_a_failed_generation_fails_the_rollout_at_once() -> None:
    def first(_context: str) -> str:
        raise BadResponse("no logprobs")

    def later(context: str) -> str:
        return both_sides(context) if "what is 2" not in context else first(context)

    for options, say, good in (
        ({}, first, adder),
        ({"harness": "vf_ask_thrice"}, first, adder),  # the harness ends without an error
        ({"env": {"id": "user-sim"}}, first, both_sides),
        ({"env": {"id": "user-sim"}}, later, both_sides),
    ):
        environment = opened("vf_sums", **options)
        error, policy = await one(environment, say)
        assert isinstance(error, GenerationFailed) and "no logprobs" in str(error), error
        assert "no logprobs" in policy.failure and (say is first) == (not policy.turns)
        score, _ = await one(environment, good)
        assert isinstance(score, Score), "the next good one goes through"
        await environment.close()


@pytest.mark.parametrize(("mode", "reason"), [("raise", "the reward's defect"), ("nan", "correct.value is nan")])
def test_invalid_rewards_fail_the_rollout(mode: str, reason: str) -> None:
    result, _ = play(opened("vf_sums", taskset={"task": {"mode": mode}}), adder)
    assert reason in (result.fault() if isinstance(result, Score) else str(result))


async def test_an_episode_that_is_cancelled_leaves_nothing() -> None:
    environment: Any = opened("vf_sums", taskset={"task": {"mode": "hang"}})
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.play(task_of(drafts(environment, 1)[0].payload), policy_of(adder))
        assert time.monotonic() - started < 60 and not environment._client.playing
    await environment.close()


def test_deadlines_of_verifiers_tasks_are_not_used() -> None:
    """The tasks of `vf_sums` allow a millisecond. With that deadline, a slower generation scores as a wrong answer."""

    async def slow(context: str) -> str:
        await asyncio.sleep(0.05)
        return adder(context)

    score, _ = play(opened("vf_sums"), slow)
    assert by_name(score)["correct"] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"taskset": {"size": 3}}, "size"),
        ({"taskset": {"most": "many"}}, "most"),
        ({"env": {"agents": {}}}, "agents"),
        ({"env": {"id": "no-such-env"}}, "no.such.env"),
        ({"harness": "no-such-harness"}, "no.such.harness"),
        ({"harness": "codex"}, "container"),
        ({"env": {"agent": {"timeout": {"rollout": 3}}}}, "deadlines"),
        ({"env": {"agent": {"retries": {"max_retries": 1}}}}, "retries"),
        ({"env": {"timeout": {"episode": 3}}}, "deadlines"),
        ({"max_turns": 0}, "max_turns"),
        ({"seed": 3}, "seed"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        opened("vf_sums", **options)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("no_such_taskset", UnknownEnvironment, "no module no_such_taskset"),
        ("a.b", UnknownEnvironment, "no module"),
        ("", UnknownEnvironment, "no module"),
        ("harbor", UnknownEnvironment, "containers"),
        ("vf_program", TaskError, "vf_program"),
        ("json", TaskError, "json"),
    ],
)
def test_modules_that_are_not_a_taskset_are_refused(name: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        opened(name)


@pytest.mark.parametrize("payload", ["", "{", "[]", "{}", '{"answer": 3}', '{"prompt": 3, "answer": "x"}', "[" * 10**5])
def test_payloads_of_other_environments_are_refused(payload: str) -> None:
    environment = opened("vf_sums")
    with pytest.raises(TaskError, match="no task of vf_sums"):
        asyncio.run(environment.play(task_of(payload), policy_of(adder)))


def test_installed_tasksets_are_listed_without_an_import() -> None:
    listed = {each.name: each for each in Verifiers().members()}
    assert "containers" in listed["harbor"].problem and "tidemill" not in listed


def test_a_full_context_is_scored_unless_the_harness_fails() -> None:
    error, policy = play(
        opened("vf_sums", harness="vf_ask_thrice", harness_options={"exit_code": 1}),
        lambda _: "x" * 300,
        max_context_tokens=400,
    )
    assert isinstance(error, ContextFull) and policy.full and not policy.failure, error
    score, policy = play(opened("vf_sums", harness="vf_ask_thrice"), lambda _: "x" * 300, max_context_tokens=400)
    assert score.total == 0.0 and policy.full and len(policy.turns) == 2


async def test_a_taskset_in_its_own_process() -> None:
    options = {"env": {"id": "user-sim"}}
    environment = await HostedEnvironment("vf_hosted:HostedSums", options, RolloutSettings(), network=True).start()
    try:
        draft = next(iter(opened("vf_sums", **options).tasks(TaskQuery(1))))
        score, policy = await one(environment, both_sides, draft.payload)
        assert {part.name for part in score.rewards} == {"assistant.correct", "assistant.short"}, score
        assert len(policy.turns) == 5 and len(policy.contexts.all) == 1
        error, _ = await one(environment, lambda _: [][0], draft.payload)
        assert isinstance(error, Exception) and "IndexError" in repr(error)
        assert environment.version.startswith("verifiers-0.")
    finally:
        await environment.close()
