"""The completion layer for agent programs: one OpenAI endpoint on loopback per worker, with a key for each rollout.

Invariants:

- a key gives access only to its own rollout, and to nothing after the episode has ended;
- an answer is sampled as in process: seed, temperature, top_p and stop of a request are ignored, because they would
  bias it; a field that asks for another kind of answer is refused by name;
- if a client disconnects, its generation is cancelled and the rollout has failed;
- after an agent posted its result, none of its calls is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError

from tidemill.producers.environments.base import ContextFull, Endpoint, GenerationFailed, Reply, Score, faults
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import call_deltas, chat_request, chunk, json_object, usage, whole_answer
from tidemill.schemas.records import RewardComponent

LOG = logging.getLogger(__name__)
LARGEST_BODY = 32 * 2**20
"""In bytes, of a request."""
MODEL = "policy"
"""Name of the model in the list of models."""
BACKLOG = 1024
STOP_S = 0.5
"""Seconds that requests in flight get when the endpoint stops."""

_Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _PostedResult(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    rewards: dict[_Name, FiniteFloat] = Field(min_length=1, max_length=64)
    """Reward components by name; the reward is their sum."""
    success: bool | None = None
    metrics: dict[_Name, FiniteFloat] = Field(default_factory=dict, max_length=64)


@dataclass(slots=True, eq=False)
class _RolloutSession:
    policy: RolloutPolicy
    turns: set[asyncio.Task[Reply]] = field(default_factory=set)
    """Generations in progress."""


class _Refused(Exception):
    """A request that is answered with an error in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class AgentEndpoint:
    """The endpoint of one worker, as an async context manager. It starts to listen when the first rollout needs it."""

    def __init__(self) -> None:
        self._sessions: dict[str, _RolloutSession] = {}
        self._base_url = ""
        self._serving: asyncio.Task[web.AppRunner] | None = None
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> AgentEndpoint:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the port and all open sessions."""
        for session in list(self._sessions.values()):
            self.close(session.policy)
        if self._serving is not None:
            await (await self._serving).cleanup()

    def open(self, policy: RolloutPolicy) -> Endpoint:
        """Return the endpoint of a rollout, with a new key. Raises OSError if no port is free."""
        if self._serving is None:
            # The port is known at once; connections wait until the server has started.
            listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self._base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            self._serving = asyncio.get_running_loop().create_task(self._serve(listening))
        key = f"tidemill-{secrets.token_urlsafe(24)}"
        self._sessions[key] = _RolloutSession(policy)
        return Endpoint(self._base_url, key)

    def close(self, policy: RolloutPolicy) -> None:
        """Revoke a rollout's keys and cancel its generations; do nothing for a rollout that was never opened."""
        for key in [key for key, session in self._sessions.items() if session.policy is policy]:
            for turn in self._sessions.pop(key).turns:
                turn.cancel()

    async def _serve(self, listening: socket.socket) -> web.AppRunner:
        async def models(_request: web.Request, _session: _RolloutSession) -> web.Response:
            listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tidemill"}
            return _json({"object": "list", "data": [listed]})

        async def nothing(request: web.Request, _session: _RolloutSession) -> web.Response:
            raise _Refused(404, f"there is no {request.method} {request.path:.200} here")

        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_post("/v1/chat/completions", self._answering(self._chat))
        app.router.add_post("/v1/outcome", self._answering(self._outcome))
        app.router.add_get("/v1/models", self._answering(models))
        app.router.add_route("*", "/{path:.*}", self._answering(nothing))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        return runner

    def _answering(
        self, answer: Callable[[web.Request, _RolloutSession], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a handler whose errors have OpenAI's form."""

        async def handler(request: web.Request) -> web.Response:
            try:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
                if session is None:
                    raise _Refused(401, "this key is unknown, or its episode is over", "invalid_api_key")
                return await answer(request, session)
            except _Refused as error:
                return _error(error.status, str(error), error.code)
            except BadMessage as error:
                return _error(400, str(error))
            except web.HTTPRequestEntityTooLarge:
                return _error(413, f"the body is longer than {LARGEST_BODY} bytes")

        return handler

    async def _chat(self, request: web.Request, session: _RolloutSession) -> web.Response:
        fields = json_object(await request.read())
        wanted, stream = chat_request(fields), fields.get("stream") or False
        options, model = fields.get("stream_options") or {}, fields.get("model", MODEL)
        if not isinstance(stream, bool) or not isinstance(options, dict) or not isinstance(model, str):
            raise BadMessage("`stream` must be true or false, `stream_options` an object, `model` a text")
        if wanted.alternatives is not None:
            raise BadMessage("`logprobs` must be false: the rollout records them, and no answer returns them")
        if session.policy.posted is not None:
            raise _Refused(400, "the result was posted: no call is answered after it", "episode_over")
        calling = session.policy.chat(wanted.messages, tools=wanted.tools, max_tokens=wanted.max_tokens)
        reply = await self._reply(session, calling)
        head = (f"chatcmpl-{next(self._numbers)}", model, int(time.time()))
        if not stream:
            return _json(whole_answer(*head, reply.message, reply.finish, reply.tokens))
        # The events start when the turn is complete, so that a failure has a status.
        deltas: list[Mapping[str, Any]] = [{"role": "assistant", "content": ""}]
        for name in ("reasoning_content", "content"):
            if reply.message.get(name):
                deltas.append({name: reply.message[name]})
        deltas += [{"tool_calls": [call]} for call in call_deltas(reply.message)]
        chunks = [*(chunk(*head, delta) for delta in deltas), chunk(*head, {}, reply.finish)]
        if options.get("include_usage") is True:
            chunks.append({**chunk(*head, {}), "choices": [], "usage": usage(*reply.tokens)})
        events = "".join([*(f"data: {json.dumps(each)}\n\n" for each in chunks), "data: [DONE]\n\n"]).encode()
        return web.Response(body=events, content_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _reply(self, session: _RolloutSession, calling: Awaitable[Reply]) -> Reply:
        turn = asyncio.ensure_future(calling)
        session.turns.add(turn)
        try:
            return await turn
        except GenerationFailed as error:
            raise _Refused(502, str(error), "generation_failed") from error
        except ContextFull as error:
            raise _Refused(400, str(error), "context_length_exceeded") from error
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if handler is not None and handler.cancelling():
                raise
            raise _Refused(401, "the episode is over", "invalid_api_key") from None
        except Exception as error:  # a defect of Tidemill; the agent must not score it as an answer
            LOG.exception("a call of an agent program raised")
            raise _Refused(500, f"{type(error).__name__}: {error}", "generation_failed") from error
        finally:
            session.turns.discard(turn)

    async def _outcome(self, request: web.Request, session: _RolloutSession) -> web.Response:
        try:
            given = _PostedResult.model_validate(json_object(await request.read()))
        except ValidationError as error:
            raise _Refused(400, f"this is no result: {faults(error, 'result', most=3)}") from error
        rewards = tuple(RewardComponent(name, value, 1.0) for name, value in given.rewards.items())
        score = Score(rewards, given.success, given.metrics)
        if fault := score.fault():
            raise _Refused(400, f"this is no result: {fault}")
        try:
            session.policy.post(score)
        except ValueError as error:
            raise _Refused(400, str(error)) from error
        return _json({"reward": score.total})


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = json.dumps(value).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    named = re.match(r"`?([a-z_]+)(?=[`\[])", message) if status == 400 and code is None else None
    error = {"message": message, "type": kind, "param": named[1] if named else None, "code": code}
    # A repeated request gets the same answer, but the openai client tries three times by default.
    return _json({"error": error}, status, {"x-should-retry": "false"})
