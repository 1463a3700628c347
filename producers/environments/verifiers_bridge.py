"""What touches verifiers: a taskset loaded offline, its episodes played with the policy, their traces made a score."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import verifiers.v1 as vf
from pydantic import BaseModel
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import TimeoutConfig
from verifiers.v1.configs.client import PRIME_INFERENCE_HOST
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

from tidemill.producers.environments import verifiers_loop
from tidemill.producers.environments.base import ContextFull, EnvironmentFailed, Policy, Score, TaskError
from tidemill.producers.environments.verifiers import VerifiersOptions
from tidemill.producers.environments.verifiers_loop import CONTEXT_FULL, HARNESS_ID
from tidemill.schemas.chat.protocol import chat_request, whole_answer
from tidemill.schemas.records import RewardComponent

PROGRAM_HARNESSES = ("bash", "null")
"""Harnesses of verifiers whose program needs nothing but what is installed beside verifiers."""
MODEL = "policy"
NO_URL = "http://127.0.0.1:9/v1"
"""Where nothing listens: verifiers asks no server for anything but turns, which the policy samples."""

sys.modules.setdefault(HARNESS_ID, verifiers_loop)  # verifiers imports a harness by its id


def load(name: str, options: VerifiersOptions) -> vf.Env[Any]:
    """A taskset with its agents, everything on this machine. Raises TaskError."""
    try:
        config = resolve_env_config(_block(name, options))
        # Give every judge without an endpoint that of the options. Raises TaskError where there is none.
        for place, judge in _judges(config.taskset, "taskset"):
            host = urlparse(judge.base_url).hostname or ""
            if host == PRIME_INFERENCE_HOST or host.endswith(f".{PRIME_INFERENCE_HOST}"):
                if not options.others_url:
                    raise TaskError(f"{place} would ask {host}: give others_url, or {place}.base_url")
                judge.base_url, judge.model, judge.api_key_var = options.others_url, options.others_model, "NONE"
        env = vf.load_environment(config)
    except Exception as error:  # loading runs foreign code, which raises anything
        raise TaskError(f"verifiers:{name} cannot be opened: {error}") from error
    for seat, agent in env._agent_specs.items():
        harness = env._harnesses[seat]
        if (harness.NEEDS_CONTAINER or env._task_cls.NEEDS_CONTAINER) and agent.runtime.type == "subprocess":
            what = f"harness {harness.config.id} of agent {seat}" if harness.NEEDS_CONTAINER else "a task"
            raise TaskError(f"verifiers:{name}: {what} needs a container: give env.{seat}.runtime")
        if agent.timeout != TimeoutConfig() or agent.retries != vf.RetryConfig():
            raise TaskError(f"verifiers:{name}: agent {seat} has a timeout or retries: set the run's deadlines instead")
    if config.timeout.episode or config.timeout.finalize:
        raise TaskError(f"verifiers:{name}: timeout is not taken: set the run's deadlines instead")
    return env


def offers_tools(env: vf.Env[Any]) -> bool:
    """Whether the taskset has tools."""
    config, taskset = env.taskset.config, type(env.taskset)
    return bool(taskset.toolsets(config) or taskset.task_type().toolsets(config.task))


def asks(data: vf.TaskData) -> str:
    """What a task asks in full."""
    if data.prompt is None:
        return str(data.model_dump_json(exclude_defaults=True, exclude={"idx", "id"}))
    told = data.prompt if isinstance(data.prompt, str) else [message_to_wire(message) for message in data.prompt]
    return json.dumps([data.system_prompt or "", told], ensure_ascii=False)


def task_of(env: vf.Env[Any], data: object) -> vf.Task[Any, Any, Any]:
    """The task whose data a payload holds, without deadlines of its own. Raises ValueError."""
    kind = type(env.taskset).task_type()
    read = kind.data_type().model_validate(data)
    return kind(read.model_copy(update={"timeout": vf.TaskTimeout()}), env.taskset.config.task)


def _block(name: str, options: VerifiersOptions) -> dict[str, Any]:
    """verifiers' `[env]` block."""
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
        elif declared.id == "null":  # the same loop, in a process for each of its turns
            agent.setdefault("harness", {"id": HARNESS_ID})
        if agent.get("harness", {}).get("id") in PROGRAM_HARNESSES:
            # Put the program of verifiers' chat harnesses where they look for it, to be run by this interpreter. They
            # would have uv install it from a package registry.
            digest = hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()
            path = Path(SubprocessRuntime.scripts_dir) / f"{digest}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CHAT_PROGRAM_SOURCE)
            SubprocessRuntime._interpreters[str(path)] = sys.executable
    return {**block, "taskset": {**copy.deepcopy(options.taskset), "id": name}}


def _judges(value: object, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, vf.JudgeConfig):
        yield place, value
    elif isinstance(value, BaseModel):
        for name, item in value:
            yield from _judges(item, f"{place}.{name}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _judges(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _judges(item, f"{place}.{number}")


@dataclass(slots=True, eq=False)
class _Playing:
    """One episode under way."""

    policy: Policy
    failed: asyncio.Future[None]
    """Holds the first failure of a generation."""
    full: str = ""
    """The text of a full context, where one is."""

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


class PolicyClient(vf.Client):  # type: ignore[misc]
    """Has the policy of its episode answer each call, and remembers every failure."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._others: EvalClient | None = None
        self._others_model = options.others_model
        if options.others_url:
            self._others = EvalClient(vf.EvalClientConfig(base_url=options.others_url, api_key_var="NONE"))
        self.playing: dict[str, tuple[_Playing, vf.Trace]] = {}
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
        """One turn. Raises ProviderError."""
        playing, trace = self.playing[session_id or ""]
        trained = trace.agent.trainable
        try:
            if self._others is not None and not trained:
                other = {**body, "model": self._others_model, "stream": False}
                other.pop("stream_options", None)
                return await self._others.get_response(dialect, other, sampling, session_id, turn, headers)
            if not isinstance(dialect, ChatDialect):
                raise EnvironmentFailed("an agent spoke another protocol than OpenAI's chat completions")
            asked = chat_request(body)
            reply = await playing.policy.chat(
                asked.messages, tools=asked.tools, max_tokens=asked.max_tokens, trained=trained
            )
        except ContextFull as error:
            playing.full = str(error)
            raise vf.ProviderError(f"{CONTEXT_FULL}: {error}", status_code=400) from error
        except Exception as error:
            playing.fail(error)
            raise vf.ProviderError(str(error), status_code=400) from error
        raw = whole_answer("turn", body["model"], int(time.time()), reply.message, reply.finish, reply.tokens)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response

    async def close(self) -> None:
        """Close the connections to the other endpoint."""
        if self._others is not None:
            await self._others.close()


class PolicyInterception(InterceptionServer):  # type: ignore[misc]
    """verifiers' server between programs and the model, with one client for all calls of the run's model."""

    def __init__(self, client: PolicyClient, state_service_secrets: tuple[str, ...]) -> None:
        super().__init__(state_service_secrets=state_service_secrets)
        self._policy_client = client

    def _client(self, config: Any) -> Any:  # noqa: ANN401
        return self._policy_client if isinstance(config, vf.TrainClientConfig) else super()._client(config)


class TasksetPlayer:
    """Plays episodes of one taskset, with its shared tool servers."""

    def __init__(self, env: vf.Env[Any], options: VerifiersOptions) -> None:
        self._env, self._options = env, options
        self._client = PolicyClient(options)
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        # In a context of its own: the servers belong to no episode.
        self._serving = asyncio.get_running_loop().create_task(self._serve(), context=Context())

    async def play(self, task: vf.Task[Any, Any, Any], policy: Policy) -> Score:
        """One episode. Raises EnvironmentFailed, and what the policy raises."""
        await asyncio.shield(self._up)
        playing = _Playing(policy, asyncio.get_running_loop().create_future())
        traces: list[str] = []

        def begun(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._client.playing[trace.id] = (playing, trace)

        # verifiers streams are answered whole by a client of this type.
        context = vf.ModelContext(MODEL, vf.TrainClientConfig(base_url=NO_URL, api_key_var="NONE"))
        running = asyncio.create_task(self._env.run_episode(task, context, on_trace=begun))
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
                del self._client.playing[trace]
        fault = fault_of(episode)
        if fault and playing.full:
            raise ContextFull(playing.full)
        if fault:
            raise EnvironmentFailed(fault)
        return score_of(episode, self._options.success_at)

    @property
    def failed(self) -> bool:
        """Whether its servers could not be started."""
        return self._up.done() and self._up.exception() is not None

    async def close(self) -> None:
        """Stop the servers."""
        self._over.set()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        try:
            async with serving(self._env, self._client):
                self._up.set_result(None)
                await self._over.wait()
        except Exception as error:  # starting runs foreign code, which raises anything
            if self._up.done():
                raise
            self._up.set_exception(EnvironmentFailed(f"the taskset's servers do not start: {error!r:.1000}"))


@asynccontextmanager
async def serving(env: vf.Env[Any], client: PolicyClient) -> AsyncIterator[None]:
    """Like `Env.serving`, with the policy as the model. Raises EnvironmentFailed."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # tool servers are processes that import the taskset
    async with env.shared_tools() as shared:
        if env._requires_tunnel(shared):
            raise EnvironmentFailed("an agent or a tool server runs on another machine, and would need a tunnel")
        secrets = tuple(server.state_secret for server in shared.values() if server.state_secret)
        async with PolicyInterception(client, secrets) as server:
            env._shared_tools, env._interception = shared, server
            try:
                await env.start()
                yield
            finally:
                await env.stop()
                await client.close()


def fault_of(episode: vf.Episode) -> str:
    """Why an episode does not count; empty when it does. verifiers scores some that have failed."""
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
    return "" if episode.ok else "the episode did not end well, and verifiers does not say why"


def score_of(episode: vf.Episode, success_at: float) -> Score:
    """The score of an episode: the mean over its trained agents, the rest as metrics."""
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
    score = Score(tuple(rewards), None, metrics)
    return Score(score.rewards, score.total >= success_at, metrics)
