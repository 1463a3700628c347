"""An environment in its own processes, which the worker can kill.

Invariants:

- an episode that hangs, or that ends the process, fails alone. The others raise ProcessLost and can start again; the
  next episode starts a new process;
- if a cancelled episode does not end, its process gets no new episodes: they go to a new process, and the old one is
  killed after its last episode;
- the start of a new process has a backoff, which grows while processes complete no episode;
- when a process ends or is killed, everything that it started is killed (`confinement`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, Self

import msgspec
from pydantic import ConfigDict

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments import base
from tidemill.producers.environments.base import EnvironmentFailed, Score, TaskError
from tidemill.producers.environments.spawning import MESSAGE_BYTES, PORTABLE, START_S, SpawnedProcess, encode, failure
from tidemill.schemas.chat.messages import Message, Tools, checked_tools
from tidemill.schemas.records import Task

LOG = logging.getLogger(__name__)
TICKS = 10
"""Number of checks of a process within the answer timeout."""
CLOSE_S = 10.0
"""Longest time for an environment to close."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessLost(RuntimeError):
    """Error of an episode whose process has ended through no fault of this episode, which can start again."""


@dataclass(frozen=True, slots=True)
class OpenedEnvironment:
    """The first answer of a process: the properties of the opened environment."""

    process: int
    version: str
    isolation: Literal["loop", "process"]
    network: bool
    needs_tools: bool
    options: dict[str, Any]
    option_rows: list[dict[str, Any]]


@dataclass(slots=True, eq=False)
class HostedCall:
    """One call of the environment, while it runs in the other process."""

    policy: base.Policy | None
    answer: asyncio.Future[Any]
    chats: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class EpisodeProcess:
    """A process that plays episodes, made by `start`. It belongs to the event loop that runs at that time.

    When it ends or is killed, each unfinished call raises: the call that the marks name raises EnvironmentHung, the
    others ProcessLost.
    """

    def __init__(
        self, name: str, settings: RolloutSettings, spawned: SpawnedProcess, streams: Streams, hello: OpenedEnvironment
    ) -> None:
        self._name, self._spawned, self.hello = name, spawned, hello
        self._answer_s = settings.environment_timeout_s
        self._reader, self._writer = streams
        self._numbers = itertools.count(1)
        self._calls: dict[int, HostedCall] = {}
        self._leaving: dict[int, int] = {}
        """Cancelled calls that have not ended, with the number of checks since."""
        self.over = ""
        """Reason why it plays no more episodes; empty while it runs."""
        self._guilty: int | None = None
        """The episode that hangs; None while unknown."""
        self.retired = False
        """Whether it takes no new calls, and ends with its last one."""
        self.useful = False
        """Whether a call has returned a result."""
        self._watching = asyncio.create_task(self._watch())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, options: Mapping[str, Any], settings: RolloutSettings, network: bool
    ) -> EpisodeProcess:
        """Start a process that opens the environment. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
        spawned = SpawnedProcess(name, options, settings, network)
        streams = await asyncio.open_connection(sock=spawned.socket, limit=MESSAGE_BYTES)
        hello = None
        try:
            async with asyncio.timeout(START_S):
                hello = hello_of(name, await streams[0].readline())
            if hello is not None:
                return cls(name, settings, spawned, streams, hello)
        except TimeoutError:
            raise EnvironmentFailed(f"environment {name} was not opened within {START_S:g} s") from None
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
        policy: base.Policy | None = None,
        messages: base.Messages = (),
        endpoint: list[str] | str = "",
    ) -> Any:  # noqa: ANN401
        """Call a method of the environment, and return its score; None if `rescore` has none.

        Raises ProcessLost, EnvironmentFailed, and the portable errors that the method raises.
        """
        if self.over:
            raise ProcessLost(f"environment {self._name}: {self.over}")
        number = next(self._numbers)
        frame = [kind, number, asdict(task), [dict(message) for message in messages], endpoint]
        self._writer.write(encode(frame, f"environment {self._name}: the task"))
        call = self._calls[number] = HostedCall(policy, asyncio.get_running_loop().create_future())
        try:
            found = await call.answer
            return None if found is None and kind == "rescore" else msgspec.convert(found, Score)
        except msgspec.ValidationError as error:
            raise EnvironmentFailed(f"environment {self._name} returned no score: {error}") from error
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
        """Close the environment, and end the process."""
        if not self.over:
            self._send(["close"])
            await asyncio.wait([self._reading], timeout=CLOSE_S)
            self._spawned.kill()
        if not self._reading.done():
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Read the messages of the process until it ends, and fail the calls that are unfinished then."""
        fault = ""
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass  # it ended before it had read everything
        except (ValueError, RecursionError) as error:
            fault = f"its process sent an invalid message ({error!r:.200})"
        finally:
            self._watching.cancel()
            hung, self.over = self.over, self.over or "its process has ended"
            self._writer.transport.abort()
            ending = await asyncio.to_thread(self._spawned.ending)
            guilty = self._guilty if self._guilty is not None else 0 if fault else self._spawned.marks.episode
            reason = f"environment {self._name}: {fault or ending}"
            for number, call in self._calls.items():
                if not call.answer.done():
                    text = f"environment {self._name} {hung}" if hung and not fault else reason
                    error_of = base.EnvironmentHung if number == guilty else ProcessLost
                    call.answer.set_exception(error_of(text))

    def _take(self, frame: object) -> None:
        """Process one message. Raises ValueError for an invalid message."""
        match frame:
            case ["chat", int(number), int(request), list(messages), str(tools), int() | None as most, bool(trained)]:
                if number in self._calls:
                    call = self._calls[number]
                    call.chats[request] = asyncio.create_task(self._chat(call, request, messages, tools, most, trained))
            case ["give_up", int(number), int(request)]:
                if number in self._calls and request in self._calls[number].chats:
                    self._calls[number].chats[request].cancel()
            case ["done", int(number), found]:
                self.useful = True
                self._leaving.pop(number, None)
                if number in self._calls and not self._calls[number].answer.done():
                    self._calls[number].answer.set_result(found)
            case ["failed", int(number), str(kind), str(text), str(trace)]:
                self._leaving.pop(number, None)
                if number in self._calls and not self._calls[number].answer.done():
                    if trace:
                        LOG.warning("environment %s raised an error\n%s", self._name, trace)
                    own = EnvironmentFailed(f"environment {self._name} raised {text}")
                    self._calls[number].answer.set_exception(PORTABLE[kind](text) if kind in PORTABLE else own)
            case _:
                raise ValueError(f"{frame!r:.100}")

    async def _chat(
        self, call: HostedCall, request: int, messages: list[Message], tools: str, most: int | None, trained: bool
    ) -> None:
        try:
            if call.policy is None:
                raise base.GenerationFailed("an earlier conversation is scored without the policy")
            reply = await call.policy.chat(messages, tools=tools_of(tools), max_tokens=most, trained=trained)
            answer = ["reply", request, reply.message, reply.finish, reply.malformed, reply.tokens]
            line = encode(answer, "a reply of the policy", base.GenerationFailed)
        except Exception as error:  # noqa: BLE001 - what the environment cannot be told of ends the call
            kind, text, _trace = failure(error)
            if not kind:
                if not call.answer.done():
                    call.answer.set_exception(error)
                return
            line = encode(["raise", request, kind, text])
        finally:
            call.chats.pop(request, None)
        self._writer.write(line)

    async def _watch(self) -> None:
        """Kill the process if its event loop makes no step; retire it if a cancelled call does not end.

        An idle process makes a step for each ping.
        """
        missed, steps = 0, -1
        while missed < TICKS:
            await asyncio.sleep(self._answer_s / TICKS)
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
            missed, steps = 0 if made != steps else missed + 1, made
            self._send(["ping"])
        self.over = f"hung: no answer within {self._answer_s:g} s"
        self._guilty = await self._spawned.marks.hanging(self.hello.process)
        self._spawned.kill()
        self._writer.transport.abort()  # its calls fail, also if the kill does not succeed

    def _send(self, frame: list[Any]) -> None:
        self._writer.write(encode(frame))


class HostedOptions(base.EnvironmentOptions):
    """Options that the environment's process has checked."""

    model_config = ConfigDict(extra="allow", frozen=True)


class HostedEnvironment(base.Environment):
    """An environment in its own processes: one for all its episodes, and one for each stream of tasks."""

    def __init__(
        self, name: str, options: Mapping[str, Any], settings: RolloutSettings, network: bool | None = None
    ) -> None:
        """Store the name and options of an environment, which `start` opens.

        `network`: whether its process may open sockets. None: as the environment declares, which is known after it was
        first imported without sockets.
        """
        super().__init__(HostedOptions())
        self._name, self._given, self._settings, self._network = name, dict(options), settings, network
        self._processes: list[EpisodeProcess] = []
        self._starting: asyncio.Task[EpisodeProcess] | None = None
        self._fruitless = 0
        """Number of consecutive started processes that completed no call."""
        self._closed = False
        self._option_rows: list[dict[str, Any]] = []

    async def start(self) -> Self:
        """Open it in its first process. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
        await self._running()
        return self

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Draw tasks in a further process, which runs until the iterator is closed. Blocks. Raises TaskError."""
        name, most = self._name, MESSAGE_BYTES
        spawned = SpawnedProcess(name, self._given, self._settings, bool(self._network), query.seed)
        with spawned.socket, spawned.socket.makefile("rb") as lines:
            try:
                spawned.socket.settimeout(START_S)
                if hello_of(name, lines.readline(most)) is None:
                    raise TaskError(f"environment {name} could not be opened: {spawned.ending()}")
                while True:
                    spawned.socket.sendall(b'["next"]\n')
                    line = lines.readline(most)
                    match json.loads(line) if line.endswith(b"\n") else None:
                        case ["draft", draft]:
                            yield msgspec.convert(draft, base.TaskDraft)
                        case ["end"]:
                            return
                        case ["failed", str(), str(text), str(trace)]:
                            raise TaskError(f"environment {name} raised {text}\n{trace}".strip())
                        case _:
                            raise ConnectionError
                    spawned.socket.settimeout(self._settings.environment_timeout_s)
            except msgspec.ValidationError as error:
                raise TaskError(f"environment {name} yielded a wrong draft: {error}") from error
            except TimeoutError:
                waited = spawned.socket.gettimeout()
                raise TaskError(f"environment {name} hung: no task within {waited:g} s") from None
            except ConnectionError:
                raise TaskError(f"environment {name} draws no more tasks: {spawned.ending()}") from None
            finally:
                spawned.ending()

    async def play(self, task: Task, policy: base.Policy) -> Score:
        """Play one episode. Raises the errors of `Environment.play`, EnvironmentFailed, ProcessLost."""
        process = await self._running()
        endpoint: list[str] | str = f"environment {self._name} asks for no network, so it gets no endpoint"
        if self.network:
            try:
                offered = policy.endpoint
                endpoint = [offered.base_url, offered.api_key]
            except (EnvironmentFailed, base.GenerationFailed) as error:
                endpoint = str(error)
        score: Score = await process.call("play", task, policy, endpoint=endpoint)
        return score

    async def cut_off(self, task: Task, messages: base.Messages) -> Score:
        score: Score = await (await self._running()).call("cut_off", task, messages=messages)
        return score

    async def rescore(self, task: Task, messages: base.Messages) -> Score | None:
        score: Score | None = await (await self._running()).call("rescore", task, messages=messages)
        return score

    def option_rows(self) -> list[dict[str, Any]]:
        return self._option_rows

    async def close(self) -> None:
        """End its processes for episodes. Tasks can still be drawn."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _running(self) -> EpisodeProcess:
        """Return the process for new episodes; start it if there is none. Raises like `start`."""
        if self._processes and not (self._processes[-1].over or self._processes[-1].retired):
            return self._processes[-1]
        if self._closed:
            raise EnvironmentFailed(f"environment {self._name} is closed")
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._begin())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed:
                raise EnvironmentFailed(f"environment {self._name} is closed") from None
            raise

    async def _begin(self) -> EpisodeProcess:
        if self._processes and self._processes[-1].useful:
            self._fruitless = 0
        if self._fruitless:
            await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (self._fruitless - 1), LONGEST_PAUSE_S))
        self._fruitless += 1
        process = await EpisodeProcess.start(self._name, self._given, self._settings, bool(self._network))
        hello = process.hello
        if self._network is None and hello.network:
            self._network = True
            await process.close()
            process = await EpisodeProcess.start(self._name, self._given, self._settings, network=True)
        self.version, self.isolation = hello.version, hello.isolation  # type: ignore[misc]  # of the instance
        self.network, self.needs_tools = bool(self._network), hello.needs_tools  # type: ignore[misc]
        self.options, self._option_rows = HostedOptions.model_validate(hello.options), hello.option_rows
        self._processes = [*(each for each in self._processes if not each.over), process]
        return process


def hello_of(name: str, line: bytes) -> OpenedEnvironment | None:
    """Parse a process's first answer; None if it sent none. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    match json.loads(line) if line.endswith(b"\n") else None:
        case ["hello", learned]:
            try:
                return msgspec.convert(learned, OpenedEnvironment)
            except msgspec.ValidationError as error:
                raise EnvironmentFailed(f"environment {name} declares an invalid property: {error}") from error
        case ["refused", str(kind), str(text), str(trace)]:
            own = EnvironmentFailed(f"environment {name} raised {text} when it was opened\n{trace}")
            raise PORTABLE[kind](text) if kind in PORTABLE else own
        case _:
            return None


@lru_cache(maxsize=16)
def tools_of(text: str) -> Tools:
    """Parse and check tools; return the same object for the same text. Raises BadMessage."""
    return checked_tools(json.loads(text))
