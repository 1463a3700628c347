"""Environments that misbehave: imported by the processes that the tests of `process` start."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from tidemill.producers.environments.base import (
    ContextFull,
    Environment,
    EnvironmentFailed,
    EnvironmentOptions,
    GenerationFailed,
    Score,
    TaskDraft,
    TaskError,
)
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.records import RewardComponent

ASK = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def score(value=1.0, **metrics):
    return Score((RewardComponent("answer", value, 1.0),), success=True, metrics=metrics)


class HostileOptions(EnvironmentOptions):
    """Options."""

    size: int = 3
    """A number."""

    starts: str = ""
    """File that gets a line each time the environment is opened."""


class Hostile(Environment):
    """Runs the method that its task names: the payload is the method's name and, if present, its argument."""

    options_model = HostileOptions
    version = "hostile-7"
    needs_tools = True

    def __init__(self, options):
        super().__init__(options)
        if options.starts:
            with open(options.starts, "a") as starts:
                starts.write("open\n")

    def tasks(self, query):
        for number in range(self.options.size):
            yield TaskDraft(f"good {number}", f"question {number} of {query.seed}", number + 1)

    async def play(self, task, policy):
        name, _, word = task.payload.partition(" ")
        return await getattr(self, name)(policy, word)

    async def rescore(self, task, messages):
        return None if task.payload == "none" else score(float(len(messages)))

    async def good(self, policy, word):
        reply = await policy.chat([ASK], tools=[TOOL], max_tokens=int(word or 7))
        again = await policy.chat([ASK, reply.message, ASK], trained=False)
        return score(2.0, length=len(again.content), malformed=len(reply.malformed))

    async def asks(self, policy, _word):
        await policy.chat([ASK])
        return score()

    async def waits(self, policy, _word):
        """Wait without end; end when cancelled."""
        await policy.chat([ASK])
        await asyncio.sleep(1e6)

    async def waits_for_policy(self, policy, _word):
        await policy.chat([{"role": "user", "content": "never"}])

    # It hangs. The file `hangs` says that it has begun to.

    async def hangs(self, _policy, _word):
        Path("hangs").touch()
        while True:
            pass

    async def hangs_with_the_lock(self, policy, _word):
        await policy.chat([ASK])
        Path("hangs").touch()
        return score(eval("9**9**9**9"))

    async def hangs_asleep(self, policy, _word):
        await policy.chat([ASK])
        Path("hangs").touch()
        time.sleep(1e6)

    async def hangs_in_a_task(self, policy, _word):
        await asyncio.gather(policy.chat([ASK]), asyncio.create_task(self.hangs_with_the_lock(policy, "")))

    async def hangs_in_a_timer(self, _policy, _word):
        def sleep():
            Path("hangs").touch()
            time.sleep(1e6)

        asyncio.get_running_loop().call_later(0.01, sleep)
        await asyncio.sleep(1e6)

    async def works_in_a_thread(self, policy, _word):
        """Keep a thread busy that never holds the lock for long."""

        def work():
            while True:
                pass

        await asyncio.to_thread(work)

    async def hangs_in_a_thread(self, policy, _word):
        def work():
            time.sleep(0.3)  # until the event loop is idle
            Path("hangs").touch()
            return eval("9**9**9**9")

        await policy.chat([ASK])
        return score(await asyncio.to_thread(work))

    async def long_step(self, _policy, word):
        time.sleep(float(word))
        return score()

    async def ignores_cancellation(self, policy, _word):
        with suppress(asyncio.CancelledError):
            await policy.chat([ASK])
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue

    # It ends the process.

    async def exits(self, policy, word):
        await policy.chat([ASK])
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os._exit(int(word or 3))

    async def crashes(self, policy, _word):
        await policy.chat([ASK])
        ctypes.string_at(0)

    async def kills_itself(self, policy, word):
        await policy.chat([ASK])
        os.kill(os.getpid(), int(word or signal.SIGKILL))

    async def leaks(self, policy, _word):
        kept = []
        for _ in range(16):
            await policy.chat([ASK])
            kept.append(bytearray(1 << 26))
        return score(len(kept))

    async def leaks_shared(self, policy, _word):
        kept = []
        while True:
            await policy.chat([ASK])
            kept.append(mmap.mmap(-1, 1 << 28))

    async def exits_in_a_task(self, policy, _word):
        await policy.chat([ASK])

        async def leave():
            raise SystemExit(3)

        await asyncio.gather(asyncio.create_task(leave()), asyncio.sleep(1e6))

    async def dies_later(self, _policy, word):
        """End the process when the file `word` exists."""

        def die():
            while not os.path.exists(word):
                time.sleep(0.01)
            os._exit(5)

        threading.Thread(target=die, daemon=True).start()
        return score()

    async def speaks_for_itself(self, policy, word):
        """Write into the connection to the worker."""
        await policy.chat([ASK])
        line = {"garbage": b"what?\n", "deep": b"[" * 100_000 + b"\n", "long": b"9" * (1 << 24)}[word]
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
                worker, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            except OSError:
                continue
            if worker != os.getpid():
                connection.setblocking(True)
                connection.sendall(line)
        await asyncio.sleep(1e6)

    # It raises.

    async def raises(self, _policy, word):
        class Unprintable(Exception):
            def __repr__(self):
                raise RuntimeError("no text")

        errors = {
            "value": ValueError("a clear text"),
            "system_exit": SystemExit(4),
            "keyboard": KeyboardInterrupt(),
            "base": BaseException("of no kind"),
            "cancelled": asyncio.CancelledError(),
            "unprintable": Unprintable(),
            "long": ValueError("x" * 10**7),
            "group": ExceptionGroup("two", [ValueError("one"), KeyError("two")]),
            "task": TaskError("not my payload"),
            "surrogate": EnvironmentFailed("\ud800"),
        }
        raise errors[word]

    async def swallows(self, policy, word):
        """Report the policy's errors instead of raising them."""
        seen = {}
        for text in word.split():
            try:
                await policy.chat([{"role": "user", "content": text}])
            except (GenerationFailed, ContextFull, BadMessage) as error:
                seen[f"{type(error).__name__}: {error}"] = 1.0
        for messages in ([], "text", [{"role": "nobody"}], [3]):
            try:
                await policy.chat(messages)
            except BadMessage:
                seen["local"] = seen.get("local", 0.0) + 1
        return score(1.0, **seen)

    async def calls_for_ever(self, policy, _word):
        while True:
            with suppress(GenerationFailed):
                await policy.chat([{"role": "user", "content": "failed"}])
            await asyncio.sleep(0)

    async def wraps(self, policy, _word):
        try:
            await policy.chat([{"role": "user", "content": "failed"}])
        except GenerationFailed as error:
            raise ValueError("my own error") from error

    async def passes(self, policy, word):
        await policy.chat([{"role": "user", "content": word}])

    async def passes_max_tokens(self, policy, word):
        await policy.chat([ASK], max_tokens=float(word))

    async def passes_trained(self, policy, word):
        await policy.chat([ASK], trained=int(word))

    async def gives_up(self, policy, _word):
        """Give up a call until the policy reports one; a call may end before the policy has begun it."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(policy.chat([{"role": "user", "content": "never"}]), 0.05)
            if given_up := float((await policy.chat([{"role": "user", "content": "given up"}])).content):
                return score(given_up)

    async def calls_side_by_side(self, policy, word):
        told = [{"role": "user", "content": f"say {number}"} for number in range(int(word))]
        replies = await asyncio.gather(*(policy.chat([each]) for each in told))
        return score(float([reply.content for reply in replies] == [f"say {number}" for number in range(int(word))]))

    async def calls_later(self, policy, _word):
        """Leave a task that calls the policy after the episode; report the result of the previous one's call."""
        path = Path("later")
        said = path.read_text() if path.exists() else ""

        async def call():
            await asyncio.sleep(0.05)
            try:
                await policy.chat([ASK])
            except GenerationFailed as error:
                path.write_text(f"{type(error).__name__}: {error}")

        self.kept = asyncio.create_task(call())
        return score(1.0, **{said or "nothing": 1.0})

    # It returns values that are not scores.

    async def returns(self, _policy, word):
        class Spiteful(dict):
            def items(self):
                raise RuntimeError("no items")

        return {
            "nan": lambda: score(float("nan")),
            "none": lambda: None,
            "surrogate": lambda: score(1.0, **{"\ud800": 1.0}),
            "object": lambda: Score((RewardComponent("a", 1.0, 1.0),), success=object()),
            "spite": lambda: Score((RewardComponent("a", 1.0, 1.0),), success=None, metrics=Spiteful()),
            "large": lambda: Score((RewardComponent("x" * 10**8, 1.0, 1.0),), success=None),
        }[word]()

    # It writes.

    async def writes(self, _policy, word):
        target = {"stdout": 1, "stderr": 2}.get(word)
        descriptor = os.open("large", os.O_CREAT | os.O_WRONLY) if target is None else target
        line = b"x" * (1 << 20)
        for _ in range(100):
            await asyncio.sleep(0)
            os.write(descriptor, line)
        return score()

    async def sends_large_message(self, policy, word):
        large = [{"role": "user", "content": "x" * 10**8}]
        if word != "swallowed":
            await policy.chat(large)
        try:
            await policy.chat(large)
        except GenerationFailed:
            return score()

    # It starts processes.

    async def forks(self, _policy, word):
        """Start a process that keeps running: a child, an orphan, or a program; the score is its id."""
        if word == "program":
            program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"], start_new_session=True)
            return score(float(program.pid))
        read, write = os.pipe()
        if not os.fork():
            os.setsid()
            if word == "child" or not os.fork():
                os.write(write, str(os.getpid()).encode())
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1e6)
            os._exit(0)
        return score(float(os.read(read, 100)))

    async def forked_copy_goes_on(self, policy, _word):
        copy = os.fork()
        if not copy:
            await policy.chat([{"role": "user", "content": "the copy"}])
        return score(float(copy))

    # It inspects its surroundings.

    async def tells(self, _policy, _word):
        environ = {f"variable {name}={value}": 0.0 for name, value in os.environ.items()}
        folders = {f"folder {os.getcwd()}": 0.0, f"temporary {tempfile.gettempdir()}": 0.0}
        opened = {}
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the descriptor of this listing
                opened[f"descriptor {os.readlink(f'/proc/self/fd/{number}')}"] = 0.0
        return score(1.0, **environ, **folders, **opened, session=os.getsid(0), process=os.getpid())

    async def connects(self, policy, word):
        """Try to open sockets of every kind; the metrics contain the result of each."""
        seen = {}
        for name, attempt in {
            "port": lambda: socket.create_connection(("127.0.0.1", int(word)), timeout=5).close(),
            "local": lambda: socket.socket(socket.AF_UNIX).close(),
            "datagram": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close(),
            "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
            "program": lambda: subprocess.run(
                [sys.executable, "-c", "import socket; socket.socket()"], check=True, capture_output=True
            ),
            "pair": lambda: [each.close() for each in socket.socketpair()],
        }.items():
            try:
                attempt()
                seen[name] = 1.0
            except (OSError, subprocess.CalledProcessError):
                seen[name] = 0.0
        try:
            seen[f"endpoint {policy.endpoint.base_url} {policy.endpoint.api_key}"] = 1.0
        except EnvironmentFailed as error:
            seen[f"{type(error).__name__}: {error}"] = 1.0
        return score(1.0, **seen)


class Online(Hostile):
    """Asks for a network."""

    network = True
    isolation = "loop"


class Unordered(Hostile):
    """Draws its tasks from a set."""

    def tasks(self, query):
        yield from (TaskDraft(each, each) for each in {f"question {number}" for number in range(100)})


class BadTasks(Environment):
    """Draws tasks as its option says."""

    class Options(EnvironmentOptions):
        """Options."""

        do: str
        """How."""

    options_model = Options

    def tasks(self, query):
        do = self.options.do
        yield TaskDraft("1", "first")
        if do == "hangs":
            while True:
                pass
        elif do == "raises":
            raise KeyError("no such thing")
        elif do == "task_error":
            raise TaskError("no more of these")
        elif do == "exits":
            os._exit(9)
        elif do == "leaks":
            kept = []
            while True:
                kept.append(bytearray(1 << 26))
        yield {
            "number": lambda: 7,
            "none": lambda: None,
            "fields": lambda: TaskDraft(3, ["x"]),
            "surrogate": lambda: TaskDraft("\ud800", "x"),
            "object": lambda: TaskDraft(object(), "x"),
            "large": lambda: TaskDraft("x" * 10**8, "x"),
            "nothing": lambda: TaskDraft("2", "second"),
        }[do]()

    async def play(self, task, policy):
        raise NotImplementedError


class NoTasks(BadTasks):
    """Does not even begin."""

    def tasks(self, query):
        raise RuntimeError("no tasks at all")


class RaisesWhenOpened(Environment):
    """Cannot be opened."""

    def __init__(self, options):
        raise {"value": ValueError, "exit": SystemExit}["value"]("not today")

    def tasks(self, query):
        yield from ()

    async def play(self, task, policy):
        raise NotImplementedError


class OddVersion(Hostile):
    """Declares an isolation that does not exist."""

    isolation = "thread"
