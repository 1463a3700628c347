"""One process that plays the episodes of an environment: its calls, its heartbeat, its end.

What holds: when a process is given up, each call that is left raises. The one whose code the marks name has failed;
the others raise ProcessLost.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tidemill.producers.environments.base import EnvironmentFailed, EnvironmentHung, GenerationFailed, Policy, TaskError
from tidemill.producers.environments.spawning import (
    PORTABLE,
    FrameTooLarge,
    HostLimits,
    SpawnedProcess,
    encode,
    failure,
)
from tidemill.schemas.chat.messages import Message, Tools, checked_tools
from tidemill.schemas.records import Task

LOG = logging.getLogger(__name__)
TICKS = 10
"""Looks at a process within the time that it may not answer."""
CLOSE_S = 10.0
"""Longest time for an environment to close."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessLost(RuntimeError):
    """The process of an environment is gone, by no fault of this episode: it can begin again."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first answer of a process: what it has opened."""

    process: int
    version: str
    isolation: Literal["loop", "process"]
    network: bool
    needs_tools: bool
    options: dict[str, Any]
    option_rows: list[dict[str, Any]]


_HELLO = TypeAdapter(Hello)


@dataclass(slots=True, eq=False)
class HostedCall:
    """One episode, while it goes on in the other process."""

    policy: Policy | None
    answer: asyncio.Future[Any]
    chats: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class EpisodeProcess:
    """A process that plays episodes, made by `start`. It belongs to the event loop that runs then."""

    def __init__(self, name: str, limits: HostLimits, spawned: SpawnedProcess, streams: Streams, hello: Hello) -> None:
        self._name, self._limits, self._spawned, self.hello = name, limits, spawned, hello
        self._reader, self._writer = streams
        self._numbers = itertools.count(1)
        self._calls: dict[int, HostedCall] = {}
        self._leaving: dict[int, int] = {}
        """Cancelled calls that have not ended, with the number of looks since."""
        self._heard = False
        self.over = ""
        """Why it plays no more; empty while it does."""
        self.retired = False
        """It takes no new calls, and ends with its last one."""
        self.useful = False
        """Whether a call has ended as it should."""
        self._watching = asyncio.create_task(self._watch())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, options: Mapping[str, Any], limits: HostLimits, network: bool) -> EpisodeProcess:
        """A process that has opened the environment. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
        spawned = SpawnedProcess(limits)
        streams = await asyncio.open_connection(sock=spawned.socket, limit=limits.message_bytes)
        hello = None
        try:
            opening = spawned.opening("play", name, options, network)
            streams[1].write(encode(opening, limits.message_bytes))
            async with asyncio.timeout(limits.start_s):
                hello = hello_of(name, await streams[0].readline())
            if hello is not None:
                return cls(name, limits, spawned, streams, hello)
        except TimeoutError:
            raise EnvironmentFailed(f"environment {name} was not opened within {limits.start_s:g} s") from None
        except FrameTooLarge as error:
            raise TaskError(f"environment {name}: the options {error}") from error
        except ConnectionResetError:
            pass  # it ended before it read anything
        finally:
            if hello is None:
                streams[1].transport.abort()
                ending = await asyncio.to_thread(spawned.ending)
        raise EnvironmentFailed(f"environment {name} could not be opened: {ending}")

    async def call(
        self,
        kind: str,
        task: Task,
        policy: Policy | None = None,
        messages: Sequence[Message] = (),
        endpoint: list[str] | str = "",
    ) -> Any:  # noqa: ANN401
        """The score that a method of the environment returns, as it was sent.

        Raises ProcessLost, EnvironmentFailed, and what is portable of that which the method raises.
        """
        if self.over:
            raise ProcessLost(f"environment {self._name}: {self.over}")
        number = next(self._numbers)
        frame = [kind, number, asdict(task), [dict(message) for message in messages], endpoint]
        try:
            self._writer.write(encode(frame, self._limits.message_bytes))
        except FrameTooLarge as error:
            raise EnvironmentFailed(f"environment {self._name}: the task {error}") from error
        call = self._calls[number] = HostedCall(policy, asyncio.get_running_loop().create_future())
        try:
            return await call.answer
        finally:
            del self._calls[number]
            for chat in call.chats.values():
                chat.cancel()
            if call.answer.cancelled() and not self.over:
                self._leaving[number] = 0
                self._send(["cancel", number])
            if self.retired and not self._calls:
                self._spawned.kill()

    async def close(self) -> None:
        """Let the environment close, and end the process."""
        if not self.over:
            self._send(["close"])
            await asyncio.wait([self._reading], timeout=CLOSE_S)
            self._spawned.kill()
        if not self._reading.done():
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Take what the process sends until it ends, and fail the calls that are left then."""
        fault = ""
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass  # it ended before it had read everything
        except (ValueError, RecursionError) as error:
            fault = f"its process sent no message that can be read ({error!r:.200})"
        finally:
            self._watching.cancel()
            self.over = self.over or "its process has ended"
            self._writer.transport.abort()
            ending = await asyncio.to_thread(self._spawned.ending)
            self._lose(fault or ending, 0 if fault else self._spawned.marks.episode)

    def _take(self, frame: object) -> None:
        """Act on one message. Raises ValueError for one that is none."""
        self._heard = True
        match frame:
            case ["pong"]:
                pass
            case ["chat", int(number), int(request), list(messages), str(tools), int() | None as most, bool(trained)]:
                if number in self._calls:
                    call = self._calls[number]
                    call.chats[request] = asyncio.create_task(self._chat(call, request, messages, tools, most, trained))
            case ["give_up", int(number), int(request)]:
                if number in self._calls and request in self._calls[number].chats:
                    self._calls[number].chats[request].cancel()
            case ["done", int(number), found]:
                self.useful = True
                if (answer := self._answer(number)) is not None:
                    answer.set_result(found)
            case ["failed", int(number), str(kind), str(text), str(trace)]:
                if (answer := self._answer(number)) is not None:
                    if trace:
                        LOG.warning("environment %s raised an error\n%s", self._name, trace)
                    own = EnvironmentFailed(f"environment {self._name} raised {text}")
                    answer.set_exception(PORTABLE[kind](text) if kind in PORTABLE else own)
            case _:
                raise ValueError(f"{frame!r:.100}")

    def _answer(self, number: int) -> asyncio.Future[Any] | None:
        """What waits for the end of a call; None where nothing does any more."""
        self._leaving.pop(number, None)
        call = self._calls.get(number)
        return None if call is None or call.answer.done() else call.answer

    async def _chat(
        self, call: HostedCall, request: int, messages: list[Message], tools: str, most: int | None, trained: bool
    ) -> None:
        try:
            if call.policy is None:
                raise GenerationFailed("a conversation that was held before is scored without the policy")
            shown = tools_of(tools)
            said = await call.policy.chat(messages, tools=shown, max_tokens=most, trained=trained)
            answer = ["reply", request, said.message, said.finish, said.malformed, said.tokens]
            line = encode(answer, self._limits.message_bytes)
        except Exception as error:  # noqa: BLE001 - what the environment cannot be told of ends the call
            kind, text, _trace = failure(error)
            if not kind:
                if not call.answer.done():
                    call.answer.set_exception(error)
                return
            line = encode(["raise", request, kind, text], self._limits.message_bytes)
        finally:
            call.chats.pop(request, None)
        self._writer.write(line)

    async def _watch(self) -> None:
        """Kill a process that makes no step and gives no answer; retire one with a cancelled call that does not end."""
        missed, steps = 0, -1
        while missed < TICKS:
            await asyncio.sleep(self._limits.answer_s / TICKS)
            self._leaving = {number: looks + 1 for number, looks in self._leaving.items()}
            if not self.retired and any(looks > TICKS for looks in self._leaving.values()):
                LOG.warning("environment %s does not end a cancelled episode: its process gets no more", self._name)
                self.retired = True
                if not self._calls:
                    self._spawned.kill()
            if not (self._calls or self._leaving):
                missed, steps = 0, -1
                continue
            made = self._spawned.marks.steps
            missed = 0 if self._heard or made != steps else missed + 1
            self._heard, steps = False, made
            self._send(["ping"])
        self.over = f"hung: no answer within {self._limits.answer_s:g} s"
        guilty = await self._spawned.marks.hanging(self.hello.process)
        self._spawned.kill()
        self._lose(self.over, guilty)

    def _lose(self, reason: str, guilty: int) -> None:
        for number, call in self._calls.items():
            if not call.answer.done():
                text = f"environment {self._name} {reason}"
                call.answer.set_exception(EnvironmentHung(text) if number == guilty else ProcessLost(text))

    def _send(self, frame: list[Any]) -> None:
        self._writer.write(encode(frame, self._limits.message_bytes))


def hello_of(name: str, line: bytes) -> Hello | None:
    """A process's first answer; None where there is none. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    match json.loads(line) if line.endswith(b"\n") else None:
        case ["hello", learned]:
            try:
                return _HELLO.validate_python(learned)
            except ValidationError as error:
                raise EnvironmentFailed(f"environment {name} declares what cannot be: {error}") from error
        case ["refused", str(kind), str(text), str(trace)]:
            own = EnvironmentFailed(f"environment {name} raised {text} when it was opened\n{trace}")
            raise PORTABLE[kind](text) if kind in PORTABLE else own
        case _:
            return None


@lru_cache(maxsize=16)
def tools_of(text: str) -> Tools:
    """Checked tools, the same object for the same text. Raises BadMessage."""
    return checked_tools(json.loads(text))
