"""An environment in its own process: opened, and its episodes played side by side or its tasks drawn.

The process speaks in frames over a socket pair that it inherits. The first frame names the environment and the bounds,
which are set before foreign code is imported.

What holds: an error of foreign code is the answer to one call, and the others go on; one that would end the process
ends it at once, while the marks name the episode that raised it. No message is above the limit: the episode that
wants to send one fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from tidemill.producers.environments.base import (
    Endpoint,
    Environment,
    EnvironmentFailed,
    GenerationFailed,
    Reply,
    Score,
    TaskDraft,
    TaskError,
    TaskQuery,
)
from tidemill.producers.environments.confinement import OUT_OF_MEMORY, deny_network, limit_resources
from tidemill.producers.environments.find import environment_type, options_json
from tidemill.producers.environments.marks import EPISODE, MarkedLoop, Marks
from tidemill.producers.environments.spawning import PORTABLE, FrameTooLarge, encode, failure
from tidemill.schemas.chat.messages import BadMessage, Message, Tool, checked_messages, checked_tools
from tidemill.schemas.records import Task

_TASK = TypeAdapter(Task)
Encode = Callable[[object], bytes]


class HostedPolicy:
    """The policy of one episode, which the worker samples."""

    def __init__(self, server: EpisodeServer, episode: int, endpoint: list[str] | str) -> None:
        self._server, self._episode, self._endpoint = server, episode, endpoint

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        """The policy's next turn. Raises GenerationFailed, ContextFull, BadMessage."""
        told, shown = checked_messages(messages), checked_tools(tools)
        return await self._server.ask(self._episode, told, shown, max_tokens, trained)

    @property
    def endpoint(self) -> Endpoint:
        """The same rollout over HTTP. Raises EnvironmentFailed where none is offered."""
        if isinstance(self._endpoint, str):
            raise EnvironmentFailed(self._endpoint)
        return Endpoint(*self._endpoint)


class EpisodeServer:
    """Plays the episodes that the worker asks for."""

    def __init__(self, environment: Environment, writer: asyncio.StreamWriter, encode: Encode) -> None:
        self._environment, self._writer, self._encode = environment, writer, encode
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._faults: dict[int, str] = {}
        """Why episodes have failed, also where the environment catches GenerationFailed."""

    def take(self, frame: list[Any]) -> None:
        """Act on one message of the worker."""
        match frame:
            case ["ping"]:
                self._send(["pong"])
            case ["reply", request, message, finish, malformed, tokens]:
                if request in self._answers and not self._answers[request].done():
                    self._answers[request].set_result(Reply(message, finish, tuple(malformed), tuple(tokens)))
            case ["raise", request, kind, text]:
                if request in self._answers and not self._answers[request].done():
                    self._answers[request].set_exception(PORTABLE[kind](text))
            case ["cancel", episode]:
                if episode in self._calls:
                    self._calls[episode].cancel()
            case [kind, episode, task, *rest]:
                context = Context()
                context.run(EPISODE.set, episode)
                answer = self._answer(episode, kind, _TASK.validate_python(task), *rest)
                call = self._calls[episode] = asyncio.get_running_loop().create_task(answer, context=context)
                call.add_done_callback(partial(self._ended, episode))

    async def ask(
        self, episode: int, messages: list[Message], tools: Sequence[Tool], max_tokens: int | None, trained: bool
    ) -> Reply:
        """A turn of the policy. Raises GenerationFailed, ContextFull, BadMessage."""
        if episode not in self._calls:
            raise GenerationFailed("the episode is over")
        if episode in self._faults:
            raise GenerationFailed(self._faults[episode])
        request = next(self._numbers)
        try:
            line = self._encode(["chat", episode, request, messages, json.dumps(tools), max_tokens, trained])
        except FrameTooLarge as error:
            self._faults[episode] = f"a call of the policy {error}"
            raise GenerationFailed(self._faults[episode]) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise BadMessage(f"a call of the policy cannot be written as JSON: {error}") from error
        self._writer.write(line)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        try:
            return await answer
        except GenerationFailed as error:
            self._faults[episode] = str(error)
            raise
        except asyncio.CancelledError:
            self._send(["give_up", episode, request])
            raise
        finally:
            del self._answers[request]

    async def close(self) -> None:
        """Cancel what runs, and close the environment."""
        for call in self._calls.values():
            call.cancel()
        await self._environment.close()

    async def _answer(
        self, episode: int, kind: str, task: Task, messages: list[Message], endpoint: list[str] | str
    ) -> None:
        try:
            # Written at once: the next step of another episode may be the last one of this process.
            self._writer.write(await self._played(episode, kind, task, messages, endpoint))
        except MemoryError:
            traceback.print_exc(limit=-3)
            os._exit(OUT_OF_MEMORY)

    async def _played(
        self, episode: int, kind: str, task: Task, messages: list[Message], endpoint: list[str] | str
    ) -> bytes:
        try:
            if kind == "play":
                found: object = await self._environment.play(task, HostedPolicy(self, episode, endpoint))
            elif kind == "cut_off":
                found = await self._environment.cut_off(task, messages)
            else:
                found = await self._environment.rescore(task, messages)
            if episode in self._faults:
                raise GenerationFailed(self._faults[episode])
            score = None if found is None and kind == "rescore" else score_fields(found)
            return self._encode(["done", episode, score])
        except FrameTooLarge as error:
            return self._encode(["failed", episode, *failure(EnvironmentFailed(f"the score {error}"))])
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - foreign code raises any error, and the other episodes go on
            cause = GenerationFailed(self._faults[episode]) if episode in self._faults else error
            return self._encode(["failed", episode, *failure(cause)])

    def _ended(self, episode: int, call: asyncio.Task[None]) -> None:
        del self._calls[episode]
        self._faults.pop(episode, None)
        if call.cancelled():  # before its first step
            self._send(["failed", episode, "", "cancelled", ""])

    def _send(self, frame: list[Any]) -> None:
        self._writer.write(self._encode(frame))


def score_fields(found: object) -> dict[str, Any]:
    """A score as it is sent. Raises EnvironmentFailed for anything else."""
    if not isinstance(found, Score):
        raise EnvironmentFailed(f"the environment returned a {type(found).__name__}, not a Score")
    fault = found.fault()
    if fault:
        raise EnvironmentFailed(f"the environment returned no score: {fault}")
    return {"rewards": [asdict(part) for part in found.rewards], "success": found.success, "metrics": {**found.metrics}}


def serve(descriptor: int, memory: int) -> None:
    """Open the environment that the first frame names, say so, and do what the worker asks for."""
    connection, marks = socket.socket(fileno=descriptor), Marks(memory)
    os.close(memory)
    opening = json.loads(connection.makefile("rb").readline())  # the worker sends no more before it is answered
    os.register_at_fork(after_in_child=connection.close)  # a forked copy cannot speak for this process
    limit_resources(opening["memory_bytes"], opening["file_bytes"], opening["open_files"])
    sys.path[:] = opening["path"]
    encoded = partial(encode, most=opening["message_bytes"])
    if not opening["network"]:
        try:
            deny_network()
        except OSError as error:
            text = (
                f"no sockets can be kept from its process here ({error.strerror}): allow it to open some "
                "(`network = true`), or run it in the worker (`isolation = 'loop'`)"
            )
            connection.sendall(encoded(["refused", *failure(EnvironmentFailed(text))]))
            return
    if opening["mode"] == "tasks":
        draw(connection, opening, encoded)
        return
    with asyncio.Runner(loop_factory=lambda: MarkedLoop(marks)) as runner:
        runner.run(play(connection, opening, encoded))


def opened(opening: dict[str, Any], encode: Encode) -> tuple[Environment | None, bytes]:
    """The environment, or None where it cannot be opened, and the answer to the first frame."""
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


async def play(connection: socket.socket, opening: dict[str, Any], encode: Encode) -> None:
    """Play episodes until the worker says that it is enough, or is gone."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=opening["message_bytes"])
    environment, answer = opened(opening, encode)
    writer.write(answer)
    if environment is not None:
        server = EpisodeServer(environment, writer, encode)
        while (line := await reader.readline()) and (frame := json.loads(line)) != ["close"]:
            server.take(frame)
        await server.close()
    writer.close()


def draw(connection: socket.socket, opening: dict[str, Any], encode: Encode) -> None:
    """Send one draft for each message of the worker."""
    environment, answer = opened(opening, encode)
    connection.sendall(answer)
    if environment is None:
        return
    drafts = None
    for _line in connection.makefile("rb"):
        try:
            if drafts is None:
                drafts = iter(environment.tasks(TaskQuery(opening["seed"])))
            draft = next(drafts, None)
            if draft is None:
                answer = encode(["end"])
            elif isinstance(draft, TaskDraft):
                answer = encode(["draft", asdict(draft)])
            else:
                raise TaskError(f"the environment yielded a {type(draft).__name__}, not a TaskDraft")
        except FrameTooLarge as error:
            answer = encode(["failed", *failure(TaskError(f"a task {error}"))])
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - drawing runs foreign code, which raises anything
            answer = encode(["failed", *failure(error)])
        connection.sendall(answer)
