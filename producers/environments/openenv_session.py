"""A session of a running OpenEnv server, over its WebSocket: reset, steps, tools.

The protocol is that of the package `openenv` 0.10 and of `openenv-core` before it: JSON messages {"type", "data"}, one
answer to each, one environment for each connection. Anything but a well-formed answer of the server fails the episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from tidemill.producers.environments.base import EnvironmentFailed, faults

MOST_BYTES = 16 << 20
"""Largest message of a server."""
PAUSE_S = 0.25
"""Before a server that had no free session is asked again."""
CLOSE_S = 1.0
"""Longest time that a server gets to close a connection."""


class ServerFull(EnvironmentFailed):
    """The server has no free session now."""


class RefusedAction(EnvironmentFailed):
    """An action that does not fit the server's model of actions; the text is the server's."""


class OpenEnvStep(BaseModel):
    """A server's answer to a reset or a step."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class OpenEnvSession:
    """One connection, and so one environment of the server."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._url, self._socket, self._timeout_s = url, socket, timeout_s

    async def reset(self, parameters: Mapping[str, object]) -> OpenEnvStep:
        """Begin an episode. Raises EnvironmentFailed."""
        return self._step(await self._answer({"type": "reset", "data": dict(parameters)}))

    async def step(self, action: Mapping[str, object]) -> OpenEnvStep:
        """Act. Raises RefusedAction, EnvironmentFailed."""
        return self._step(await self._answer({"type": "step", "data": dict(action)}))

    def _step(self, data: object) -> OpenEnvStep:
        try:
            return OpenEnvStep.model_validate(data)
        except ValidationError as error:
            raise EnvironmentFailed(f"{self._url}: its answer is no observation: {faults(error, 'data')}") from error

    async def _answer(self, message: Mapping[str, object]) -> object:
        """The data of the answer to a message. Raises RefusedAction, ServerFull, EnvironmentFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps(message))
                frame = await self._socket.receive()
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"{self._url}: no answer to {message['type']} within {self._timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailed(f"{self._url}: {error!r}") from error
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFailed(f"{self._url}: {frame.type.name} in place of an answer to {message['type']}")
        try:
            answer = json.loads(frame.data)
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailed(f"{self._url}: its answer to {message['type']} is no JSON: {error}") from error
        match answer:
            case {"type": "observation", "data": data}:
                return data
            case {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": text}}:
                raise ServerFull(f"{self._url}: {text}")
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", **more}} if message["type"] == "step":
                raise RefusedAction(f"the server refuses the action: {json.dumps(more)[:500]}")
            case {"type": "error", "data": {"code": code, "message": text}}:
                raise EnvironmentFailed(f"{self._url}: {message['type']} failed: {str(text)[:500]} ({code})")
            case _:
                raise EnvironmentFailed(f"{self._url}: its answer to {message['type']} is {frame.data[:200]}")


@asynccontextmanager
async def openenv_session(
    url: str, parameters: Mapping[str, object], timeout_s: float, wait_s: float
) -> AsyncIterator[tuple[OpenEnvSession, OpenEnvStep]]:
    """A session and the first observation of an episode.

    Args:
        url: of the server, http or https.
        parameters: of the reset.
        timeout_s: longest time to connect, and for one answer.
        wait_s: longest time to wait for a free session.

    Raises EnvironmentFailed.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    async with aiohttp.ClientSession() as http:
        while True:
            socket = await _connected(http, url, timeout_s)
            session = OpenEnvSession(url, socket, timeout_s)
            try:
                try:
                    first = await session.reset(parameters)
                except ServerFull:
                    if loop.time() > give_up_at:
                        raise
                else:
                    yield session, first
                    return
            finally:
                # End the session; a server that is gone needs no word
                try:
                    async with asyncio.timeout(CLOSE_S):
                        await socket.send_str(json.dumps({"type": "close"}))
                except (TimeoutError, aiohttp.ClientError, OSError):
                    pass
                await socket.close()
            await asyncio.sleep(PAUSE_S)


async def action_schema(url: str, timeout_s: float) -> Mapping[str, Any]:
    """The JSON schema of a server's actions. Raises EnvironmentFailed."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession(raise_for_status=True) as http:
            told = await (await http.get(f"{url}/schema")).json()
    except TimeoutError as error:
        raise EnvironmentFailed(f"{url}/schema: no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"{url}/schema: {type(error).__name__}: {error}") from error
    match told:
        case {"action": {"properties": dict(), **more} as schema}:
            return {**schema, "required": more.get("required") or []}
        case _:
            raise EnvironmentFailed(f"{url}/schema: it describes no action")


async def _connected(http: aiohttp.ClientSession, url: str, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
    timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
    try:
        async with asyncio.timeout(timeout_s):
            return await http.ws_connect(f"{url}/ws", timeout=timeout, max_msg_size=MOST_BYTES)
    except TimeoutError as error:
        raise EnvironmentFailed(f"{url}: no connection within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentFailed(f"{url}: no connection: {error}") from error
