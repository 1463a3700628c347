"""The adapter of verifiers: loads tasksets offline, plays episodes with the policy, and turns traces into a score."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlparse

import aiohttp
import verifiers.v1 as vf
from pydantic import BaseModel
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import TimeoutConfig
from verifiers.v1.configs.client import PRIME_INFERENCE_HOST
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

from tidemill.producers.environments import base
from tidemill.producers.environments.toolbox import json_object
from tidemill.producers.environments.verifiers import VerifiersOptions
from tidemill.schemas.chat.protocol import chat_request, whole_answer
from tidemill.schemas.records import RewardComponent, Task

__all__ = ["LoopHarness"]  # verifiers requires exactly one

HARNESS_ID = "tidemill_loop"
CONTEXT_FULL = "context_length_exceeded"
"""Text that marks the error of a full context, for every harness."""
PROGRAM_HARNESSES = ("bash", "null")
"""Harnesses of verifiers whose program needs only packages that are installed with verifiers."""
MOST_CALLS = 4096
"""Most calls of all agents in one rollout; a further call fails the rollout."""
WINDOW = 4096
"""Number of tasks of an endless taskset that are shuffled together."""
MODEL = "policy"
NO_URL = "http://127.0.0.1:9/v1"
"""An address without a server: verifiers only requests turns, which the policy samples."""

sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])  # verifiers imports a harness by its id
for field in vf.MessageNode.model_fields.values():
    if field.default_factory is list:
        field.default_factory = lambda: []  # otherwise pydantic parses `list`'s signature for each message: 1 ms


class VerifiersTaskset(base.Environment):
    """One taskset, with its shared tool servers."""

    options_model = VerifiersOptions
    isolation = "process"
    network = True
    options: VerifiersOptions

    def __init__(self, name: str, options: VerifiersOptions) -> None:
        """Import a taskset's module and load the taskset. Raises TaskError."""
        super().__init__(options)
        self._name, self._env = name, load(name, options)
        packages = [f"{each}-{version(each)}" for each in packages_distributions().get(name, ())]
        self.version = "+".join([f"verifiers-{version('verifiers')}", *packages])  # type: ignore[misc]  # of the instance
        config, taskset = self._env.taskset.config, type(self._env.taskset)
        tools = taskset.toolsets(config) or taskset.task_type().toolsets(config.task)
        self.needs_tools = bool(tools)  # type: ignore[misc]
        self._client: PolicyClient
        self._serving: asyncio.Task[None] | None = None

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Yield the taskset's tasks, shuffled. Raises TaskError if the taskset cannot load them."""
        shuffle, tasks = Random(f"verifiers {query.seed}").shuffle, iter(self._env.taskset)
        try:
            while window := list(islice(tasks, WINDOW) if self._env.taskset.INFINITE else tasks):
                shuffle(window)
                for task in window:
                    payload = task.data.model_dump_json(exclude_defaults=True)
                    yield base.TaskDraft(payload, asks(task.data), MOST_CALLS)
        except Exception as error:  # a taskset is foreign code, which raises anything
            raise base.TaskError(f"verifiers:{self._name} cannot load its tasks: {error!r}") from error

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Run the taskset's agents. Raises the policy's errors, EnvironmentFailed, TaskError."""
        try:
            kind = type(self._env.taskset).task_type()
            data = kind.data_type().model_validate(json.loads(task.payload))
            # Without its own deadlines.
            given = kind(data.model_copy(update={"timeout": vf.TaskTimeout()}), self._env.taskset.config.task)
        except (ValueError, RecursionError) as error:
            raise base.TaskError(f"the payload is no task of {self._name}: {error}") from error
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving.done():
            self._client = PolicyClient(self.options)
            self._up, self._over = loop.create_future(), asyncio.Event()
            # In its own context: the servers belong to no episode.
            self._serving = loop.create_task(self._serve(), context=Context())
        await asyncio.shield(self._up)
        playing = _RunningEpisode(policy, loop.create_future())
        traces: list[str] = []

        def register(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._client.playing[trace.id] = (playing, trace)

        # With a client of this type, verifiers answers streamed requests whole.
        context = vf.ModelContext(MODEL, vf.TrainClientConfig(base_url=NO_URL, api_key_var="NONE"))
        running = asyncio.create_task(self._env.run_episode(given, context, on_trace=register))
        both: set[asyncio.Future[Any]] = {running, playing.failed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if playing.failed.done():
                playing.failed.result()
            episode = running.result()
        finally:
            playing.failed.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for trace in traces:
                self._client.playing.pop(trace, None)
        fault = fault_of(episode)
        if fault and playing.full:
            raise base.ContextFull(playing.full)
        if fault:
            raise base.EnvironmentFailed(fault)
        return score_of(episode, self.options.success_at)

    async def close(self) -> None:
        """Stop the tool servers."""
        if self._serving is not None:
            self._over.set()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        """Run the servers like `Env.serving`, with the policy as the model, until `close`."""
        env = self._env
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # tool servers are processes that import the taskset
        try:
            async with env.shared_tools() as shared:
                if env._requires_tunnel(shared):
                    raise base.EnvironmentFailed(
                        "an agent or a tool server runs on another machine, and would need a tunnel"
                    )
                secrets = tuple(server.state_secret for server in shared.values() if server.state_secret)
                async with PolicyInterception(self._client, secrets) as server:
                    env._shared_tools, env._interception = shared, server
                    try:
                        await env.start()
                        self._up.set_result(None)
                        await self._over.wait()
                    finally:
                        await env.stop()
                        await self._client.close()
        except Exception as error:  # starting runs foreign code, which raises anything
            if self._up.done():
                raise
            self._up.set_exception(base.EnvironmentFailed(f"the taskset's servers do not start: {error!r:.1000}"))


def load(name: str, options: VerifiersOptions) -> vf.Env[Any]:
    """Load a taskset with its agents, all on this machine. Raises TaskError."""
    try:
        config = resolve_env_config(_block(name, options))
        # Give every judge without an endpoint the one of the options. Raises TaskError if there is none.
        for place, judge in _judges(config.taskset, "taskset"):
            host = urlparse(judge.base_url).hostname or ""
            if host == PRIME_INFERENCE_HOST or host.endswith(f".{PRIME_INFERENCE_HOST}"):
                if not options.others_url:
                    raise base.TaskError(f"{place} would ask {host}: give others_url, or {place}.base_url")
                judge.base_url, judge.model, judge.api_key_var = options.others_url, options.others_model, "NONE"
        env = vf.load_environment(config)
    except Exception as error:  # loading runs foreign code, which raises anything
        raise base.TaskError(f"verifiers:{name} cannot be opened: {error}") from error
    for seat, agent in env._agent_specs.items():
        harness, wrong = env._harnesses[seat], ""
        if (harness.NEEDS_CONTAINER or env._task_cls.NEEDS_CONTAINER) and agent.runtime.type == "subprocess":
            what = f"harness {harness.config.id} of agent {seat}" if harness.NEEDS_CONTAINER else "a task"
            wrong = f"{what} needs a container: give env.{seat}.runtime"
        elif agent.timeout != TimeoutConfig() or agent.retries != vf.RetryConfig():
            wrong = f"agent {seat} has a timeout or retries: set the run's deadlines instead"
        if wrong:
            raise base.TaskError(f"verifiers:{name}: {wrong}")
    if config.timeout.episode or config.timeout.finalize:
        raise base.TaskError(f"verifiers:{name}: timeout is not taken: set the run's deadlines instead")
    return env


def _block(name: str, options: VerifiersOptions) -> dict[str, Any]:
    """Make verifiers' `[env]` block."""
    block = copy.deepcopy(options.env)
    own = default_harness_id(name)
    harness = options.harness or (HARNESS_ID if own == "bash" else own)
    for seat, field in env_config_type(name, block.get("id", "")).model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        agent = block.setdefault(seat, {})
        declared = field.default.harness
        agent.setdefault("runtime", {"type": "subprocess"})
        if field.default.max_turns is None:
            agent.setdefault("max_turns", options.max_turns)
        if declared is None:
            agent.setdefault("harness", {**options.harness_options, "id": harness})
        elif declared.id == "null":  # the same loop, with a process for each turn
            agent.setdefault("harness", {"id": HARNESS_ID})
        if agent.get("harness", {}).get("id") in PROGRAM_HARNESSES:
            # Write the program of verifiers' chat harnesses to the path that they use, for this interpreter. Otherwise
            # they call uv, which installs from a package registry.
            digest = hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()
            path = Path(SubprocessRuntime.scripts_dir) / f"{digest}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CHAT_PROGRAM_SOURCE)
            SubprocessRuntime._interpreters[str(path)] = sys.executable
    return {**block, "taskset": {**copy.deepcopy(options.taskset), "id": name}}


def _judges(value: object, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the judge settings within a value, each with its path."""
    if isinstance(value, vf.JudgeConfig):
        yield place, value
    elif isinstance(value, BaseModel | Mapping | list | tuple):
        inner: Any = value.items() if isinstance(value, Mapping) else value
        for name, item in enumerate(inner) if isinstance(value, list | tuple) else inner:
            yield from _judges(item, f"{place}.{name}")


@dataclass(slots=True, eq=False)
class _RunningEpisode:
    policy: base.Policy
    failed: asyncio.Future[None]
    """Contains the first failure of a generation."""
    full: str = ""
    """The error text of a full context; empty if none."""


class PolicyClient(vf.Client):  # type: ignore[misc]
    """Answers each call with the policy of its episode, and stores the first failure."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._others: EvalClient | None = None
        self._others_model = options.others_model
        if options.others_url:
            self._others = EvalClient(vf.EvalClientConfig(base_url=options.others_url, api_key_var="NONE"))
        self.playing: dict[str, tuple[_RunningEpisode, vf.Trace]] = {}
        """Episode and trace by the id of the trace."""

    async def get_response(
        self,
        dialect: Any,  # noqa: ANN401 - types of verifiers, here and below
        body: dict[str, Any],
        sampling: Any,  # noqa: ANN401
        session_id: str | None = None,
        turn: Any = None,  # noqa: ANN401
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Return one turn. Raises ProviderError."""
        playing, trace = self.playing[session_id or ""]
        trained = trace.agent.trainable
        try:
            if self._others is not None and not trained:
                other = {**body, "model": self._others_model, "stream": False}
                other.pop("stream_options", None)
                return await self._others.get_response(dialect, other, sampling, session_id, turn, headers)
            if not isinstance(dialect, ChatDialect):
                raise base.EnvironmentFailed("an agent spoke another protocol than OpenAI's chat completions")
            request = chat_request(body)
            reply = await playing.policy.chat(
                request.messages, tools=request.tools, max_tokens=request.max_tokens, trained=trained
            )
        except base.ContextFull as error:
            playing.full = str(error)
            raise vf.ProviderError(f"{CONTEXT_FULL}: {error}", status_code=400) from error
        except Exception as error:
            if not playing.failed.done():
                playing.failed.set_exception(error)
            raise vf.ProviderError(str(error), status_code=400) from error
        raw = whole_answer("turn", body["model"], int(time.time()), reply.message, reply.finish, reply.tokens)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response

    async def close(self) -> None:
        if self._others is not None:
            await self._others.close()


class PolicyInterception(InterceptionServer):  # type: ignore[misc]
    """verifiers' server between programs and the model, with one client for all calls to the run's model."""

    def __init__(self, client: PolicyClient, state_service_secrets: tuple[str, ...]) -> None:
        super().__init__(state_service_secrets=state_service_secrets)
        self._policy_client = client

    def _client(self, config: Any) -> Any:  # noqa: ANN401
        return self._policy_client if isinstance(config, vf.TrainClientConfig) else super()._client(config)


class LoopConfig(vf.HarnessConfig):  # type: ignore[misc]
    id: str = HARNESS_ID


class LoopHarness(vf.Harness[LoopConfig]):  # type: ignore[misc]
    """The harness of agents that do not name one: calls the model, in this process and with the taskset's tools, until
    a turn has no tool call, or the context is full."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run one conversation, from a prompt or from earlier messages."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, known, connections = await connect_mcp({"mcpServers": servers}, stack)
            hidden = self.config.disabled_tools or ()
            request = {"model": ctx.model, "tools": [each for each in tools if each["function"]["name"] not in hidden]}
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            while True:
                async with http.post(f"{endpoint}/chat/completions", json={**request, "messages": messages}) as answer:
                    if answer.status != 200:
                        body_text = await answer.text()
                        return vf.ProgramResult(0 if CONTEXT_FULL in body_text else 1, "", body_text[-500:])
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    name = call["function"]["name"]
                    arguments = json_object(call["function"]["arguments"] or "{}")
                    content: Any = f"error: there is no tool {name!r:.64}; there are {', '.join(known) or 'none'}"
                    if name in known and name not in hidden:
                        content = "error: the arguments are no JSON object"
                        if arguments is not None:
                            content = await call_mcp(connections, known, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def asks(data: vf.TaskData) -> str:
    """Return the full question of a task."""
    if data.prompt is None:
        return str(data.model_dump_json(exclude_defaults=True, exclude={"idx", "id"}))
    prompt = data.prompt if isinstance(data.prompt, str) else [message_to_wire(message) for message in data.prompt]
    return json.dumps([data.system_prompt or "", prompt], ensure_ascii=False)


def fault_of(episode: vf.Episode) -> str:
    """Return why an episode is invalid; empty if it is valid. verifiers also scores some failed episodes."""
    for error in episode.errors:
        return f"{error.type}: {error.message[-800:]}"
    for trace in episode.traces:
        who = trace.agent.name
        for error in trace.errors:
            return f"agent {who}: {error.type}: {error.message[-800:]}"
        if trace.is_timeout:
            return f"agent {who}: {trace.stop_condition}"
        for call in trace.calls:
            if call.error is not None and CONTEXT_FULL not in call.error.message:
                return f"agent {who}: a call failed: {call.error.type}: {call.error.message[-800:]}"
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            return f"agent {who}: reward {missing[0]} was not computed"
    return "" if episode.ok else "the episode failed, and verifiers gives no reason"


def score_of(episode: vf.Episode, success_at: float) -> base.Score:
    """Return the score of an episode: the mean over its trained agents, other values as metrics."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    runs = [trace.agent.name for trace in episode.traces]
    rewards: list[RewardComponent] = []
    metrics: dict[str, float] = {}
    for number, trace in enumerate(episode.traces):
        again = runs[:number].count(trace.agent.name)
        who = f"{trace.agent.name}{again + 1}" if runs.count(trace.agent.name) > 1 else trace.agent.name
        prefix = f"{who}." if len(runs) > 1 else ""
        metrics |= {f"{prefix}{name}": value for name, value in trace.metrics.items() if value is not None}
        metrics[f"{prefix}truncated"] = float(trace.is_truncated)
        for name, reward in trace.rewards.items():
            if trace.agent.trainable:
                rewards.append(RewardComponent(prefix + name, reward.score, reward.weight / len(trained)))
            else:
                metrics[prefix + name] = reward.value
    score = base.Score(tuple(rewards), None, metrics)
    return base.Score(score.rewards, score.total >= success_at, metrics)
