"""A running OpenEnv server, as `openenv:http://HOST:PORT`: observations are messages, turns are actions.

The server has the tasks and the rewards. A task is a reset with its own seed and further arguments; it is
drawn with the observation that it begins with, so that held-out tasks and training tasks are apart by what they ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from random import Random
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tidemill.producers.environments.base import (
    ContextFull,
    Environment,
    EnvironmentFailed,
    EnvironmentOptions,
    Policy,
    Reply,
    Score,
    TaskDraft,
    TaskError,
    TaskQuery,
    read_payload,
)
from tidemill.producers.environments.find import EnvironmentType, Family, Listed, UnknownEnvironment
from tidemill.producers.environments.foreign import structured
from tidemill.producers.environments.openenv_session import (
    OpenEnvSession,
    OpenEnvStep,
    RefusedAction,
    action_schema,
    openenv_session,
)
from tidemill.schemas.chat.messages import BadMessage, Message, Tools, checked_tools
from tidemill.schemas.records import RewardComponent, Task


class OpenEnvOptions(EnvironmentOptions):
    """How a server's observations and actions are put into a conversation."""

    model_config = ConfigDict(allow_inf_nan=False)

    turn: Literal["text", "json", "tools"] = "text"
    """How a turn becomes an action: its text in a field; its text, a JSON object, as the action; or its tool calls,
    with the tools that the server lists (MCP)."""

    action_field: str = ""
    """Field of the action that holds the text of a turn. Empty: the only text that the server's actions require; with
    `turn = "tools"`, a turn without calls ends the episode."""

    action: Annotated[dict[str, Any], BeforeValidator(structured)] = Field(default_factory=dict)
    """Further fields of each action."""

    observation_field: str = ""
    """Field of the observation that is shown. Empty: all but `metadata`, which is shown where there is nothing else.
    One text is shown as it is, anything else as JSON."""

    system: str = ""
    """System message of each conversation."""

    reset: Annotated[dict[str, Any], BeforeValidator(structured)] = Field(default_factory=dict)
    """Parameters of each reset, beside the task's own."""

    task_parameter: str = "seed"
    """Parameter of the reset that tells tasks apart."""

    task_count: int = Field(default=0, ge=0, le=10**6)
    """Above 0: tasks have the numbers below it. 0: any number below 2**31."""

    repeatable: bool = True
    """Whether a reset with the same parameters begins with the same observation. False: what is held out is decided
    by the parameters alone, and may be asked in training."""

    reward: Literal["sum", "last"] = "sum"
    """The reward of an episode, from those of its steps."""

    success_at: float | None = None
    """Reward from which an episode is a success. None: it is neither one nor a failure."""

    turns: int = Field(default=16, ge=1)
    """Most turns of the policy."""

    sessions: int = Field(default=8, ge=1)
    """Most sessions of a worker at once; the server allows one, unless its `max_concurrent_envs` says more."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to connect, and for the answer to one step."""

    wait_s: float = Field(default=300.0, ge=0)
    """Longest time to wait for a session of a server that has none free."""


class OpenEnvTask(BaseModel):
    """A reset of the server."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parameters: dict[str, Any]
    opening: str
    """BLAKE2b of the first observation as it is shown; empty where it need not come again."""


class OpenEnvEnvironment(Environment):
    """The environment of a running OpenEnv server."""

    options: OpenEnvOptions
    version = "openenv-1"
    isolation = "loop"
    network = True

    def __init__(self, options: OpenEnvOptions, url: str) -> None:
        """`url` is the server's, http or https. It is not asked for anything yet."""
        super().__init__(options)
        self.needs_tools = options.turn == "tools"  # type: ignore[misc]  # of the instance
        self._url, self._field = url, options.action_field
        self._free = asyncio.Semaphore(options.sessions)

    def tasks(self, query: TaskQuery) -> Iterator[TaskDraft]:
        """Resets, with what the server says to each. Blocks. Raises TaskError."""
        rng, options = Random(f"openenv {query.seed}"), self.options
        drawn = (rng.getrandbits(31) for _ in count())
        for number in rng.sample(range(options.task_count), options.task_count) if options.task_count else drawn:
            parameters = {**options.reset, options.task_parameter: number}
            asks = json.dumps(parameters, sort_keys=True)
            task = OpenEnvTask(parameters=parameters, opening="")
            if options.repeatable:
                try:
                    # In a thread, since an event loop may run around this.
                    with ThreadPoolExecutor(1) as thread:
                        asks = thread.submit(asyncio.run, self._opening(parameters)).result()
                except EnvironmentFailed as error:
                    raise TaskError(str(error)) from error
                task = OpenEnvTask(parameters=parameters, opening=_digest(asks))
            yield TaskDraft(task.model_dump_json(), asks, options.turns)

    async def play(self, task: Task, policy: Policy) -> Score:
        """Play an episode on the server. Raises EnvironmentFailed for a server that does not answer in form."""
        begin, options = read_payload(OpenEnvTask, task.payload, "task of OpenEnv"), self.options
        if options.turn == "text" and not self._field:
            self._field = text_field(await action_schema(self._url, options.timeout_s), self._url)
        async with self._free, self._session(begin.parameters) as (session, first):
            opening = self._shown(first)
            if begin.opening not in ("", _digest(opening)):
                raise EnvironmentFailed(
                    f"{self._url}: a reset with {begin.parameters} begins otherwise than when the task was drawn; set "
                    "repeatable = false for a server that follows no seed"
                )
            episode = _Episode(session, options, first)
            messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
            messages.append({"role": "user", "content": opening})
            tools = await listed_tools(session) if options.turn == "tools" else Tools()
            for _ in range(0 if first.done else task.max_turns):
                try:
                    reply = await policy.chat(messages, tools=tools)
                except ContextFull:  # the steps so far were rewarded
                    break
                messages += [reply.message, *await self._answers(episode, reply, tools)]
                if episode.done:
                    break
        rewards = [0.0, *episode.rewards]
        reward = sum(rewards) if self.options.reward == "sum" else rewards[-1]
        at = self.options.success_at
        metrics = {"steps": float(episode.steps), "done": float(episode.done)}
        return Score((RewardComponent("reward", reward, 1.0),), None if at is None else reward >= at, metrics)

    async def _answers(self, episode: _Episode, reply: Reply, tools: Tools) -> list[Message]:
        """Act as a turn says, and return the messages that answer it."""
        if self.options.turn == "tools" and (reply.message.get("tool_calls") or reply.malformed):
            return await self._called(episode, reply, tools)
        if self.options.turn == "tools" and not self._field:
            episode.done = True
            return []
        action = _object(reply.content) if self.options.turn == "json" else {self._field: reply.content}
        if action is None:
            return [{"role": "user", "content": "error: the turn is no JSON object"}]
        try:
            return [{"role": "user", "content": self._shown(await episode.act(action))}]
        except RefusedAction as error:
            if self.options.turn != "json":
                raise
            return [{"role": "user", "content": f"error: {error}"}]

    async def _called(self, episode: _Episode, reply: Reply, tools: Tools) -> list[Message]:
        names = [tool["function"]["name"] for tool in tools]
        messages: list[Message] = []
        for call in reply.message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], _object(call["function"]["arguments"])
            if name not in names:
                said = f"error: there is no tool {name[:64]!r}; there are {', '.join(names)}"
            elif arguments is None:
                said = "error: the arguments are no JSON object"
            elif episode.done:
                said = "error: the episode is over"
            else:
                said = said_by_tool(await episode.act({"type": "call_tool", "tool_name": name, "arguments": arguments}))
            messages.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
        for text in reply.malformed:
            messages.append({"role": "user", "content": f"error: this is no tool call that can be read: {text[:200]}"})
        return messages

    def _shown(self, step: OpenEnvStep) -> str:
        field = self.options.observation_field
        if field and field not in step.observation:
            raise EnvironmentFailed(f"{self._url}: an observation has no field {field!r}; it has {[*step.observation]}")
        fields = {name: value for name, value in step.observation.items() if name == field or not field}
        if len(fields) > 1:
            fields.pop("metadata", None)
        shown = next(iter(fields.values())) if len(fields) == 1 else fields
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    def _session(
        self, parameters: Mapping[str, object]
    ) -> AbstractAsyncContextManager[tuple[OpenEnvSession, OpenEnvStep]]:
        return openenv_session(self._url, parameters, self.options.timeout_s, self.options.wait_s)

    async def _opening(self, parameters: Mapping[str, object]) -> str:
        async with self._session(parameters) as (_, first):
            return self._shown(first)


class _Episode:
    """The steps of one episode."""

    def __init__(self, session: OpenEnvSession, options: OpenEnvOptions, first: OpenEnvStep) -> None:
        self._session, self._further = session, options.action
        self.rewards: list[float] = []
        self.steps, self.done = 0, False
        self._note(first)

    async def act(self, action: Mapping[str, object]) -> OpenEnvStep:
        """Take a step. Raises RefusedAction, EnvironmentFailed."""
        step = await self._session.step({**self._further, **action})
        self.steps += 1
        self._note(step)
        return step

    def _note(self, step: OpenEnvStep) -> None:
        self.done = step.done
        if step.reward is not None:
            self.rewards.append(float(step.reward))


class OpenEnv(Family):
    """Running OpenEnv servers, by their addresses."""

    def members(self) -> Iterator[Listed]:
        """The form of a name; there is no list of servers."""
        yield Listed("http://HOST:PORT", "the environment of a running OpenEnv server")

    def member(self, name: str) -> EnvironmentType:
        """The server at an address. Raises UnknownEnvironment."""
        parts = urlsplit(name)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UnknownEnvironment(f"openenv:{name}: name a running server by its address, openenv:http://HOST:PORT")
        url = name.rstrip("/")
        make = partial(OpenEnvEnvironment, url=url)
        return EnvironmentType(f"openenv:{url}", f"OpenEnv server at {url}", OpenEnvOptions, "loop", True, make)


def text_field(schema: Mapping[str, Any], url: str) -> str:
    """The only text that actions require. Raises EnvironmentFailed for none or several."""
    texts = [
        name
        for name in schema.get("required", ())
        if isinstance(schema["properties"].get(name), dict) and schema["properties"][name].get("type") == "string"
    ]
    if len(texts) != 1:
        fields = ", ".join(schema["properties"])
        raise EnvironmentFailed(f"{url}: set action_field to the field that holds the text of a turn, of {fields}")
    return str(texts[0])


async def listed_tools(session: OpenEnvSession) -> Tools:
    """The tools of an episode. Raises EnvironmentFailed."""
    told = (await session.step({"type": "list_tools"})).observation
    try:
        return checked_tools(
            [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool.get("description"),
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in told["tools"]
            ]
        )
    except (LookupError, TypeError, AttributeError, BadMessage) as error:
        raise EnvironmentFailed(f"the server's tools cannot be offered: {error!r}: {json.dumps(told)[:200]}") from error


def said_by_tool(step: OpenEnvStep) -> str:
    """What a tool answered: the texts of its result, or the result as JSON."""
    match step.observation:
        case {"error": {"message": str(text)}}:
            return f"error: {text}"
        case {"result": {"content": [*parts]}} if all(isinstance(part, dict) and "text" in part for part in parts):
            return "\n".join(str(part["text"]) for part in parts)
        case {"result": str(text)}:
            return text
        case observation:
            return json.dumps(observation.get("result", observation), ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object of a text; None for a text that is none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
