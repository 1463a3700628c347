"""Environments in their own processes: playing, limits, and the effect of hostile environments on others."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from itertools import islice, pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import build
from tests.waiting import until, until_async
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments import spawning
from tidemill.producers.environments.base import (
    ContextFull,
    Endpoint,
    EnvironmentFailed,
    EnvironmentHung,
    GenerationFailed,
    Reply,
    TaskDraft,
    TaskError,
    TaskQuery,
)
from tidemill.producers.environments.find import UnknownEnvironment, options_json
from tidemill.producers.environments.process import TICKS, HostedEnvironment, ProcessLost
from tidemill.producers.environments.spawning import encode
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.records import Task

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("error"), pytest.mark.timeout(300)]
HOSTILE = "hostile_environments:Hostile"
LIMITS = RolloutSettings(environment_timeout_s=30.0)
SHORT = RolloutSettings(environment_timeout_s=6.0)
"""For episodes that hang. A slow machine may not run a process for 5 s, which must not look like a hang."""
HUNG = f"environment {HOSTILE} hung: no answer within 1 s"
"""The error of an episode that hangs, if `hang` has shortened the wait."""
NEVER_S = 120.0


class FakePolicy:
    """Answers at once, or as the last message requests."""

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self.calls: list[tuple] = []
        self.given_up = 0
        self._endpoint = endpoint

    async def chat(self, messages, *, tools=(), max_tokens=None, trained=True):
        self.calls.append((messages, tools, max_tokens, trained))
        text = messages[-1]["content"]
        if text == "never":
            try:
                await asyncio.sleep(NEVER_S)
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        errors = {"failed": GenerationFailed("no replica"), "full": ContextFull("no room"), "bad": BadMessage("odd")}
        if text in errors:
            raise errors[text]
        if text == "bug":
            raise ZeroDivisionError("of the policy's own")
        said = str(self.given_up) if text == "given up" else text if text.startswith("say") else "fine"
        return Reply({"role": "assistant", "content": said}, "stop", ("{broken",))

    @property
    def endpoint(self):
        if self._endpoint is None:
            raise GenerationFailed("no endpoint is offered here")
        return self._endpoint


def task(payload: str) -> Task:
    return build(Task, task_id="t", environment="hostile", payload=payload, group_size=8, max_turns=64, seed=1,
                 deadline_at=2**60)  # fmt: skip


async def start(name: str = HOSTILE, limits: RolloutSettings = LIMITS, network: bool | None = None, **options):
    return await HostedEnvironment(name, options, limits, network).start()


async def outcome(hosted, payload: str, policy=None):
    """Return the score or the error."""
    try:
        return await hosted.play(task(payload), policy or FakePolicy())
    except Exception as error:  # noqa: BLE001 - a test looks at it
        return error


async def hang(hosted, payload: str = "hangs", policy=None):
    """Return the error of an episode that hangs. Once it does, the wait for its answer is shortened."""
    playing = asyncio.create_task(outcome(hosted, payload, policy))
    process = hosted._processes[-1]
    await until_async(Path(f"/proc/{process.hello.process}/cwd/hangs").exists)
    process._answer_s = 1.0
    return await playing


def play_one(payload: str, limits: RolloutSettings = LIMITS, policy=None, **options):
    """Return the outcome of an episode, and check that another one is played normally after it."""

    async def main():
        hosted = await start(limits=limits, **options)
        found = await outcome(hosted, payload, policy)
        while isinstance(after := await outcome(hosted, "good"), ProcessLost):
            pass
        assert after.total == 2.0
        await hosted.close()
        return found

    return asyncio.run(main())


def with_bystanders(payloads: list[str], limits: RolloutSettings, count: int = 12) -> list[str]:
    """Return the errors of episodes, each in its own process next to others, which call the policy, wait, and start
    again if lost."""

    async def bystander(hosted):
        while isinstance(found := await outcome(hosted, "good"), ProcessLost):
            pass
        return found

    async def beside(payload):
        hosted = await start(limits=limits)
        waiting = [asyncio.create_task(outcome(hosted, "waits")) for _ in range(count)]
        turn = asyncio.create_task(outcome(hosted, "waits_for_policy"))
        culprit = asyncio.create_task((hang if payload.startswith("hangs") else outcome)(hosted, payload))
        others = [asyncio.create_task(bystander(hosted)) for _ in range(count)]
        found = await culprit
        lost = await asyncio.gather(*waiting, turn)
        after = await asyncio.gather(*others, bystander(hosted))
        await hosted.close()
        assert isinstance(found, EnvironmentFailed), (payload, found)
        assert {type(each) for each in lost} == {ProcessLost}, payload
        assert {each.total for each in after} == {2.0}, payload
        return str(found)

    async def main():
        return await asyncio.gather(*map(beside, payloads))

    return asyncio.run(main())


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes that were started with this temporary folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(folder)) and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="module", autouse=True)
def own_garbage():
    """Collect what other files left, and keep the living objects out of the collections after each test."""
    with warnings.catch_warnings(action="ignore"):
        gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch, caplog):
    """A temporary folder for each test. After the test it is empty, and no process or pending task is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield folder
    gc.collect()  # reports leftover tasks at once
    assert not processes(folder)
    assert not list(folder.iterdir())
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


# Playing.


async def test_an_episode_is_played_in_another_process():
    hosted = await start(size=5)
    policy = FakePolicy()
    found = await hosted.play(task("good 9"), policy)
    again = await hosted.rescore(task("some"), [{"role": "user", "content": "a"}] * 3)
    cut = await hosted.cut_off(task("none"), [])
    nothing = await hosted.rescore(task("none"), [])
    await hosted.close()
    await hosted.close()
    assert (found.total, found.success, found.metrics) == (2.0, True, {"length": 4.0, "malformed": 1.0})
    assert (again.total, cut.success, nothing) == (3.0, False, None)
    (first, tools, most, trained), (second, none, unbounded, untrained) = policy.calls
    assert [each["role"] for each in (*first, *second)] == ["user", "user", "assistant", "user"]
    assert (tools[0]["function"]["name"], most, trained) == ("add", 9, True)
    assert (none, unbounded, untrained) == ((), None, False)
    assert (hosted.version, hosted.isolation, hosted.network, hosted.needs_tools) == (
        "hostile-7",
        "process",
        False,
        True,
    )
    assert options_json(hosted.options) == '{"size":5}'


async def test_a_thousand_episodes_at_once_share_one_process(temporary):
    hosted = await start()
    waiting = [asyncio.create_task(outcome(hosted, "waits")) for _ in range(500)]
    found = await asyncio.gather(*(outcome(hosted, "calls_side_by_side 3") for _ in range(1000)))
    shared = len(processes(temporary))
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await hosted.close()
    assert {each.total for each in found} == {1.0}
    assert shared == 2  # the process and its keeper


def test_a_policy_that_fails_raises_in_the_environment_as_itself():
    metrics = play_one("swallows full bad").metrics
    assert metrics == {"ContextFull: no room": 1.0, "BadMessage: odd": 1.0, "local": 4.0}


async def test_calls_after_a_failure_do_not_reach_the_worker():
    policy = FakePolicy()

    hosted = await start()
    playing = asyncio.create_task(hosted.play(task("calls_for_ever"), policy))
    await until_async(lambda: policy.calls or playing.done())
    await asyncio.wait([playing], timeout=0.5)  # There is no condition to wait for: it must not happen.
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (await outcome(hosted, "good")).total == 2.0
    await hosted.close()
    assert len(policy.calls) == 1


async def test_a_call_after_the_end_of_its_episode_fails():
    hosted = await start()
    assert (await hosted.play(task("calls_later"), FakePolicy())).metrics == {"nothing": 1.0}
    said = {"nothing": 1.0}
    while said == {"nothing": 1.0}:
        said = (await hosted.play(task("calls_later"), FakePolicy())).metrics
    await hosted.close()
    assert set(said) == {"GenerationFailed: the episode is over"}


async def test_an_episode_that_is_cancelled_here_is_cancelled_there():
    hosted = await start()
    policy = FakePolicy()
    for payload in ("waits", "waits_for_policy"):
        playing = asyncio.create_task(hosted.play(task(payload), policy))
        await until_async(lambda: policy.calls)
        policy.calls.clear()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    unborn = asyncio.create_task(hosted.play(task("waits"), policy))
    await asyncio.sleep(0)
    unborn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unborn
    process = hosted._processes[-1]
    await until_async(lambda: not process._leaving)
    assert not process.retired
    assert policy.given_up == 1
    await hosted.close()


# Opening.


@pytest.mark.parametrize(
    ("name", "options", "kind", "said"),
    [
        ("no_such_module:THING", {}, UnknownEnvironment, "No module named"),
        ("broken_exits:THING", {}, UnknownEnvironment, "SystemExit(3)"),
        ("broken_ends:THING", {}, EnvironmentFailed, "ended with code 3; it wrote: farewell"),
        ("broken_hangs:THING", {}, EnvironmentFailed, "not opened within 1 s"),
        ("broken_leaks:THING", {}, UnknownEnvironment, "does not import: MemoryError()"),
        (HOSTILE, {"size": "many", "colour": 3}, TaskError, "colour: Extra inputs are not permitted"),
        (HOSTILE, {"starts": "x" * (9 << 20)}, TaskError, "the options has 9,4"),
        ("hostile_environments:RaisesWhenOpened", {}, EnvironmentFailed, "not today"),
        ("hostile_environments:OddVersion", {}, EnvironmentFailed, "isolation"),
    ],
)
def test_an_environment_that_cannot_be_opened_has_a_reason(name, options, kind, said, tmp_path, monkeypatch):
    texts = {
        "exits": "import sys; sys.exit(3)",
        "ends": "import os; os.write(2, b'farewell'); os._exit(3)",
        "hangs": "import time; time.sleep(1e6)",
        "leaks": "kept = []\nwhile True: kept.append(bytearray(1 << 26))",
    }
    for word, text in texts.items():
        (tmp_path / f"broken_{word}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if "hangs" in name:
        monkeypatch.setattr("tidemill.producers.environments.process.START_S", 1.0)
    limits = RolloutSettings(environment_memory_mb=512)
    with pytest.raises(kind) as raised:
        asyncio.run(start(name, limits, **options))
    assert said in str(raised.value)
    assert type(raised.value) is kind


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    def fail(*_given, **_more):
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            spawning.SpawnedProcess(HOSTILE, {}, LIMITS, network=False)
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


async def test_processes_that_play_nothing_are_started_with_growing_delay(tmp_path):
    starts = tmp_path / "starts"

    hosted = await start(starts=str(starts))
    began, seen = time.monotonic(), []
    while len(seen) < 3:
        found = await outcome(hosted, "exits")
        seen.append(time.monotonic() - began)
        assert isinstance(found, EnvironmentFailed)
    await hosted.close()
    assert len(starts.read_text().splitlines()) == 3
    pauses = [after - before for before, after in pairwise(seen)]
    assert pauses[0] > 0.5 and pauses[1] > 1.0


async def test_a_closed_environment_plays_no_episode_but_draws_tasks():
    """As the feeder uses it: opened and closed in a separate event loop."""

    hosted = await start()
    await hosted.close()
    with pytest.raises(EnvironmentFailed, match="is closed"):
        await hosted.play(task("good"), FakePolicy())
    assert [draft.payload for draft in hosted.tasks(TaskQuery(1))] == ["good 0", "good 1", "good 2"]


async def test_closing_while_it_starts_leaves_nothing():
    hosted = HostedEnvironment(HOSTILE, {}, LIMITS)
    playing = asyncio.create_task(outcome(hosted, "good"))
    await asyncio.sleep(0.1)
    await hosted.close()
    found = await playing
    assert "is closed" in str(found)


def test_an_event_loop_that_ends_takes_its_process_with_it(temporary):
    async def main():
        hosted = await start()
        waiting = asyncio.create_task(outcome(hosted, "waits"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        return hosted

    hosted = asyncio.run(main())
    assert not processes(temporary)
    assert (asyncio.run(outcome(hosted, "good"))).total == 2.0
    asyncio.run(hosted.close())


# Hanging.


def test_an_episode_that_hangs_is_the_one_that_fails():
    """Each kind of hang has its own process; they hang at the same time."""
    ways = ("with_the_lock", "asleep", "in_a_task", "in_a_timer", "in_a_thread")
    for found in with_bystanders([f"hangs_{way}" for way in ways], SHORT):
        assert found == HUNG


def test_an_episode_that_hangs_fails_though_its_process_cannot_be_killed(monkeypatch):
    monkeypatch.setattr("tidemill.producers.environments.spawning.KILL_S", 0.2)

    async def main():
        hosted = await start(limits=SHORT)
        keeper = hosted._processes[-1]._spawned._keeper
        os.kill(keeper.pid, signal.SIGSTOP)
        try:
            return await hang(hosted)
        finally:
            os.kill(keeper.pid, signal.SIGCONT)
            await hosted.close()
            await asyncio.to_thread(keeper.communicate)

    assert str(asyncio.run(main())) == HUNG


async def test_a_score_from_before_another_episode_hangs_is_kept():
    hosted = await start(limits=SHORT)
    replies = asyncio.Event()

    class Together(FakePolicy):
        async def chat(self, messages, **more):
            self.calls.append(messages)
            if len(self.calls) == 5:  # the episode that will hang is answered last, together with the others
                replies.set()
                await asyncio.sleep(0)
            await replies.wait()
            return Reply({"role": "assistant", "content": "fine"}, "stop")

    policy = Together()
    others = [outcome(hosted, "asks", policy) for _ in range(4)]
    *scored, hung = await asyncio.gather(*others, hang(hosted, "hangs_with_the_lock", policy))
    await hosted.close()
    assert "hung" in str(hung)
    assert [each.total for each in scored] == [1.0] * 4


async def test_a_hang_of_the_loop_is_not_attributed_to_a_busy_thread():
    hosted = await start(limits=SHORT)
    working = asyncio.create_task(outcome(hosted, "works_in_a_thread"))
    await asyncio.sleep(0.2)
    found = await hang(hosted)
    await hosted.close()
    working = await working
    assert "hung" in str(found) and type(found) is EnvironmentHung
    assert type(working) is ProcessLost


async def a_hang_is_found_after_the_configured_time():
    hosted = await start(limits=SHORT)
    began = time.monotonic()
    assert "hung: no answer within 6 s" in str(await outcome(hosted, "hangs_asleep"))
    assert time.monotonic() - began > 5.0
    await hosted.close()


async def many_long_steps_are_not_a_hang():
    hosted = await start(limits=SHORT)
    found = await asyncio.gather(*(outcome(hosted, "long_step 0.8") for _ in range(10)))
    await hosted.close()
    assert {each.total for each in found} == {1.0}


async def a_stopped_worker_fails_no_episode():
    hosted = await start(limits=SHORT)
    playing = asyncio.create_task(outcome(hosted, "calls_side_by_side 2"))
    waiting = asyncio.create_task(outcome(hosted, "waits"))
    await asyncio.sleep(0.1)
    time.sleep(1.25 * SHORT.environment_timeout_s)
    assert (await playing).total == 1.0
    await asyncio.sleep(2 * SHORT.environment_timeout_s / TICKS)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    await hosted.close()


async def a_process_whose_episode_ignores_its_cancellation_gets_no_more_episodes():
    hosted = await start(limits=SHORT)
    policy = FakePolicy()
    stays = asyncio.create_task(outcome(hosted, "waits"))
    ignores = asyncio.create_task(hosted.play(task("ignores_cancellation"), policy))
    await until_async(lambda: policy.calls)
    ignores.cancel()
    await asyncio.wait([ignores], timeout=60)
    assert ignores.cancelled(), "the caller does not wait for the episode"
    first = hosted._processes[-1]
    await until_async(lambda: first.retired)
    assert not stays.done()
    assert (await outcome(hosted, "good")).total == 2.0
    assert hosted._processes[-1] is not first
    stays.cancel()
    await asyncio.wait([stays])
    await until_async(lambda: first.over)
    assert (await outcome(hosted, "good")).total == 2.0
    await hosted.close()


async def test_the_answer_timeout():
    """Cases that last for the whole timeout, side by side; the worker that stops has its own event loop."""
    await asyncio.gather(
        asyncio.to_thread(asyncio.run, a_stopped_worker_fails_no_episode()),
        a_hang_is_found_after_the_configured_time(),
        many_long_steps_are_not_a_hang(),
        a_process_whose_episode_ignores_its_cancellation_gets_no_more_episodes(),
    )


# Ending the process.


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ("exits", "ended with code 3; it wrote: the last words"),
        ("crashes", "was killed by SIGSEGV"),
        ("kills_itself", "was killed by SIGKILL"),
        ("kills_itself 40", "was killed by signal 40"),
        ("exits_in_a_task", "ended with code 1"),
        ("leaks", "used up its memory (512 MiB)"),
        ("leaks_shared", "raised"),
    ],
)
def test_an_episode_that_ends_the_process_is_the_one_that_fails(payload, said):
    limits = RolloutSettings(environment_memory_mb=512)
    if payload == "leaks_shared":  # the address space is full, and the process still usable
        assert "Cannot allocate memory" in str(play_one(payload, limits))
    else:
        (found,) = with_bystanders([payload], limits)
        assert said in found


async def test_the_end_of_a_process_between_steps_is_attributed_to_no_episode(tmp_path):
    hosted = await start()
    waiting = [asyncio.create_task(outcome(hosted, "waits")) for _ in range(3)]
    await hosted.play(task(f"dies_later {tmp_path / 'now'}"), FakePolicy())
    (tmp_path / "now").touch()
    found = await asyncio.gather(*waiting)
    after = await outcome(hosted, "good")
    await hosted.close()
    assert [type(each) for each in found] == [ProcessLost] * 3
    assert "ended with code 5" in str(found[0])
    assert after.total == 2.0


async def test_a_process_whose_keeper_is_killed_ends(temporary):
    hosted = await start()
    waiting = asyncio.create_task(outcome(hosted, "waits"))
    first = psutil.Process(hosted._processes[-1].hello.process)
    first.parent().kill()
    found = await waiting
    await until_async(lambda: not first.is_running())
    assert (await outcome(hosted, "good")).total == 2.0
    await hosted.close()
    assert "the keeper of its process ended with code -9" in str(found)
    for folder in temporary.iterdir():  # no process is left to remove it
        folder.rmdir()


@pytest.mark.parametrize("word", ["garbage", "deep", "long"])
def test_a_process_that_sends_an_invalid_message_is_lost(word):
    found = play_one(f"speaks_for_itself {word}")
    assert isinstance(found, ProcessLost)
    assert "sent an invalid message" in str(found)


# The end of an episode.

EPISODES = [
    ("calls_side_by_side 40", None, ""),
    ("gives_up", None, ""),
    ("writes stdout", None, ""),
    ("writes stderr", None, ""),
    ("raises task", TaskError, ""),
    ("raises value", EnvironmentFailed, "raised ValueError('a clear text')"),
    ("raises system_exit", EnvironmentFailed, "raised SystemExit(4)"),
    ("raises keyboard", EnvironmentFailed, "raised KeyboardInterrupt()"),
    ("raises base", EnvironmentFailed, "raised BaseException('of no kind')"),
    ("raises cancelled", EnvironmentFailed, "raised CancelledError()"),
    ("raises unprintable", EnvironmentFailed, "raised Unprintable"),
    ("raises long", EnvironmentFailed, "raised ValueError('xxx"),
    ("raises group", EnvironmentFailed, "ValueError('one')"),
    ("raises surrogate", EnvironmentFailed, "?"),
    ("passes failed", GenerationFailed, ""),
    ("passes full", ContextFull, ""),
    ("passes bad", BadMessage, ""),
    ("passes bug", ZeroDivisionError, ""),
    ("passes_max_tokens 5", BadMessage, "`max_tokens` must be a whole number"),
    ("passes_trained 1", BadMessage, "`trained` True or False"),
    ("wraps", GenerationFailed, "no replica"),
    ("swallows full failed bad", GenerationFailed, "no replica"),
    ("sends_large_message raised", GenerationFailed, "a call of the policy has 100,000,"),
    ("sends_large_message swallowed", GenerationFailed, "a call of the policy has 100,000,"),
    ("writes file", EnvironmentFailed, "File too large"),
    ("good " + "x" * (9 << 20), EnvironmentFailed, "the task has 9,4"),
    # tests/producers/rollout/test_player.py has the other faults of a score.
    ("returns nan", EnvironmentFailed, "answer.value is nan, which is no finite number"),
    ("returns none", EnvironmentFailed, "returned a NoneType, not a Score"),
    ("returns surrogate", EnvironmentFailed, "surrogates not allowed"),
    ("returns object", EnvironmentFailed, "returned no score: success is <object object"),
    ("returns spite", EnvironmentFailed, "no items"),
    ("returns large", EnvironmentFailed, "its components and metrics need 100000024 bytes"),
]
"""Payloads of episodes, and the error with which each ends: None for a score of 1."""


async def test_what_an_episode_raises_returns_or_sends_fails_only_that_episode():
    policies = [FakePolicy() for _ in EPISODES]

    hosted = await start()
    playing = zip(EPISODES, policies, strict=True)
    ended = await asyncio.gather(*(outcome(hosted, payload, policy) for (payload, *_), policy in playing))
    assert (await outcome(hosted, "good")).total == 2.0
    assert len(hosted._processes) == 1 and not hosted._processes[0].over
    await hosted.close()
    for found, (payload, error, said), policy in zip(ended, EPISODES, policies, strict=True):
        if error is None:
            assert found.total == 1.0, payload
            continue
        assert type(found) is error and said in str(found), payload
        assert len(str(found)) < 3000
        if said == "no replica":
            assert policy.calls[-1][0][-1]["content"] == "failed", "nothing was asked after it"


# Processes.


@pytest.mark.parametrize("end", ["close", "hang"])
async def test_processes_that_an_environment_started_end_with_it(end):
    hosted = await start(limits=SHORT)
    scores = [await hosted.play(task(f"forks {word}"), FakePolicy()) for word in ("child", "orphan", "program")]
    started = [psutil.Process(int(each.total)) for each in scores]
    assert all(each.is_running() for each in started)
    if end == "hang":
        assert "hung" in str(await hang(hosted))
        await until_async(lambda: not any(each.is_running() for each in started))
    await hosted.close()
    assert not any(each.is_running() for each in started)


async def test_a_forked_copy_of_the_process_ends_and_sends_nothing():
    policy = FakePolicy()

    hosted = await start()
    copy = psutil.Process(int((await hosted.play(task("forked_copy_goes_on"), policy)).total))
    await until_async(lambda: copy.status() == "zombie")
    assert (await outcome(hosted, "good", policy)).total == 2.0
    await hosted.close()
    assert [messages[0]["content"] for messages, *_ in policy.calls] == ["hello", "hello"]


WORKER = """
import asyncio, os, signal, sys
sys.path[:0] = sys.argv[1:2]
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments import spawning
from tidemill.producers.environments.base import TaskDraft
from tidemill.producers.environments.check import ScriptedPolicy, task_of
from tidemill.producers.environments.process import HostedEnvironment

# A shell's background jobs ignore the interrupt, and what they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
spawning.KILL_S = 1.0  # the copy keeps the keeper's pipe open

async def main():
    hosted = await HostedEnvironment("hostile_environments:Hostile", {}, RolloutSettings()).start()

    async def play(payload):
        await hosted.play(task_of(hosted, "hostile", TaskDraft(payload, "", 8)), ScriptedPolicy(["fine"], 8))

    for word in ("child", "orphan"):
        await play(f"forks {word}")
    if not (copy := os.fork()):  # it holds every descriptor of the worker's
        signal.pause()
    print(copy, flush=True)
    await play(sys.argv[2])

asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "payload"), [(signal.SIGKILL, "hangs_with_the_lock"), (signal.SIGINT, "waits")])
def test_a_worker_that_ends_leaves_no_process(number, payload, temporary):
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), payload]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        copy = psutil.Process(int(worker.stdout.readline()))
        # The worker and its copy, the keeper, its process, and two more; the orphan's parent may not have ended yet.
        until(lambda: len(processes(temporary)) == 6)
        worker.send_signal(number)
        worker.wait(60)
        until(lambda: processes(temporary) == [copy])
        copy.kill()
        errors = worker.stderr.read()
    until(lambda: not list(temporary.iterdir()))
    assert b"never" not in errors and b"ResourceWarning" not in errors


# Access of a process.


def test_a_process_has_no_credentials_folder_or_descriptor_of_the_worker(monkeypatch, temporary):
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "k1",
        "TIDEMILL_KAFKA__PASSWORD": "k2",
        "HF_TOKEN": "k3",
        "OPENAI_API_KEY": "k4",
    }
    for name, value in {**secrets, "HF_HOME": "/somewhere", "LC_NUMERIC": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    with open(__file__) as held:
        os.set_inheritable(held.fileno(), True)
        seen = play_one("tells").metrics
    told = {name.partition(" ")[2] for name in seen if name.startswith("variable")}
    variables = dict(each.split("=", 1) for each in told)
    assert not {"k1", "k2", "k3", "k4"} & {*variables.values()}
    assert not any(name.startswith(("AWS", "TIDEMILL", "OPENAI")) for name in variables)
    assert (variables["HF_HUB_CACHE"], variables["LC_NUMERIC"]) == ("/somewhere/hub", "C.UTF-8")
    assert Path(variables["HOME"]).parent == temporary
    assert f"folder {variables['HOME']}" in seen and f"temporary {variables['HOME']}" in seen
    descriptors = sorted(name.partition(" ")[2].split(":")[0] for name in seen if name.startswith("descriptor"))
    loop = ["anon_inode", "socket", "socket"]
    assert descriptors == sorted([*loop, "socket", "/memfd", "/dev/null", "pipe"])  # the last is its stderr
    assert seen["session"] not in (os.getsid(0), 0.0)


@pytest.mark.parametrize(
    ("name", "network", "opened"),
    [
        (HOSTILE, None, False),
        (HOSTILE, True, True),
        ("hostile_environments:Online", None, True),
        ("hostile_environments:Online", False, False),
    ],
)
def test_the_network_is_closed_unless_it_is_requested(name, network, opened):
    async def main(port):
        hosted = await start(name, network=network)
        offered = FakePolicy(Endpoint("http://127.0.0.1:1", "key"))
        seen = (await hosted.play(task(f"connects {port}"), offered)).metrics
        if opened:
            without = (await hosted.play(task(f"connects {port}"), FakePolicy())).metrics
            assert "EnvironmentFailed: no endpoint is offered here" in without
        await hosted.close()
        return hosted, seen

    with socket.create_server(("127.0.0.1", 0)) as server:
        hosted, seen = asyncio.run(main(server.getsockname()[1]))
    assert hosted.network is opened
    offer = "endpoint http://127.0.0.1:1 key" if opened else "EnvironmentFailed: environment hostile_environments:"
    assert len([each for each in seen if each.startswith(offer)]) == 1
    reached = {name: value for name, value in seen.items() if " " not in name}
    tried = ("port", "datagram", "local", "netlink", "program", "pair")  # name lookups use datagrams
    assert reached == {name: float(opened or name == "pair") for name in tried}


def test_a_machine_that_cannot_close_the_network_opens_nothing(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'abacus'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(EnvironmentFailed, match=r"no filter is known for abacus.*network = true"):
        asyncio.run(start())

    async def main():
        hosted = await start(network=True)
        found = await outcome(hosted, "good")
        await hosted.close()
        return found

    assert asyncio.run(main()).total == 2.0


# Tasks.


def hosted_tasks(name: str, limits: RolloutSettings = LIMITS, **options):
    return HostedEnvironment(f"hostile_environments:{name}", options, limits).tasks(TaskQuery(3))


def test_tasks_are_drawn_in_their_own_process(temporary):
    drafts = hosted_tasks("Hostile", size=10**9)
    assert not processes(temporary)
    first = list(islice(drafts, 50))
    assert first[2] == TaskDraft("good 2", "question 2 of 3", 3)
    assert len(processes(temporary)) == 2
    drafts.close()
    assert not processes(temporary)
    again = hosted_tasks("Hostile", size=10**9)
    assert list(islice(again, 50)) == first
    again.close()
    assert len(list(hosted_tasks("Hostile", size=4))) == 4


def test_the_order_of_tasks_does_not_depend_on_the_workers_hash_seed():
    orders = set()
    for _ in range(2):
        orders.add(tuple(draft.asks for draft in hosted_tasks("Unordered")))
    assert len(orders) == 1


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("hangs", "hung: no task within 1 s"),
        ("raises", "raised KeyError('no such thing')"),
        ("task_error", "no more of these"),
        ("exits", "draws no more tasks: its process ended with code 9"),
        ("leaks", "draws no more tasks: its process used up its memory (1024 MiB)"),
        ("number", "yielded a int, not a TaskDraft"),
        ("fields", "a wrong draft: Expected `str`, got `int` - at `$.payload`"),
        ("surrogate", "surrogates not allowed"),
        ("object", "not JSON serializable"),
        ("large", "a task has 100,000,"),
    ],
)
def test_an_environment_that_cannot_draw_tasks_has_a_reason(do, said):
    limits = RolloutSettings(environment_timeout_s=1.0 if do == "hangs" else 30.0, environment_memory_mb=1024)
    drafts = hosted_tasks("BadTasks", limits, do=do)
    assert next(drafts).payload == "1"
    with pytest.raises(TaskError) as raised:
        next(drafts)
    assert said in str(raised.value)


def test_an_environment_whose_tasks_do_not_begin_has_a_reason():
    with pytest.raises(TaskError, match="no tasks at all"):
        next(hosted_tasks("NoTasks", do="none"))
    with pytest.raises(UnknownEnvironment, match="has no Nothing"):
        next(hosted_tasks("Nothing"))
    with pytest.raises(TaskError, match="do: Field required"):
        next(hosted_tasks("BadTasks"))


def test_a_failed_process_of_tasks_does_not_affect_another():
    good = hosted_tasks("Hostile", size=10**9)
    bad = hosted_tasks("BadTasks", RolloutSettings(environment_timeout_s=0.3), do="hangs")
    next(good), next(bad)
    with pytest.raises(TaskError):
        next(bad)
    assert next(good).payload == "good 1"
    good.close()


# Messages.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=5))
def test_a_message_is_one_line_and_reads_back(frame):
    line = encode(frame)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line) == frame


def test_a_message_at_the_size_limit_is_sent_and_one_above_it_is_not(monkeypatch):
    monkeypatch.setattr(spawning, "MESSAGE_BYTES", 100)
    assert len(encode(["x" * 95])) == 100
    with pytest.raises(TaskError, match="the task has 101 bytes"):
        encode(["x" * 96], "the task", TaskError)


@pytest.mark.parametrize("frame", [["\ud800"], [{"\udfff": 1}], [object()], [{1, 2}]])
def test_a_value_that_json_cannot_represent_is_not_a_message(frame):
    with pytest.raises((TypeError, ValueError)):
        encode(frame)
