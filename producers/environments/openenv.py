"""A running OpenEnv server, as `openenv:http://HOST:PORT`: observations are messages, turns are actions.

The server provides tasks and rewards. A task is a reset with its own seed and further arguments; it is drawn together
with its first observation, so that the question decides whether a task is held out.

The protocol is that of the package `openenv` 0.10 and of the older `openenv-core`: JSON messages {"type", "data"} over
a WebSocket, one answer to each, one environment for each connection. Without a well-formed answer of the server the
episode fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from random import Random
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tidemill.producers.environments import base, find
from tidemill.producers.environments.toolbox import json_object, unreadable
from tidemill.schemas.chat.messages import BadMessage, Message, Tools, checked_tools
from tidemill.schemas.records import RewardComponent, Task

MOST_BYTES = 16 << 20
"""Largest message of a server, in bytes."""
PAUSE_S = 0.25
"""Delay before the next request to a server that had no free session."""
NO_LIMIT = aiohttp.ClientTimeout(total=None)
"""Disables aiohttp's own timeout, which loses a cancellation in the same step of the event loop."""
CLOSE_S = 1.0
"""Longest time that a server gets to close a connection."""


class OpenEnvOptions(base.EnvironmentOptions):
    """Options that map a server's observations and actions to a conversation."""

    model_config = ConfigDict(allow_inf_nan=False)

    turn: Literal["text", "json", "tools"] = "text"
    """Conversion of a turn to an action: its text in a field; its text, a JSON object, as the action; or its tool
    calls, with the tools that the server lists (MCP)."""
    action_field: str = ""
    """Field of the action that contains the text of a turn. Empty: the only text field that the server's actions
    require; with `turn = "tools"`, a turn without calls ends the episode."""
    action: Annotated[dict[str, Any], BeforeValidator(find.structured)] = Field(default_factory=dict)
    """Further fields of each action."""
    observation_field: str = ""
    """Field of the observation that is shown. Empty: all except `metadata`, which is shown only if no other field
    exists. A single text is shown unchanged, anything else as JSON."""
    system: str = ""
    """System message of each conversation."""
    reset: Annotated[dict[str, Any], BeforeValidator(find.structured)] = Field(default_factory=dict)
    """Parameters of each reset, in addition to the task's own."""
    task_parameter: str = "seed"
    """Parameter of the reset that identifies the task."""
    task_count: int = Field(default=0, ge=0, le=10**6)
    """Above 0: task numbers are below it. 0: task numbers are below 2**31."""
    repeatable: bool = True
    """Whether resets with equal parameters give equal first observations. False: the parameters alone decide whether
    a task is held out, and its question may also occur in training."""
    reward: Literal["sum", "last"] = "sum"
    """The reward of an episode, computed from the rewards of its steps."""
    success_at: float | None = None
    """Smallest reward of a successful episode. None: episodes have no success or failure."""
    turns: int = Field(default=16, ge=1)
    """Most turns of the policy."""
    sessions: int = Field(default=8, ge=1)
    """Most sessions of a worker at the same time; the server allows one, unless its `max_concurrent_envs` is larger."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to connect, and longest time for the answer to one step."""
    wait_s: float = Field(default=300.0, ge=0)
    """Longest time to wait for a free session of the server."""


class OpenEnvTask(BaseModel):
    """A reset of the server."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parameters: dict[str, Any]
    opening: str
    """BLAKE2b of the first observation as shown; empty if it may differ at the next reset."""


class ServerFull(base.EnvironmentFailed):
    """Error of a server that has no free session now."""


class RefusedAction(base.EnvironmentFailed):
    """Error of an action that does not fit the server's action model; the text is the server's."""


class OpenEnvStep(BaseModel):
    """A server's answer to a reset or a step."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class OpenEnvSession:
    """One connection, which is one environment of the server, with the rewards of its episode."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._url, self._socket, self._timeout_s = url, socket, timeout_s
        self.rewards: list[float] = []
        self.steps, self.done = 0, False

    async def ask(self, kind: str, data: Mapping[str, object], *, counted: bool = True) -> OpenEnvStep:
        """Send a message of type `kind`, reset or step, and return the answer. It counts for the episode if `counted`.

        Raises RefusedAction, ServerFull, EnvironmentFailed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                frame = await self._socket.receive()
        except TimeoutError as error:
            raise base.EnvironmentFailed(f"{self._url}: no answer to {kind} within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise base.EnvironmentFailed(f"{self._url}: {error!r}") from error
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise base.EnvironmentFailed(f"{self._url}: {frame.type.name} in place of an answer to {kind}")
        try:
            answer = json.loads(frame.data)
        except (ValueError, RecursionError) as error:
            raise base.EnvironmentFailed(f"{self._url}: its answer to {kind} is no JSON: {error}") from error
        match answer:
            case {"type": "observation", "data": fields}:
                try:
                    step = OpenEnvStep.model_validate(fields)
                except ValidationError as error:
                    wrong = base.faults(error, "data")
                    raise base.EnvironmentFailed(f"{self._url}: its answer is no observation: {wrong}") from error
                if counted:
                    self.steps += kind == "step"
                    self.done = step.done
                    self.rewards += [] if step.reward is None else [float(step.reward)]
                return step
            case {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": text}}:
                raise ServerFull(f"{self._url}: {text}")
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", **more}} if kind == "step":
                raise RefusedAction(f"the server refuses the action: {json.dumps(more)[:500]}")
            case {"type": "error", "data": {"code": code, "message": text}}:
                raise base.EnvironmentFailed(f"{self._url}: {kind} failed: {str(text)[:500]} ({code})")
            case _:
                raise base.EnvironmentFailed(f"{self._url}: its answer to {kind} is {frame.data[:200]}")


class OpenEnvEnvironment(base.Environment):
    """The environment of a running OpenEnv server."""

    options: OpenEnvOptions
    version = "openenv-1"
    isolation = "loop"
    network = True

    def __init__(self, options: OpenEnvOptions, url: str) -> None:
        """Store the address `url` of the server, http or https. Sends no request yet."""
        super().__init__(options)
        self.needs_tools = options.turn == "tools"  # type: ignore[misc]  # of the instance
        self._url, self._field = url, options.action_field
        self._free = asyncio.Semaphore(options.sessions)

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Yield resets, with the server's first observation for each. Blocks. Raises TaskError."""
        rng, options = Random(f"openenv {query.seed}"), self.options
        drawn = (rng.getrandbits(31) for _ in count())
        for number in rng.sample(range(options.task_count), options.task_count) if options.task_count else drawn:
            parameters = {**options.reset, options.task_parameter: number}
            asks, opening = json.dumps(parameters, sort_keys=True), ""
            if options.repeatable:
                try:
                    # In a thread, since the caller may run in an event loop.
                    with ThreadPoolExecutor(1) as thread:
                        asks = thread.submit(asyncio.run, self._opening(parameters)).result()
                except base.EnvironmentFailed as error:
                    raise base.TaskError(str(error)) from error
                opening = _digest(asks)
            task = OpenEnvTask(parameters=parameters, opening=opening)
            yield base.TaskDraft(task.model_dump_json(), asks, options.turns)

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Play an episode on the server. Raises EnvironmentFailed if an answer is missing or malformed."""
        begin, options = base.read_payload(OpenEnvTask, task.payload, "task of OpenEnv"), self.options
        if options.turn == "text" and not self._field:
            self._field = await self._text_field()
        async with self._free, self._session(begin.parameters) as (session, first):
            opening = self._shown(first)
            if begin.opening not in ("", _digest(opening)):
                raise base.EnvironmentFailed(
                    f"{self._url}: a reset with {begin.parameters} begins otherwise than when the task was drawn; set "
                    "repeatable = false for a server that follows no seed"
                )
            messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
            messages.append({"role": "user", "content": opening})
            tools = await listed_tools(session) if options.turn == "tools" else Tools()
            for _ in range(0 if first.done else task.max_turns):
                try:
                    reply = await policy.chat(messages, tools=tools)
                except base.ContextFull:  # the steps so far were rewarded
                    break
                messages += [reply.message, *await self._answers(session, reply, tools)]
                if session.done:
                    break
        rewards = [0.0, *session.rewards]
        reward = sum(rewards) if options.reward == "sum" else rewards[-1]
        at = options.success_at
        metrics = {"steps": float(session.steps), "done": float(session.done)}
        return base.Score((RewardComponent("reward", reward, 1.0),), None if at is None else reward >= at, metrics)

    async def _answers(self, session: OpenEnvSession, reply: base.Reply, tools: Tools) -> list[Message]:
        """Execute the actions of a turn, and return the messages that answer it."""
        turn, further = self.options.turn, self.options.action
        if turn == "tools" and (reply.message.get("tool_calls") or reply.malformed):
            names = [tool["function"]["name"] for tool in tools]
            messages: list[Message] = []
            for call in reply.message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], json_object(call["function"]["arguments"])
                if name not in names:
                    result = f"error: there is no tool {name[:64]!r}; there are {', '.join(names)}"
                elif arguments is None:
                    result = "error: the arguments are no JSON object"
                elif session.done:
                    result = "error: the episode is over"
                else:
                    called = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                    result = tool_result(await session.ask("step", {**further, **called}))
                messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
            return messages + unreadable(reply)
        if turn == "tools" and not self._field:
            session.done = True
            return []
        action = json_object(reply.content) if turn == "json" else {self._field: reply.content}
        try:
            shown = self._shown(await session.ask("step", {**further, **action})) if action is not None else None
        except RefusedAction as error:
            if turn != "json":
                raise
            shown = f"error: {error}"
        return [{"role": "user", "content": "error: the turn is no JSON object" if shown is None else shown}]

    def _shown(self, step: OpenEnvStep) -> str:
        field = self.options.observation_field
        if field and field not in step.observation:
            raise base.EnvironmentFailed(
                f"{self._url}: an observation has no field {field!r}; it has {[*step.observation]}"
            )
        fields = {name: value for name, value in step.observation.items() if name == field or not field}
        if len(fields) > 1:
            fields.pop("metadata", None)
        shown = next(iter(fields.values())) if len(fields) == 1 else fields
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    async def _opening(self, parameters: Mapping[str, object]) -> str:
        async with self._session(parameters) as (_, first):
            return self._shown(first)

    @asynccontextmanager
    async def _session(self, parameters: Mapping[str, object]) -> AsyncIterator[tuple[OpenEnvSession, OpenEnvStep]]:
        """Open a session, and yield it with the first observation of an episode. Raises EnvironmentFailed."""
        loop, limit_s, url = asyncio.get_running_loop(), self.options.timeout_s, self._url
        give_up_at = loop.time() + self.options.wait_s
        ends = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
        async with aiohttp.ClientSession(timeout=NO_LIMIT) as http:
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        socket = await http.ws_connect(f"{url}/ws", timeout=ends, max_msg_size=MOST_BYTES)
                except TimeoutError as error:
                    raise base.EnvironmentFailed(f"{url}: no connection within {limit_s:g} s") from error
                except (aiohttp.ClientError, OSError) as error:
                    raise base.EnvironmentFailed(f"{url}: no connection: {error}") from error
                session = OpenEnvSession(url, socket, limit_s)
                try:
                    try:
                        first = await session.ask("reset", parameters)
                    except ServerFull:
                        if loop.time() > give_up_at:
                            raise
                    else:
                        yield session, first
                        return
                finally:
                    # End the session; ignore errors, since the server may have exited
                    with suppress(TimeoutError, aiohttp.ClientError, OSError):
                        async with asyncio.timeout(CLOSE_S):
                            await socket.send_str(json.dumps({"type": "close"}))
                    await socket.close()
                await asyncio.sleep(PAUSE_S)

    async def _text_field(self) -> str:
        """Return the only text field that the actions require. Raises EnvironmentFailed for none or several."""
        url, limit_s = self._url, self.options.timeout_s
        try:
            async with asyncio.timeout(limit_s), aiohttp.ClientSession(raise_for_status=True, timeout=NO_LIMIT) as http:
                declared = await (await http.get(f"{url}/schema")).json()
        except TimeoutError as error:
            raise base.EnvironmentFailed(f"{url}/schema: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise base.EnvironmentFailed(f"{url}/schema: {type(error).__name__}: {error}") from error
        match declared:
            case {"action": {"properties": dict() as fields, **more}}:
                required: Any = more.get("required") or ()
                described = {name: fields[name] for name in required if isinstance(fields.get(name), dict)}
                texts = [name for name, schema in described.items() if schema.get("type") == "string"]
                if len(texts) != 1:
                    raise base.EnvironmentFailed(
                        f"{url}: set action_field to the field that holds the text of a turn, of {', '.join(fields)}"
                    )
                return str(texts[0])
            case _:
                raise base.EnvironmentFailed(f"{url}/schema: it describes no action")


class OpenEnv(find.EnvironmentAdapter):
    """Adapter for running OpenEnv servers, by their addresses."""

    def members(self) -> Iterator[find.EnvironmentListing]:
        """Yield the form of a name, since no list of servers exists."""
        yield find.EnvironmentListing("http://HOST:PORT", "the environment of a running OpenEnv server")

    def member(self, name: str) -> find.EnvironmentType:
        """Return the environment type of a server's address. Raises UnknownEnvironment."""
        parts = urlsplit(name)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise find.UnknownEnvironment(
                f"openenv:{name}: name a running server by its address, openenv:http://HOST:PORT"
            )
        url = name.rstrip("/")
        make = partial(OpenEnvEnvironment, url=url)
        return find.EnvironmentType(f"openenv:{url}", f"OpenEnv server at {url}", OpenEnvOptions, "loop", True, make)


async def listed_tools(session: OpenEnvSession) -> Tools:
    """Request the tools of an episode. Raises EnvironmentFailed."""
    observation = (await session.ask("step", {"type": "list_tools"}, counted=False)).observation
    try:
        functions = [
            {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
            for tool in observation["tools"]
        ]
        return checked_tools([{"type": "function", "function": function} for function in functions])
    except (LookupError, TypeError, AttributeError, BadMessage) as error:
        raise base.EnvironmentFailed(
            f"the server's tools cannot be offered: {error!r}: {json.dumps(observation)[:200]}"
        ) from error


def tool_result(step: OpenEnvStep) -> str:
    """Return the answer of a tool: the texts of its result, or the result as JSON."""
    match step.observation:
        case {"error": {"message": str(text)}}:
            return f"error: {text}"
        case {"result": {"content": [*parts]}} if all(isinstance(part, dict) and "text" in part for part in parts):
            return "\n".join(str(part["text"]) for part in parts)
        case {"result": str(text)}:
            return text
        case observation:
            return json.dumps(observation.get("result", observation), ensure_ascii=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
