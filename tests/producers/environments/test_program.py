"""Agent programs: their input, their score, and the end of each kind of misbehaviour."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.producers.rollout.agents import last, policy_of, task_of
from tests.waiting import until, until_async
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments import program as program_module
from tidemill.producers.environments.base import (
    Environment,
    EnvironmentFailed,
    EnvironmentOptions,
    GenerationFailed,
    Score,
    TaskDraft,
    TaskError,
)
from tidemill.producers.environments.process import HostedEnvironment
from tidemill.producers.environments.program import Program
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.schemas.records import RewardComponent

pytestmark = pytest.mark.anyio

DEADLINE_S = 180.0
PRELUDE = """
import json, os, sys, time, urllib.request
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request) as answer: return json.load(answer)
def chat(messages): return post("/chat/completions", {"messages": messages})["choices"][0]["message"]
def say(text): return chat([{"role": "user", "content": text}])["content"]
"""


def agent(source: str) -> list[str]:
    """Return the command of an agent program."""
    return [sys.executable, "-I", "-c", PRELUDE + textwrap.dedent(source)]


class Riddle(Environment):
    """Asks for a word, and accepts every reply that contains it."""

    version = "riddle-1"
    isolation = "loop"

    def tasks(self, query: Any) -> Iterator[TaskDraft]:
        yield TaskDraft("ok", "say ok")

    async def play(self, task: Any, policy: Any) -> Score:
        messages = [{"role": "system", "content": "Riddles."}, {"role": "user", "content": f"Say {task.payload}"}]
        reply = await policy.chat(messages)
        return await self.rescore(task, [*messages, reply.message])

    async def rescore(self, task: Any, messages: Any) -> Score:
        right = task.payload in messages[-1]["content"]
        return Score((RewardComponent("right", float(right), 1.0),), right)


def echo(context: str) -> str:
    return f"you said {last(context)}"


async def played(
    command: list[str],
    inner: Environment | None = None,
    payload: str = "ok",
    say: Callable[[str], Any] = echo,
    limit_s: float | None = DEADLINE_S,
    limit: asyncio.Timeout | None = None,
    **limits: Any,
) -> tuple[Any, Any]:
    """Return the score or the error of one episode, and its policy. The test may reschedule its `limit`."""
    async with AgentEndpoint() as endpoint:
        policy = policy_of(say, endpoint.open, **limits)
        program = Program(inner or Riddle(EnvironmentOptions()), command)
        try:
            async with limit or asyncio.timeout(limit_s):
                return await program.play(task_of(payload), policy), policy
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error, policy
        finally:
            policy.closed = True
            endpoint.close(policy)


async def test_without_a_port_for_the_endpoint_no_task_is_left() -> None:
    def no_port(_policy: Any) -> Any:
        raise OSError("no port is free")

    before = asyncio.all_tasks()
    with pytest.raises(OSError, match="no port"):
        await Program(Riddle(EnvironmentOptions()), agent("")).play(task_of("ok"), policy_of(echo, no_port))
    assert asyncio.all_tasks() == before


def play(*given: Any, **more: Any) -> tuple[Any, Any]:
    return asyncio.run(played(*given, **more))


def test_the_program_is_given_the_first_request_and_its_last_conversation_is_scored() -> None:
    score, policy = play(
        agent("""
        task = json.load(sys.stdin)
        assert task["task_id"] == "task" and task["tools"] == [], task
        assert [m["role"] for m in task["messages"]] == ["system", "user"], task
        assert say("hint") == "you said hint"
        chat(task["messages"])
        """)
    )
    assert score.success is True and [r.name for r in score.rewards] == ["right"]
    assert len(policy.contexts.all) == 2


def test_a_posted_result_takes_precedence_over_the_environments_score() -> None:
    score, policy = play(
        agent("""
        say("no"); post("/outcome", {"rewards": {"mine": 0.5}, "success": False, "metrics": {"steps": 2}})
        sys.exit(3)
        """)
    )
    assert (score.total, score.success, score.metrics) == (0.5, False, {"steps": 2.0}) and len(policy.turns) == 1


def test_an_environment_that_cannot_score_a_conversation_needs_a_posted_result() -> None:
    class Mute(Riddle):
        async def rescore(self, task: Any, messages: Any) -> None:
            return None

    mute = Mute(EnvironmentOptions())
    error, _ = play(agent('say("ok")'), mute)
    assert isinstance(error, EnvironmentFailed) and "posted no result, and test cannot score" in str(error)
    score, _ = play(agent('say("ok"); post("/outcome", {"rewards": {"mine": 1}})'), mute)
    assert score.total == 1.0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pass", "never called"),
        ("say('x'); sys.stderr.write('a' * 10**6); raise KeyError('the end')", "status 1: .*KeyError: 'the end'"),
        ("say('x'); sys.exit(7)", "status 7: it wrote nothing"),
        ("os.kill(os.getpid(), 9)", "status -9"),
        ("os.kill(os.getppid(), 9); time.sleep(1000)", "status -9: its keeper was killed"),
    ],
)
def test_programs_without_a_result_fail_with_a_reason(source: str, reason: str) -> None:
    error, _ = play(agent(source))
    assert isinstance(error, EnvironmentFailed) and re.search(reason, str(error), re.DOTALL), error
    assert len(str(error)) < 1200


def test_a_command_that_does_not_exist() -> None:
    error, _ = play(["/no/such/agent"])
    assert isinstance(error, EnvironmentFailed) and "status 127: /no/such/agent: No such file" in str(error)


def test_a_program_that_calls_forever_fails_the_rollout() -> None:
    error, policy = play(agent("while True: say('x')"), max_turns=5)
    assert isinstance(error, GenerationFailed) and "max_turns" in policy.failure and len(policy.turns) == 5


def test_a_failed_generation_is_the_reason_also_if_the_program_ignores_it() -> None:
    def broken(_context: str) -> str:
        raise KeyError("a defect")

    source = "try: say('x')\nexcept Exception: pass\npost('/outcome', {'rewards': {'mine': 1}})"
    error, policy = play([sys.executable, "-I", "-c", PRELUDE + source], say=broken)
    assert isinstance(error, GenerationFailed) and "a defect" in str(error) and policy.posted is not None


def test_a_program_that_continues_after_its_result_is_killed_and_changes_nothing() -> None:
    begun: list[str] = []

    async def later(context: str) -> str:
        if last(context) == "never":
            begun.append(context)
            await asyncio.Event().wait()
        return "yes" if begun else "no"

    score, policy = play(
        agent("""
        import threading
        threading.Thread(target=say, args=["never"]).start()
        while say("has it begun?") != "yes": pass
        post("/outcome", {"rewards": {"mine": 1}})
        time.sleep(1000)
        """),
        say=later,
    )
    assert score.total == 1.0 and policy.turns and not policy.failure
    assert len(policy.session.contexts) == len(policy.turns) + 1 and policy.session.cancelled == 1


def test_a_full_context_is_an_error_and_no_failed_generation() -> None:
    error, policy = play(agent("say('x'); say('y' * 300)"), max_context_tokens=200)
    assert isinstance(error, EnvironmentFailed) and policy.full and not policy.failure


def test_output_of_100_mb_is_harmless() -> None:
    score, _ = play(
        agent("""
        for _ in range(100): sys.stdout.write("x" * 2**20); sys.stderr.write("x" * 2**20)
        say("ok")
        """)
    )
    assert score.success is True


def test_a_task_larger_than_a_pipe_that_is_not_read() -> None:
    payload = "ok" * 200_000
    score, _ = play(agent('say("x"); post("/outcome", {"rewards": {"mine": 1}})'), payload=payload)
    assert score.total == 1.0


FORKING = """
import subprocess
orphan = "setsid -f sleep 1000; sleep 1000"
for command in (["sleep", "1000"], ["setsid", "sleep", "1000"], ["setsid", "-f", "sh", "-c", orphan]):
    subprocess.Popen(command)
"""


def kin(key: str) -> list[psutil.Process]:
    """Return live processes that were started with `key` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LC_MARK") == key and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("ending", ["", "time.sleep(1000)", "os.kill(0, 9)"])
def test_nothing_that_the_program_started_outlives_its_episode(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"tidemill-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("LC_MARK", key)  # LC_* is kept
    source = f"say('ok')\n{textwrap.dedent(FORKING)}\n{ending}"
    result, _ = play([sys.executable, "-I", "-c", PRELUDE + source], limit_s=5 if "sleep" in ending else DEADLINE_S)
    if not ending:
        assert result.success is True
    else:
        assert isinstance(result, EnvironmentFailed | TimeoutError), result
    until(lambda: not kin(key), lambda: kin(key))


async def test_a_program_that_hangs_is_killed_while_others_continue() -> None:
    limit, calls = asyncio.timeout(None), []

    def noted(context: str) -> str:
        calls.append(context)
        return "x"

    hanging = asyncio.create_task(played(agent("say('x'); time.sleep(1000)"), say=noted, limit=limit))
    await until_async(lambda: calls)
    score, _ = await played(agent("say('ok')"))
    assert score.success is True
    limit.reschedule(0)
    error, policy = await hanging
    assert isinstance(error, TimeoutError) and len(policy.turns) == 1


def test_the_environment_of_the_program_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("TIDEMILL_KAFKA__CLIENT_OPTIONS", "secret")
    score, _ = play(
        agent("""
        say("x")
        leaked = [name for name, value in os.environ.items() if "secret" in value]
        kept = {n for n in os.environ if not n.startswith("LC_")}
        assert not leaked and {"PATH", "HOME", "TMPDIR", "OPENAI_BASE_URL", "OPENAI_API_KEY"} <= kept, kept
        open(os.path.join(os.environ["HOME"], "note"), "w").write("x")
        post("/outcome", {"rewards": {"fds": len(os.listdir("/proc/self/fd"))}})
        """)
    )
    assert score.total <= 4, "stdin, stdout, stderr, and the one that lists them"


def test_the_program_dies_with_its_worker(tmp_path: Path) -> None:
    worker, noted = tmp_path / "worker.py", tmp_path / "pid"
    source = f"open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    worker.write_text(
        "import asyncio\n"
        "from tests.producers.environments.test_program import agent, played\n"
        f"asyncio.run(played(agent({source!r})))\n"
    )
    root = Path(__file__).parents[3]
    key = f"tidemill-test-{os.getpid()}-{time.monotonic_ns()}"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "LC_MARK": key}
    running = subprocess.Popen([sys.executable, str(worker)], env=variables)
    until(lambda: noted.exists() and noted.read_text(), lambda: running.poll())
    assert len(kin(key)) == 3, "the worker, the keeper and the program"
    running.send_signal(signal.SIGKILL)
    running.wait()
    until(lambda: not kin(key), lambda: kin(key))


def test_an_environment_without_a_first_request_has_no_task_for_a_program() -> None:
    class Silent(Riddle):
        async def play(self, task: Any, policy: Any) -> Score:
            return Score((RewardComponent("right", 1.0, 1.0),), True)

    class Refusing(Riddle):
        async def play(self, task: Any, policy: Any) -> Score:
            raise TaskError("no such riddle")

    class Program2(Riddle):
        async def play(self, task: Any, policy: Any) -> Score:
            return policy.endpoint

    class UserFirst(Riddle):
        async def play(self, task: Any, policy: Any) -> Score:
            return await policy.chat([{"role": "user", "content": "x"}], trained=False)

    for inner, kind, reason in (
        (Silent, EnvironmentFailed, "never calls the policy"),
        (Refusing, TaskError, "no such riddle"),
        (Program2, EnvironmentFailed, "runs its own program"),
        (UserFirst, EnvironmentFailed, "simulated user"),
    ):
        error, _ = play(agent("pass"), inner(EnvironmentOptions()))
        assert isinstance(error, kind) and reason in str(error)


def test_an_environment_that_ignores_the_end_of_its_conversation_does_not_delay_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program_module, "GRACE_S", 0.1)

    class Stubborn(Riddle):
        async def play(self, task: Any, policy: Any) -> Score:
            while True:
                try:
                    return await super().play(task, policy)
                except Exception:  # noqa: BLE001 - that is what it does wrong
                    await asyncio.sleep(0)

    score, _ = play(agent("say('ok')"), Stubborn(EnvironmentOptions()))
    assert score.success is True


def test_an_environment_in_its_own_process_gives_the_task_and_scores() -> None:
    async def hosted() -> None:
        name = "tidemill.producers.environments.ledger:LedgerEnvironment"
        inner = await HostedEnvironment(name, {}, RolloutSettings()).start()
        source = """
        task = json.load(sys.stdin)
        assert [tool["function"]["name"] for tool in task["tools"]] == ["add", "sub"], task
        chat(task["messages"])
        """
        for _ in range(2):
            score, policy = await played(agent(source), inner, '{"entries":[5]}', lambda _: "answer 5")
            assert score.success is True and len(policy.turns) == 1, score
        await inner.close()

    asyncio.run(hosted())


def test_tasks_and_version_are_the_inner_ones() -> None:
    inner = Riddle(EnvironmentOptions())
    one, two = Program(inner, ["a"]), Program(inner, ["a", "b"])
    assert one.version != two.version == Program(inner, ["a", "b"]).version and one.version.startswith("riddle-1+")
    assert [draft.asks for draft in one.tasks(None)] == ["say ok"]  # type: ignore[arg-type]
