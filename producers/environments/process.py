"""An environment in processes of its own, which the worker can kill.

What holds:

- an episode that hangs, or that ends the process, fails alone. The others raise ProcessLost and can begin again; the
  next one starts a fresh process;
- an episode that was cancelled and does not end gets no company: new episodes go to a fresh process, and the old one
  is killed after its last;
- processes that play nothing to its end are started ever more slowly;
- when a process is given up, everything that it started is killed (`confinement`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidemill.producers.environments.base import (
    Environment,
    EnvironmentFailed,
    EnvironmentOptions,
    GenerationFailed,
    Policy,
    Score,
    TaskDraft,
    TaskError,
    TaskQuery,
    faults,
)
from tidemill.producers.environments.episode_process import EpisodeProcess, ProcessLost, hello_of
from tidemill.producers.environments.spawning import HostLimits, SpawnedProcess, encode
from tidemill.schemas.chat.messages import Message
from tidemill.schemas.records import Task

__all__ = ["HostLimits", "HostedEnvironment", "ProcessLost"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
_SCORE = TypeAdapter(Score)
_DRAFT = TypeAdapter(TaskDraft)


class HostedOptions(EnvironmentOptions):
    """Options that were checked where the environment is."""

    model_config = ConfigDict(extra="allow", frozen=True)


class HostedEnvironment(Environment):
    """An environment in processes of its own: one for all its episodes, and one for each stream of tasks."""

    def __init__(self, name: str, options: Mapping[str, Any], limits: HostLimits, network: bool | None = None) -> None:
        """Name an environment; `start` learns about it as well."""
        super().__init__(HostedOptions())
        self._name, self._given, self._limits, self._network = name, dict(options), limits, network
        self._processes: list[EpisodeProcess] = []
        self._starting: asyncio.Task[EpisodeProcess] | None = None
        self._fruitless = 0
        """Processes in a row that were started, and played nothing to its end."""
        self._closed = False
        self._option_rows: list[dict[str, Any]] = []

    @classmethod
    async def start(
        cls, name: str, options: Mapping[str, Any], limits: HostLimits, network: bool | None = None
    ) -> HostedEnvironment:
        """Open an environment.

        Args:
            name: as `find.environment_type` takes it.
            network: whether its process may open sockets. None: as the environment declares, which is known once it
                was imported without.

        Raises UnknownEnvironment, TaskError, EnvironmentFailed.
        """
        hosted = cls(name, options, limits, network)
        await hosted._running()
        return hosted

    def tasks(self, query: TaskQuery) -> Iterator[TaskDraft]:
        """Draw tasks in a further process, which lives as long as the iterator. Blocks. Raises TaskError."""
        limits, spawned = self._limits, SpawnedProcess(self._limits)
        with spawned.socket, spawned.socket.makefile("rb") as lines:
            try:
                spawned.socket.settimeout(limits.start_s)
                opening = spawned.opening("tasks", self._name, self._given, bool(self._network), query.seed)
                spawned.socket.sendall(encode(opening, limits.message_bytes))
                if hello_of(self._name, lines.readline(limits.message_bytes)) is None:
                    raise TaskError(f"environment {self._name} could not be opened: {spawned.ending()}")
                while True:
                    spawned.socket.sendall(encode(["next"], limits.message_bytes))
                    draft = draft_of(self._name, lines.readline(limits.message_bytes), spawned)
                    if draft is None:
                        return
                    yield draft
                    spawned.socket.settimeout(limits.answer_s)
            except TimeoutError:
                waited = spawned.socket.gettimeout()
                raise TaskError(f"environment {self._name} hung: no task within {waited:g} s") from None
            except ConnectionError:
                raise TaskError(f"environment {self._name} draws no more tasks: {spawned.ending()}") from None
            finally:
                spawned.ending()

    async def play(self, task: Task, policy: Policy) -> Score:
        """Play one episode. Raises what `Environment.play` raises; EnvironmentFailed, ProcessLost."""
        process = await self._running()
        endpoint: list[str] | str = f"environment {self._name} asks for no network, so it gets no endpoint"
        if self.network:
            try:
                offered = policy.endpoint
                endpoint = [offered.base_url, offered.api_key]
            except (EnvironmentFailed, GenerationFailed) as error:
                endpoint = str(error)
        return self._score(await process.call("play", task, policy, endpoint=endpoint))

    async def cut_off(self, task: Task, messages: Sequence[Message]) -> Score:
        """Score a rollout whose context is full. Raises like `play`."""
        process = await self._running()
        return self._score(await process.call("cut_off", task, messages=messages))

    async def rescore(self, task: Task, messages: Sequence[Message]) -> Score | None:
        """Score a conversation that was held before; None where that is not possible. Raises like `play`."""
        process = await self._running()
        found = await process.call("rescore", task, messages=messages)
        return None if found is None else self._score(found)

    def option_rows(self) -> list[dict[str, Any]]:
        """As the environment describes them."""
        return self._option_rows

    async def close(self) -> None:
        """End its processes for episodes. Tasks can be drawn all the same."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await asyncio.gather(*(process.close() for process in self._processes))

    def _score(self, found: object) -> Score:
        try:
            return _SCORE.validate_python(found)
        except ValidationError as error:
            raise EnvironmentFailed(f"environment {self._name} returned no score: {faults(error, 'value')}") from error

    async def _running(self) -> EpisodeProcess:
        """The process for new episodes, started where there is none. Raises like `start`."""
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
        process = await EpisodeProcess.start(self._name, self._given, self._limits, bool(self._network))
        if self._network is None and process.hello.network:
            self._network = True
            await process.close()
            process = await EpisodeProcess.start(self._name, self._given, self._limits, network=True)
        hello = process.hello
        self.version, self.isolation = hello.version, hello.isolation  # type: ignore[misc]  # of the instance
        self.network, self.needs_tools = bool(self._network), hello.needs_tools  # type: ignore[misc]
        self.options, self._option_rows = HostedOptions.model_validate(hello.options), hello.option_rows
        self._processes = [*(each for each in self._processes if not each.over), process]
        return process


def draft_of(name: str, line: bytes, spawned: SpawnedProcess) -> TaskDraft | None:
    """The draft in an answer; None when there are no more. Raises TaskError."""
    match json.loads(line) if line.endswith(b"\n") else None:
        case ["draft", draft]:
            try:
                return _DRAFT.validate_python(draft)
            except ValidationError as error:
                raise TaskError(f"environment {name} yielded a wrong draft: {faults(error, 'value')}") from error
        case ["end"]:
            return None
        case ["failed", str(), str(text), str(trace)]:
            raise TaskError(f"environment {name} raised {text}\n{trace}".strip())
        case _:
            raise TaskError(f"environment {name} draws no more tasks: {spawned.ending()}")
