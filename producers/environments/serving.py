"""The process of an environment: opens the environment, and plays episodes concurrently or draws tasks.

The process inherits a socket for messages, and shared memory: the marks, and after them the opening, which contains the
environment's name and the resource limits. The limits are set before foreign code is imported.

Invariants: an error of foreign code is the answer to one call, and the other calls continue; an error that would end
the process ends it at once, while the marks name the episode that raised it. No message is above the size limit: an
episode with a larger message fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar
from dataclasses import asdict
from functools import partial
from itertools import chain, count
from typing import Any, TypeVarTuple

import msgspec

from tidemill.producers.environments import base
from tidemill.producers.environments.base import Messages
from tidemill.producers.environments.confinement import OUT_OF_MEMORY, deny_network, limit_resources
from tidemill.producers.environments.find import environment_type, options_json
from tidemill.producers.environments.spawning import MESSAGE_BYTES, PORTABLE, EpisodeMarks, encode, failure
from tidemill.schemas.chat.messages import BadMessage, Message, Tool, checked_messages, checked_tools
from tidemill.schemas.records import Task

Ts = TypeVarTuple("Ts")
EPISODE: ContextVar[int] = ContextVar("episode", default=0)
"""Number of the episode of this code; 0 for none."""


class MarkingEventLoop(asyncio.SelectorEventLoop):
    """An event loop that marks the episode of each callback (a step of a task, a timer) while the callback runs."""

    def __init__(self, marks: EpisodeMarks) -> None:
        self._words = marks.words
        super().__init__()
        self.set_default_executor(MarkingThreadPool(marks))

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
        words = self._words
        words[0] = EPISODE.get()
        words[1] += 1
        try:
            callback(*args)
        except Exception:
            words[0] = 0
            raise
        except BaseException:  # noqa: BLE001 - a task raised SystemExit: the process ends, in this episode's name
            traceback.print_exc()
            os._exit(1)
        words[0] = 0


class MarkingThreadPool(ThreadPoolExecutor):
    """A thread pool whose threads mark the episode of their work."""

    def __init__(self, marks: EpisodeMarks) -> None:
        super().__init__(min(marks.MOST_THREADS, (os.cpu_count() or 1) + 4), "environment", self._begin)
        self._words, self._places, self._local = marks.words, count(2, 2), threading.local()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        return super().submit(self._work, EPISODE.get(), partial(function, *args, **kwargs))

    def _begin(self) -> None:
        self._local.place = next(self._places)
        self._words[self._local.place + 1] = threading.get_native_id()

    def _work(self, episode: int, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        self._words[self._local.place] = episode
        try:
            return work()
        finally:
            self._words[self._local.place] = 0


class HostedEpisode(base.Policy):
    """One running call of the worker: it runs in a task, with this policy, whose turns the worker samples."""

    def __init__(self, server: EpisodeServer, number: int, endpoint: list[str] | str) -> None:
        self._server, self._number, self._endpoint = server, number, endpoint
        self.fault = ""
        """Reason why it has failed, also if the environment catches GenerationFailed."""
        self.over = False
        self.running: asyncio.Task[None]

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> base.Reply:
        conversation, offered = checked_messages(messages), checked_tools(tools)
        if not isinstance(max_tokens, int | None) or not isinstance(trained, bool):
            # The worker accepts no such message.
            raise BadMessage("`max_tokens` must be a whole number or None, and `trained` True or False")
        if self.over or self.fault:
            raise base.GenerationFailed("the episode is over" if self.over else self.fault)
        server, request = self._server, next(self._server.requests)
        try:
            frame = ["chat", self._number, request, conversation, json.dumps(offered), max_tokens, trained]
            server.writer.write(encode(frame, "a call of the policy", base.GenerationFailed))
        except base.GenerationFailed as error:
            self.fault = str(error)
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise BadMessage(f"a call of the policy cannot be written as JSON: {error}") from error
        answer: asyncio.Future[base.Reply] = asyncio.get_running_loop().create_future()
        server.answers[request] = answer
        try:
            return await answer
        except base.GenerationFailed as error:
            self.fault = str(error)
            raise
        except asyncio.CancelledError:
            server.writer.write(encode(["give_up", self._number, request]))
            raise
        finally:
            del server.answers[request]

    @property
    def endpoint(self) -> base.Endpoint:
        if isinstance(self._endpoint, str):
            raise base.EnvironmentFailed(self._endpoint)
        return base.Endpoint(*self._endpoint)


class EpisodeServer:
    """Plays the episodes that the worker requests."""

    def __init__(self, environment: base.Environment, writer: asyncio.StreamWriter) -> None:
        self._environment, self.writer = environment, writer
        self._episodes: dict[int, HostedEpisode] = {}
        self.answers: dict[int, asyncio.Future[base.Reply]] = {}
        self.requests = count(1)

    def take(self, frame: list[Any]) -> None:
        """Process one message of the worker."""
        match frame:
            case ["ping"]:
                pass  # reading it was a step of the event loop
            case ["reply" | "raise", request, *_] if request not in self.answers or self.answers[request].done():
                pass
            case ["reply", request, message, finish, malformed, tokens]:
                self.answers[request].set_result(base.Reply(message, finish, tuple(malformed), tuple(tokens)))
            case ["raise", request, kind, text]:
                self.answers[request].set_exception(PORTABLE[kind](text))
            case ["cancel", number]:
                if number in self._episodes:
                    self._episodes[number].running.cancel()
            case [kind, number, task, messages, endpoint]:
                context = Context()
                context.run(EPISODE.set, number)
                episode = self._episodes[number] = HostedEpisode(self, number, endpoint)
                playing = self._play(number, episode, kind, msgspec.convert(task, Task), messages)
                episode.running = asyncio.get_running_loop().create_task(playing, context=context)
                episode.running.add_done_callback(partial(self._ended, number))

    async def close(self) -> None:
        """Cancel the running episodes, and close the environment."""
        for episode in self._episodes.values():
            episode.running.cancel()
        await self._environment.close()

    async def _play(self, number: int, episode: HostedEpisode, kind: str, task: Task, messages: list[Message]) -> None:
        try:
            try:
                method = getattr(self._environment, kind)  # `play`, `cut_off` or `rescore`
                found: object = await method(task, episode if kind == "play" else messages)
                if episode.fault:
                    raise base.GenerationFailed(episode.fault)
                if found is not None or kind != "rescore":
                    score = base.checked_score(found)
                    rewards = [asdict(part) for part in score.rewards]
                    found = {"rewards": rewards, "success": score.success, "metrics": {**score.metrics}}
                line = encode(["done", number, found], "the score")
            except MemoryError:
                raise
            except BaseException as error:  # noqa: BLE001 - foreign code raises any error, and other episodes go on
                cause = base.GenerationFailed(episode.fault) if episode.fault else error
                line = encode(["failed", number, *failure(cause)])
            # Write at once: the next step of another episode may end this process.
            self.writer.write(line)
        except MemoryError:
            traceback.print_exc(limit=-3)
            os._exit(OUT_OF_MEMORY)

    def _ended(self, number: int, playing: asyncio.Task[None]) -> None:
        self._episodes.pop(number).over = True
        if playing.cancelled():  # before its first step
            self.writer.write(encode(["failed", number, "", "cancelled", ""]))


def main() -> None:
    """Open the environment, report it, and execute the worker's requests."""
    connection, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)  # a forked copy cannot write to the connection
    marks = EpisodeMarks(memory)
    with open(memory, "rb") as shared:
        shared.seek(marks.SIZE)
        opening = json.load(shared)
    tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
    limit_resources(opening["environment_memory_mb"] << 20, opening["environment_file_mb"] << 20)
    sys.path[:] = opening["path"]
    try:
        if not opening["network"]:
            deny_network()
    except OSError as error:
        text = (
            f"this machine cannot deny sockets to its process ({error.strerror}): allow them (`network = true`), or "
            "run it in the worker (`isolation = 'loop'`)"
        )
        connection.sendall(encode(["refused", *failure(base.EnvironmentFailed(text))]))
        return
    if opening["seed"] is not None:
        draw(connection, opening)
        return
    with asyncio.Runner(loop_factory=lambda: MarkingEventLoop(marks)) as runner:
        runner.run(play(connection, opening))


def opened(opening: dict[str, Any]) -> tuple[base.Environment | None, bytes]:
    """Open the environment; return it, or None if it cannot be opened, and the first answer."""
    try:
        environment = environment_type(opening["name"]).open(opening["options"])
        learned = {
            "process": os.getpid(),
            "version": str(environment.version),
            "isolation": environment.isolation,
            "network": bool(environment.network),
            "needs_tools": bool(environment.needs_tools),
            "options": json.loads(options_json(environment.options)),
            "option_rows": environment.option_rows(),
        }
        return environment, encode(["hello", learned])
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - opening runs foreign code, which raises anything
        return None, encode(["refused", *failure(error)])


async def play(connection: socket.socket, opening: dict[str, Any]) -> None:
    """Play episodes until the worker sends `close`, or its connection ends."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MESSAGE_BYTES)
    environment, answer = opened(opening)
    writer.write(answer)
    if environment is not None:
        server = EpisodeServer(environment, writer)
        while (line := await reader.readline()) and (frame := json.loads(line)) != ["close"]:
            server.take(frame)
        await server.close()
    writer.close()


def draw(connection: socket.socket, opening: dict[str, Any]) -> None:
    """Send one draft for each message of the worker."""
    environment, answer = opened(opening)
    connection.sendall(answer)
    if environment is None:
        return
    # The call too is made within the `try` below.
    drafts = chain.from_iterable(map(environment.tasks, [base.TaskQuery(opening["seed"])]))
    for _line in connection.makefile("rb"):
        try:
            draft = next(drafts, None)
            if not isinstance(draft, base.TaskDraft | None):
                raise base.TaskError(f"the environment yielded a {type(draft).__name__}, not a TaskDraft")
            answer = encode(["end"] if draft is None else ["draft", asdict(draft)], "a task", base.TaskError)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - drawing runs foreign code, which raises anything
            answer = encode(["failed", *failure(error)])
        connection.sendall(answer)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # noqa: BLE001 - it is written down for the worker, and the process ends at once
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
